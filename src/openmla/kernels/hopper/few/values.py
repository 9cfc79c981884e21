# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""Softmax and values of few queries: a program takes 64 heads of one query and WIDTH columns of V.

The second of two launches (scores.py is the first). A program walks all keys of the list, in steps
of two blocks of 64, and does for its columns what the latent kernel does for all of them, in the
same order: the reference moves from block to block (latent/softmax.py), sums of weights are kept by
block of a step, O is rescaled before each product. So the bits are the same, whatever the number of
programs.

While the tensor cores multiply a step, the weights of the next are made, and what the one after it
needs is on its way:

| | |
|---|---|
| | scores and rows of step j + 1 and indices of step j + 2 are asked for |
| P0 · V0 of step j - 1 | weights of step j |
| P1 · V1 of step j - 1 | weights and rows of step j are stored |
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openmla.kernels.gluon.compat import thread_barrier
from openmla.kernels.gluon.dependent import wait_for_kernel_before
from openmla.kernels.gluon.dequantize.rows import dequantized
from openmla.kernels.gluon.scores import LN_2, MINUS_INF, normalize
from openmla.kernels.hopper.few.rows import (
    KEYS,
    STEP,
    VECTOR,
    copied,
    key_layout,
    listed,
    places,
    scales,
    steps_of,
    words,
)
from openmla.kernels.hopper.latent.softmax import THRESHOLD, finite, follow

RING = gl.constexpr(3)  # steps whose rows are in shared memory


@gluon.jit
def load_scores(spaces, first, SL: gl.constexpr, HEADS: gl.constexpr):
    """(scores [64, 128] of a step, the largest of each row of its two blocks)."""
    scores_ptr, maxima_ptr = spaces
    row = gl.arange(0, 64, gl.SliceLayout(1, SL)) + first
    column = gl.arange(0, STEP, gl.SliceLayout(0, SL))
    S = gl.load(scores_ptr + (row * STEP)[:, None] + column[None, :])
    # Steps and blocks are counted alike: `first` is a step's number times HEADS, plus a head.
    at = maxima_ptr + (first // HEADS * HEADS + row)
    return S, gl.load(at), gl.load(at + HEADS)


@gluon.jit
def moved(highest, row_max):
    """The reference after a block: it moves only to a score that exceeds it by much."""
    return gl.where(highest > row_max + THRESHOLD, highest, row_max)


@gluon.jit
def weigh(loaded, row_max, row_sum, factor):
    """(weights of a step, factors of O before each block, reference, partial sums [64, 2, 4])."""
    S, highest0, highest1 = loaded
    scores = gl.reshape(S, [64, 2, KEYS])
    L: gl.constexpr = scores.type.layout
    HL: gl.constexpr = gl.SliceLayout(2, L)
    row_max0 = moved(highest0 * factor, row_max)
    row_max1 = moved(highest1 * factor, row_max0)
    rescale0 = follow(row_max, row_max0)
    rescale1 = follow(row_max0, row_max1)
    half = gl.arange(0, 2, gl.SliceLayout(0, HL))[None, :]
    ref0 = gl.convert_layout(finite(row_max0), gl.SliceLayout(1, HL))[:, None]
    ref1 = gl.convert_layout(finite(row_max1), gl.SliceLayout(1, HL))[:, None]
    P = gl.exp2(scores * factor - gl.where(half == 0, ref0, ref1)[:, :, None])
    quads = gl.sum(gl.sum(gl.reshape(P, [64, 2, KEYS // 8, 4, 2]), 4), 2)
    QL: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, quads.type.layout))
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, quads.type.layout)))[None, :, None]
    # The sums of block 0 are multiplied before each block, those of block 1 once, before it.
    before0 = gl.convert_layout(rescale0, QL)[:, None, None]
    both = gl.convert_layout(rescale0 * rescale1, QL)[:, None, None]
    after0 = gl.convert_layout(rescale1, QL)[:, None, None]
    row_sum = row_sum * gl.where(half == 0, before0, both) + quads
    row_sum = row_sum * gl.where(half == 0, after0, 1.0)
    P = gl.convert_layout(gl.reshape(P, [64, STEP]), S.type.layout)
    return P, (rescale0, rescale1), row_max1, row_sum


@gluon.jit
def rescaled(O, factor):
    """O times a factor per row."""
    return O * gl.convert_layout(factor, gl.SliceLayout(1, O.type.layout))[:, None]


@gluon.jit
def pair(source, query, count, j, LAYOUT: gl.constexpr):
    """Physical rows of the two blocks of step j."""
    return (
        listed(source, query, count, j * STEP, LAYOUT),
        listed(source, query, count, j * STEP + KEYS, LAYOUT),
    )


@gluon.jit
def fetch(ring, rows, keys, j, chunk, CACHE: gl.constexpr):
    """Start loading the rows of step j: of plain rows into the ring, of others into registers."""
    WIDTH: gl.constexpr = ring.shape[2]
    if CACHE[1] == 0:
        copied(ring.index(j % RING * 2), rows, keys[0], chunk, CACHE)
        copied(ring.index(j % RING * 2 + 1), rows, keys[1], chunk, CACHE)
        async_copy.commit_group()
        return ()
    else:
        return (
            words(rows, keys[0], chunk, WIDTH, CACHE),
            scales(rows, keys[0], chunk, WIDTH, CACHE),
            words(rows, keys[1], chunk, WIDTH, CACHE),
            scales(rows, keys[1], chunk, WIDTH, CACHE),
        )


@gluon.jit
def put(ring, p_smem, loaded, P, j, CACHE: gl.constexpr):
    """Weights of step j, and its rows if they are still in registers, where wgmma reads them."""
    p_smem.index(j % 2).store(P.to(p_smem.dtype))
    if CACHE[1] > 0:
        ring.index(j % RING * 2).store(dequantized(loaded[0], loaded[1]))
        ring.index(j % RING * 2 + 1).store(dequantized(loaded[2], loaded[3]))


@gluon.jit
def hand_over(CACHE: gl.constexpr, PENDING: gl.constexpr):
    """What this step stored or copied is seen by wgmma; PENDING: copies that may still be on their
    way."""
    if CACHE[1] == 0:
        async_copy.wait_group(PENDING)
    fence_async_shared()
    thread_barrier()


@gluon.jit
def product(O, p_smem, ring, j, BLOCK: gl.constexpr):
    """Start P · V of a block of step j."""
    P = p_smem.index(j % 2).slice(BLOCK * KEYS, KEYS, dim=1)
    return warpgroup_mma(P, ring.index(j % RING * 2 + BLOCK), O, is_async=True)


@gluon.jit
def write_columns(O, inverse, out, query, first, heads, chunk):
    """Normalize, round and store; zeros where `inverse` is 0."""
    out_ptr, stride_t, stride_h = out
    OL: gl.constexpr = O.type.layout
    factors = gl.convert_layout(inverse, gl.SliceLayout(1, OL))[:, None]
    result = gl.where(factors == 0.0, 0.0, O * factors).to(out_ptr.dtype.element_ty)
    head = gl.arange(0, 64, gl.SliceLayout(1, OL)) + first
    column = gl.arange(0, O.shape[1], gl.SliceLayout(0, OL)) + chunk * O.shape[1]
    start = out_ptr + query.to(gl.int64) * (stride_t.to(gl.int64) * VECTOR)
    start = start + head * (stride_h.to(gl.int64) * VECTOR)
    gl.store(start[:, None] + column[None, :], result, mask=(head < heads)[:, None])


@gluon.jit
def write_stat(values, stat, query, first, heads):
    """One fp32 value per row."""
    ptr, stride_t, stride_h = stat
    head = gl.arange(0, 64, values.type.layout) + first
    start = ptr + query.to(gl.int64) * stride_t.to(gl.int64)
    gl.store(start + head * stride_h.to(gl.int64), values, mask=head < heads)


COUNTS = ["topk", "rows", "steps", "heads", "factor"]
STRIDES = [
    "indices_stride", "stride_page", "stride_row", "scale_page", "scale_row", "out_stride_t",
    "out_stride_h", "lse_stride_t", "lse_stride_h", "logits_stride_t", "logits_stride_h",
]  # fmt: skip
VECTORS = ["indices_ptr", "lengths_ptr", "scale_ptr", "lse_ptr", "logits_ptr", "sink_ptr"]


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def values_kernel(  # noqa: PLR0913
    scores_ptr,
    maxima_ptr,
    data_ptr,
    scale_ptr,
    rope_ptr,
    indices_ptr,
    lengths_ptr,
    out_ptr,
    lse_ptr,
    logits_ptr,
    sink_ptr,
    factor,
    topk,
    rows,
    steps,
    heads,
    indices_stride,
    stride_page,
    stride_row,
    scale_page,
    scale_row,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    logits_stride_t,
    logits_stride_h,
    HEADS: gl.constexpr,
    D_V: gl.constexpr,
    WIDTH: gl.constexpr,
    PAGE: gl.constexpr,
    SCALED: gl.constexpr,
    LAYOUTS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Columns `program % (D_V / WIDTH)` of tile `program // (D_V / WIDTH)`, HEADS / 64 of them for
    each query. LAYOUTS: of tiles of V, of P."""
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    CACHE: gl.constexpr = (PAGE, SCALED)
    CHUNKS: gl.constexpr = D_V // WIDTH
    TILES: gl.constexpr = HEADS // 64
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, WIDTH // 2, 16])
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    KL: gl.constexpr = key_layout(WIDTH, SCALED)
    ring = gl.allocate_shared_memory(DTYPE, [2 * RING, KEYS, WIDTH], LAYOUTS[0])
    p_smem = gl.allocate_shared_memory(DTYPE, [2, 64, STEP], LAYOUTS[1])
    chunk = gl.program_id(0) % CHUNKS
    first_head = gl.program_id(0) // CHUNKS % TILES * 64
    query = gl.program_id(0) // (CHUNKS * TILES)
    count = places(lengths_ptr, query, topk)
    own = steps_of(count)
    source = (indices_ptr, indices_stride, rows)
    spaces = (scores_ptr, maxima_ptr)
    data = (data_ptr, stride_page, stride_row, scale_ptr, scale_page, scale_row, rope_ptr)
    at = query * steps * HEADS + first_head
    row_max = gl.full([64], MINUS_INF, gl.float32, RL)
    keys = pair(source, query, count, own * 0, KL)
    raw = fetch(ring, data, keys, 0, chunk, CACHE)
    keys = pair(source, query, count, own * 0 + 1, KL)
    if OVERLAP:
        wait_for_kernel_before()
    loaded = load_scores(spaces, at, SL, HEADS)
    ahead = load_scores(spaces, gl.where(own > 1, at + HEADS, at), SL, HEADS)
    raw_ahead = fetch(ring, data, keys, own * 0 + 1, chunk, CACHE)
    keys = pair(source, query, count, own * 0 + 2, KL)
    highest = gl.maximum(loaded[1], loaded[2])
    no_sums = gl.sum(gl.sum(gl.reshape(gl.zeros_like(loaded[0]), [64, 2, KEYS // 8, 4, 2]), 4), 2)
    P, rescale, row_max, row_sum = weigh(loaded, row_max, no_sums, factor)
    put(ring, p_smem, raw, P, own * 0, CACHE)
    O = gl.zeros([64, WIDTH], gl.float32, OL)
    hand_over(CACHE, 1)
    for j in range(1, own):
        loaded = ahead
        raw = raw_ahead
        # Before the fence of `hand_over`, which waits for what was loaded, come the weights.
        ahead = load_scores(spaces, at + gl.minimum(j + 1, own - 1) * HEADS, SL, HEADS)
        raw_ahead = fetch(ring, data, keys, j + 1, chunk, CACHE)
        keys = pair(source, query, count, j + 2, KL)
        O_next = product(rescaled(O, rescale[0]), p_smem, ring, j - 1, 0)
        highest = gl.maximum(gl.maximum(highest, loaded[1]), loaded[2])
        P, rescale_next, row_max, row_sum = weigh(loaded, row_max, row_sum, factor)
        O = warpgroup_mma_wait(0, deps=(O_next,))
        O_next = product(rescaled(O, rescale[1]), p_smem, ring, j - 1, 1)
        put(ring, p_smem, raw, P, j, CACHE)
        O = warpgroup_mma_wait(0, deps=(O_next,))
        rescale = rescale_next
        hand_over(CACHE, 1)
    O_next = product(rescaled(O, rescale[0]), p_smem, ring, own - 1, 0)
    O = warpgroup_mma_wait(0, deps=(O_next,))
    O_next = product(rescaled(O, rescale[1]), p_smem, ring, own - 1, 1)
    O = warpgroup_mma_wait(0, deps=(O_next,))
    if SCALED == 0:
        async_copy.wait_group(0)
    every = gl.convert_layout(gl.sum(gl.sum(row_sum, 2), 1), RL)
    head = gl.minimum(gl.arange(0, 64, RL) + first_head, heads - 1)
    inverse, lse, empty = normalize(row_max, every, sink_ptr, head)
    out = (out_ptr, out_stride_t, out_stride_h)
    write_columns(O, gl.where(empty, 0.0, inverse), out, query, first_head, heads, chunk)
    if chunk == 0:
        if lse_ptr is not None:
            write_stat(lse, (lse_ptr, lse_stride_t, lse_stride_h), query, first_head, heads)
        if logits_ptr is not None:
            logits = (logits_ptr, logits_stride_t, logits_stride_h)
            write_stat(highest * factor * LN_2, logits, query, first_head, heads)
