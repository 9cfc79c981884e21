"""Which cache rows a token attends to: a list of indices, checked, as descriptors count rows.

A list is (pointer to the token's indices, how many of them count, rows of the pool, descriptor rows
from page to page, descriptor rows from row to row). Pages lie any multiple of 16 bytes apart, so a
descriptor's row may be shorter than a cache row; with pages back to back all steps are 1.

In the latent form nobody wrote the list: it is all keys of the token's sequence, if causal up to
its own. Then the pointer is to the sequence's line of the block table, from which indices follow.
HOW, here as in load.py: HOW[5] is the page size of that table, 0 for lists.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

from openmla.kernels.gluon.offsets import cut, span_of

CHUNK = gl.constexpr(32)  # sequences looked at together
NOWHERE = gl.constexpr(-1)  # a row outside the tensor: TMA fills it with zeros


@gluon.constexpr_function
def bits_layout(ctas):
    """[bytes, 8 bits] in a warp, the same in every CTA."""
    return gl.BlockedLayout([1, 8], [32, 1], [1, 1], [1, 0], [[0, 0]] if ctas > 1 else [])


@gluon.constexpr_function
def list_layout(ctas):
    """Listed keys in a warp, the same in every CTA."""
    return gl.BlockedLayout([8], [32], [1], [0], [[0]] if ctas > 1 else [])


@gluon.constexpr_function
def lanes_layout(warps, ctas):
    """A number per lane, the same in every warp and CTA."""
    return gl.BlockedLayout([1], [32], [warps], [0], [[0]] if ctas > 1 else [])


@gluon.constexpr_function
def vector_layout(ctas):
    """A vector in the shared memory of every CTA."""
    return gl.SwizzledSharedLayout(1, 1, 1, [0], [[0]] if ctas > 1 else [])


@gluon.jit
def count_of(lengths_ptr, token, topk):
    """How many indices of a token count."""
    count = topk
    if lengths_ptr is not None:
        count = gl.minimum(gl.load(lengths_ptr + token), topk)
    return gl.maximum(count, 0)


@gluon.jit
def sequence_of(token, cu_ptr, batch, CTAS: gl.constexpr):
    """The sequence of a token, `batch` after the last: how many sequences end at or before it."""
    LANES: gl.constexpr = lanes_layout(gl.num_warps(), CTAS)
    sequence = token * 0
    for first in range(0, batch, CHUNK):
        at = first + gl.arange(0, CHUNK, LANES)
        end = gl.load(cu_ptr + at + 1, mask=at < batch, other=0x7FFFFFFF)
        sequence += gl.sum(gl.where(end <= token, 1, 0), 0)
    return sequence


@gluon.jit
def keys_seen(token, cu_ptr, lengths_ptr, batch, tokens, most, HOW: gl.constexpr):
    """(sequence of a token, how many of its keys the token sees); none after the last sequence."""
    sequence = sequence_of(token, cu_ptr, batch, HOW[4])
    exists = sequence < batch
    here = gl.maximum(gl.minimum(sequence, batch - 1), 0)
    count = cut(gl.load(lengths_ptr + here, mask=exists, other=0), most)
    if HOW[6]:  # causal
        stop = gl.load(cu_ptr + here + 1, mask=exists, other=0)
        count -= span_of(token + 1, stop, tokens)[1]
    return here, gl.maximum(count, 0)


@gluon.jit
def steps_of(count, B_TOPK: gl.constexpr):
    """Steps over the list; one even for a token that sees nothing."""
    return gl.maximum((count + (B_TOPK - 1)) // B_TOPK, 1)


@gluon.jit
def listed(keys, first, N: gl.constexpr, LAYOUT: gl.constexpr, HOW: gl.constexpr):
    """Indices first … first + N - 1 of the list, and whether each counts."""
    line, count, rows, _, _ = keys
    TABLE: gl.constexpr = HOW[5]
    at = first + gl.arange(0, N, LAYOUT)
    if TABLE > 0:
        page = gl.load(line + at // TABLE, mask=at < count, other=-1)
        index = gl.where(page >= 0, page * TABLE + at % TABLE, -1)
    else:
        index = gl.load(line + at, mask=at < count, other=-1)
    return index, (index >= 0) & (index < rows)


@gluon.jit
def descriptor_rows(keys, first, N: gl.constexpr, LAYOUT: gl.constexpr, HOW: gl.constexpr):
    """The rows those indices name, NOWHERE for one that does not count."""
    _, _, _, page_step, row_step = keys
    PAGE: gl.constexpr = HOW[2]
    index, ok = listed(keys, first, N, LAYOUT, HOW)
    row = index * row_step
    if PAGE > 0:
        row = index // PAGE * page_step + index % PAGE * row_step
    return gl.where(ok, row, NOWHERE)


@gluon.jit
def wait_for_step(barrier, step, NB: gl.constexpr):
    """Wait until `step` has completed its barrier; steps before the first have."""
    if step >= 0:
        mbarrier.wait(barrier.index(step % NB), (step // NB) & 1)


@gluon.jit
def kv_valid_producer(keys, is_k_valid, k_valid_ready, k_valid_free, steps, HOW: gl.constexpr):
    """One bit per key of a step, eight to a byte: does its index count?"""
    B_TOPK: gl.constexpr = HOW[0]
    NB: gl.constexpr = HOW[1]
    BYTES: gl.constexpr = B_TOPK // 8
    L: gl.constexpr = bits_layout(HOW[4])
    FLAT: gl.constexpr = list_layout(HOW[4])
    bit = gl.arange(0, 8, gl.SliceLayout(0, L))[None, :]
    for k in range(0, steps):
        _, ok = listed(keys, k * B_TOPK, B_TOPK, FLAT, HOW)
        grouped = gl.convert_layout(gl.reshape(ok.to(gl.int32), [BYTES, 8]), L)
        wait_for_step(k_valid_free, k - NB, NB)
        is_k_valid.index(k % NB).store(gl.sum(grouped << bit, 1).to(gl.uint8))
        mbarrier.arrive(k_valid_ready.index(k % NB), count=1)
