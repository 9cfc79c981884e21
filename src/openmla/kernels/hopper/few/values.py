# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""Softmax and values of few queries: a program takes 64 heads of one query and WIDTH columns of V.

The second of two launches (scores.py is the first). A program walks all keys of the list, in steps
of two blocks of 64, and does for its columns what the latent kernel does for all of them, in the
same order: the reference moves from block to block (latent/softmax.py), sums of weights are kept by
block of a step, O is rescaled before each product. So the bits are the same, whatever the number of
programs.

| partition | warps | does, step by step |
|---|---|---|
| multiply (default) | 4 | O times a factor, + P0 · V0, times a factor, + P1 · V1 |
| weights | 8 | scores, loaded two steps ahead, to P, and the factors; in the end lse and sums |
| rows | 4 | rows to V: copied, or loaded ahead and dequantized |

| barrier | number | completed by (count) | waited for by |
|---|---|---|---|
| p_ready | RING | weights: P and factors of a step (1) | multiply |
| v_ready | RING | rows: V of a step (1; of 128 columns 2; threads that copy: 128) | multiply |
| free | RING | multiply: both are read (1) | weights, rows |
| done | 1 | weights: the last sums (1) | multiply |

Who multiplies also fences what the others stored: a fence waits for all loads of its thread, and
only the others have some on their way.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openmla.kernels.gluon.barriers import barriers
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

RING = gl.constexpr(4)  # steps whose weights and rows are in shared memory
WEIGHT_WARPS = gl.constexpr(8)
ROW_WARPS = gl.constexpr(4)


@gluon.constexpr_function
def blocks_together(width):
    """Blocks of FP8 rows that are loaded at a time: registers hold three times as many."""
    return 2 if width <= 64 else 1


@gluon.jit
def slot_of(j):
    """(slot of step j, parity of its barriers)."""
    return j % RING, (j // RING) & 1


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
def write_columns(O, factors, out, query, first, heads, chunk):
    """Normalize, round and store; zeros where a factor is 0."""
    out_ptr, stride_t, stride_h = out
    OL: gl.constexpr = O.type.layout
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


@gluon.jit
def weights(source, spaces, smem, bars, stats, factor, heads, SL: gl.constexpr, HEADS: gl.constexpr,
            OVERLAP: gl.constexpr):  # fmt: skip
    """P and factors of every step; then lse, largest scores and 1 / sums."""
    own, at, query, first_head, chunk = source
    p_smem, factors, inverses, _ring = smem
    p_ready, _v_ready, free, done = bars
    lse, logits, sink_ptr = stats
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    if OVERLAP:
        wait_for_kernel_before()
    loaded = load_scores(spaces, at, SL, HEADS)
    ahead = load_scores(spaces, at + gl.minimum(own - 1, 1) * HEADS, SL, HEADS)
    row_max = gl.full([64], MINUS_INF, gl.float32, RL)
    highest = row_max
    row_sum = gl.sum(gl.sum(gl.reshape(gl.zeros_like(loaded[0]), [64, 2, KEYS // 8, 4, 2]), 4), 2)
    for j in range(0, own):
        later = load_scores(spaces, at + gl.minimum(j + 2, own - 1) * HEADS, SL, HEADS)
        highest = gl.maximum(gl.maximum(highest, loaded[1]), loaded[2])
        P, rescale, row_max, row_sum = weigh(loaded, row_max, row_sum, factor)
        slot, phase = slot_of(j)
        mbarrier.wait(free.index(slot), phase ^ 1)
        p_smem.index(slot).store(P.to(p_smem.dtype))
        factors.index(2 * slot).store(rescale[0])
        factors.index(2 * slot + 1).store(rescale[1])
        mbarrier.arrive(p_ready.index(slot), count=1)
        loaded = ahead
        ahead = later
    every = gl.convert_layout(gl.sum(gl.sum(row_sum, 2), 1), RL)
    head = gl.minimum(gl.arange(0, 64, RL) + first_head, heads - 1)
    inverse, sums, empty = normalize(row_max, every, sink_ptr, head)
    inverses.store(gl.where(empty, 0.0, inverse))
    mbarrier.arrive(done, count=1)
    if chunk == 0:
        if lse[0] is not None:
            write_stat(sums, lse, query, first_head, heads)
        if logits[0] is not None:
            write_stat(highest * factor * LN_2, logits, query, first_head, heads)


@gluon.jit
def some_keys(source, query, count, first, BLOCKS: gl.constexpr, LAYOUT: gl.constexpr):
    """Physical rows of BLOCKS blocks, from number `first` on."""
    keys = ()
    for i in gl.static_range(BLOCKS):
        keys += (listed(source, query, count, (first + i) * KEYS, LAYOUT),)
    return keys


@gluon.jit
def fetch(rows, keys, chunk, WIDTH: gl.constexpr, CACHE: gl.constexpr):
    """Start loading the rows of some blocks into registers."""
    raw = ()
    for i in gl.static_range(len(keys)):
        raw += (words(rows, keys[i], chunk, WIDTH, CACHE, ROW_WARPS),)
        raw += (scales(rows, keys[i], chunk, WIDTH, CACHE, ROW_WARPS),)
    return raw


@gluon.jit
def copied_rows(source, rows, count, smem, bars, CACHE: gl.constexpr):
    """V of every step, of plain rows."""
    own, _at, query, _first_head, chunk = source[0]
    ring = smem[3]
    _p_ready, v_ready, free, _done = bars
    KL: gl.constexpr = key_layout(ring.shape[2], 0, ROW_WARPS)
    keys = some_keys(source[1], query, count, own * 0, 2, KL)
    for j in range(0, own):
        later = some_keys(source[1], query, count, 2 * j + 2, 2, KL)
        slot, phase = slot_of(j)
        mbarrier.wait(free.index(slot), phase ^ 1)
        copied(ring.index(2 * slot), rows, keys[0], chunk, CACHE, ROW_WARPS)
        copied(ring.index(2 * slot + 1), rows, keys[1], chunk, CACHE, ROW_WARPS)
        async_copy.mbarrier_arrive(v_ready.index(slot), increment_count=False)
        keys = later


@gluon.jit
def dequantized_rows(source, rows, count, smem, bars, CACHE: gl.constexpr):
    """V of every step, of rows of an FP8 cache: TOGETHER blocks at a time, twice as many ahead."""
    own, _at, query, _first_head, chunk = source[0]
    ring = smem[3]
    _p_ready, v_ready, free, _done = bars
    WIDTH: gl.constexpr = ring.shape[2]
    TOGETHER: gl.constexpr = blocks_together(WIDTH)
    KL: gl.constexpr = key_layout(WIDTH, CACHE[1], ROW_WARPS)
    first = own * 0
    keys = some_keys(source[1], query, count, first, TOGETHER, KL)
    raw = fetch(rows, keys, chunk, WIDTH, CACHE)
    keys = some_keys(source[1], query, count, first + TOGETHER, TOGETHER, KL)
    ahead = fetch(rows, keys, chunk, WIDTH, CACHE)
    keys = some_keys(source[1], query, count, first + 2 * TOGETHER, TOGETHER, KL)
    for block in range(0, 2 * own, TOGETHER):
        later = fetch(rows, keys, chunk, WIDTH, CACHE)
        keys = some_keys(source[1], query, count, block + 3 * TOGETHER, TOGETHER, KL)
        slot, phase = slot_of(block // 2)
        mbarrier.wait(free.index(slot), phase ^ 1)
        for i in gl.static_range(TOGETHER):
            tile = ring.index(2 * slot + (block + i) % 2)
            tile.store(dequantized(raw[2 * i], raw[2 * i + 1]))
        mbarrier.arrive(v_ready.index(slot), count=1)
        raw = ahead
        ahead = later


@gluon.jit
def rows_of_v(source, rows, count, smem, bars, CACHE: gl.constexpr):
    """V of every step."""
    if CACHE[1] > 0:
        dequantized_rows(source, rows, count, smem, bars, CACHE)
    else:
        copied_rows(source, rows, count, smem, bars, CACHE)


@gluon.jit
def multiply(source, smem, bars, out, heads):
    """O of every step, normalized and stored in the end."""
    own, _at, query, first_head, chunk = source
    p_smem, factors, inverses, ring = smem
    p_ready, v_ready, free, done = bars
    WIDTH: gl.constexpr = ring.shape[2]
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    RL: gl.constexpr = gl.SliceLayout(1, OL)
    O = gl.zeros([64, WIDTH], gl.float32, OL)
    for j in range(0, own):
        slot, phase = slot_of(j)
        mbarrier.wait(p_ready.index(slot), phase)
        mbarrier.wait(v_ready.index(slot), phase)
        fence_async_shared()
        for block in gl.static_range(2):
            P = p_smem.index(slot).slice(block * KEYS, KEYS, dim=1)
            O = O * factors.index(2 * slot + block).load(RL)[:, None]
            O = warpgroup_mma(P, ring.index(2 * slot + block), O, is_async=True)
            O = warpgroup_mma_wait(0, deps=(O,))
        mbarrier.arrive(free.index(slot), count=1)
    mbarrier.wait(done, 0)
    write_columns(O, inverses.load(RL)[:, None], out, query, first_head, heads, chunk)


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
    REGISTERS: gl.constexpr,
):
    """Columns `program % (D_V / WIDTH)` of tile `program // (D_V / WIDTH)`, HEADS / 64 of them for
    each query. LAYOUTS: of tiles of V, of P. REGISTERS: weights, rows."""
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    CACHE: gl.constexpr = (PAGE, SCALED)
    CHUNKS: gl.constexpr = D_V // WIDTH
    TILES: gl.constexpr = HEADS // 64
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16])
    VECTOR_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    ring = gl.allocate_shared_memory(DTYPE, [2 * RING, KEYS, WIDTH], LAYOUTS[0])
    p_smem = gl.allocate_shared_memory(DTYPE, [RING, 64, STEP], LAYOUTS[1])
    factors = gl.allocate_shared_memory(gl.float32, [2 * RING, 64], VECTOR_LAYOUT)
    inverses = gl.allocate_shared_memory(gl.float32, [64], VECTOR_LAYOUT)
    smem = (p_smem, factors, inverses, ring)
    v_ready = barriers(RING, 2 // blocks_together(WIDTH) if SCALED > 0 else 32 * ROW_WARPS)
    bars = (barriers(RING, 1), v_ready, barriers(RING, 1), barriers(1, 1).index(0))
    chunk = gl.program_id(0) % CHUNKS
    first_head = gl.program_id(0) // CHUNKS % TILES * 64
    query = gl.program_id(0) // (CHUNKS * TILES)
    count = places(lengths_ptr, query, topk)
    own = steps_of(count)
    at = query * steps * HEADS + first_head
    source = (own, at, query, first_head, chunk)
    spaces = (scores_ptr, maxima_ptr)
    lists = (source, (indices_ptr, indices_stride, rows))
    data = (data_ptr, stride_page, stride_row, scale_ptr, scale_page, scale_row, rope_ptr)
    out = (out_ptr, out_stride_t, out_stride_h)
    lse = (lse_ptr, lse_stride_t, lse_stride_h)
    stats = (lse, (logits_ptr, logits_stride_t, logits_stride_h), sink_ptr)
    gl.warp_specialize(
        [
            (multiply, (source, smem, bars, out, heads)),
            (weights, (source, spaces, smem, bars, stats, factor, heads, SL, HEADS, OVERLAP)),
            (rows_of_v, (lists, data, count, smem, bars, CACHE)),
        ],
        [WEIGHT_WARPS, ROW_WARPS],
        [REGISTERS[0], REGISTERS[1]],
    )
