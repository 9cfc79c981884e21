"""What a pair of CTAs works on: tokens in turn, each with its list of rows, KEYS at a time.

The lists of all tokens are a sparse.records.TokenLists; for INDEXING see sparse/rows.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

from openmla.kernels.blackwell.pair.records import Item
from openmla.kernels.blackwell.sparse.rows import count_of, keys_seen, steps_of

KEYS = gl.constexpr(256)  # keys of a step
ROWS = gl.constexpr(128)  # heads of both CTAs


@gluon.constexpr_function
def barrier_layout(common):
    """One barrier for both CTAs, or one for each."""
    return mbarrier.MBarrierLayout(cga_layout=[[0 if common else 1]])


@gluon.jit
def barriers(NUMBER: gl.constexpr, COMMON: gl.constexpr):
    """NUMBER mbarriers, each completed by one arrival, or, if COMMON, by one of each CTA."""
    EACH: gl.constexpr = 1 if COMMON else 2
    LAYOUT: gl.constexpr = barrier_layout(COMMON)
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, EACH], LAYOUT)
    for i in gl.static_range(NUMBER):
        mbarrier.init(made.index(i), count=1)
    return made


@gluon.jit
def token_of(number, lists):
    """The token of the number-th item. The last tokens of a sequence see most keys, and come
    first."""
    token = number
    if lists.cu_seqlens is not None:
        token = lists.tokens - 1 - number
    return token


@gluon.jit
def item_of(number, lists, INDEXING: gl.constexpr):
    """The number-th item."""
    token = token_of(number, lists)
    line = token
    if lists.cu_seqlens is None:
        count = count_of(lists, token)
    else:
        line, count = keys_seen(token, lists, INDEXING)
    indices = lists.indices + line.to(gl.int64) * lists.stride
    return Item(token=token, indices=indices, length=count, steps=steps_of(count, KEYS))


@gluon.jit
def after(slot, phase, SLOTS: gl.constexpr):
    """The next slot of the ring, and the phase of its barriers."""
    last = slot == SLOTS - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)
