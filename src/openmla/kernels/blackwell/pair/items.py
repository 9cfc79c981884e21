"""What a pair of CTAs works on: tokens in turn, each with its list of rows, KEYS at a time.

work is (pointer to lists or block table, to their lengths, to the sequences' offsets or None,
stride of a list, most entries, tokens, sequences); see sparse/rows.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

from openmla.kernels.blackwell.sparse.rows import count_of, keys_seen, steps_of

KEYS = gl.constexpr(256)  # of a step
ROWS = gl.constexpr(128)  # heads of both CTAs


@gluon.constexpr_function
def barrier_layout(common):
    """One barrier for both CTAs, or one for each."""
    return mbarrier.MBarrierLayout(cga_layout=[[0 if common else 1]])


@gluon.jit
def barriers(NUMBER: gl.constexpr, COMMON: gl.constexpr):
    """NUMBER mbarriers, each completed by one arrival, or by one of each CTA if they share it."""
    EACH: gl.constexpr = 1 if COMMON else 2
    LAYOUT: gl.constexpr = barrier_layout(COMMON)
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, EACH], LAYOUT)
    for i in gl.static_range(NUMBER):
        mbarrier.init(made.index(i), count=1)
    return made


@gluon.jit
def token_of(number, work):
    """Of the number-th item. The last tokens of a sequence see most keys, and come first."""
    token = number
    if work[2] is not None:
        token = work[5] - 1 - number
    return token


@gluon.jit
def item_of(number, work, HOW: gl.constexpr):
    """(token, pointer to its list, how many entries count, steps) of the number-th item."""
    line_ptr, lengths_ptr, cu_ptr, stride, topk, tokens, batch = work
    token = token_of(number, work)
    of_line = token
    if cu_ptr is None:
        count = count_of(lengths_ptr, token, topk)
    else:
        of_line, count = keys_seen(token, cu_ptr, lengths_ptr, batch, tokens, topk, HOW)
    return token, line_ptr + of_line.to(gl.int64) * stride, count, steps_of(count, KEYS)


@gluon.jit
def after(slot, phase, SLOTS: gl.constexpr):
    """The next slot of the ring, and the phase of its barriers."""
    last = slot == SLOTS - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)
