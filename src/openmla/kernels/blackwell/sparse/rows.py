"""Which cache rows a token attends to: its list of indices, checked, as descriptors count rows.

A list is (pointer to the token's indices, how many of them count, rows of the pool, descriptor rows
from page to page, descriptor rows from row to row). Pages lie any multiple of 16 bytes apart, so a
descriptor's row may be shorter than a cache row; with pages back to back all steps are 1.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

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
def steps_of(count, B_TOPK: gl.constexpr):
    """Steps over the list; one even for a token that sees nothing."""
    return gl.maximum((count + (B_TOPK - 1)) // B_TOPK, 1)


@gluon.jit
def listed(keys, first, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Indices first … first + N - 1 of the list, and whether each counts."""
    indices, count, rows, _, _ = keys
    at = first + gl.arange(0, N, LAYOUT)
    index = gl.load(indices + at, mask=at < count, other=-1)
    return index, (index >= 0) & (index < rows)


@gluon.jit
def descriptor_rows(keys, first, N: gl.constexpr, LAYOUT: gl.constexpr, PAGE: gl.constexpr):
    """The rows those indices name, NOWHERE for one that does not count."""
    _, _, _, page_step, row_step = keys
    index, ok = listed(keys, first, N, LAYOUT)
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
        _, ok = listed(keys, k * B_TOPK, B_TOPK, FLAT)
        grouped = gl.convert_layout(gl.reshape(ok.to(gl.int32), [BYTES, 8]), L)
        wait_for_step(k_valid_free, k - NB, NB)
        is_k_valid.index(k % NB).store(gl.sum(grouped << bit, 1).to(gl.uint8))
        mbarrier.arrive(k_valid_ready.index(k % NB), count=1)
