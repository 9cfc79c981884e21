# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""MLA prefill in latent form on Hopper with FP8 (e4m3) queries and rows. Out is bf16.

A program works on 64 rows of scores at a time, as latent/kernel.py does, and walks their keys in
steps of 128. Scores are FP8 products. O is computed transposed, from values that are read from the
rows, converted to fp16 and multiplied out of registers (values.py).

| partition | warps | registers | does |
|---|---|---|---|
| left (default) | 4 | 176 | O^T of the left output columns |
| right | 4 | 176 | O^T of the right output columns |
| scores | 4 | 112 | scores, softmax, weights (scores.py); lse |
| producer | 4 | 48 | loads Q, gathers rows (rows.py) |

| barrier | number | completed by (count) | waited for by |
|---|---|---|---|
| q_ready | 1 | TMA bytes of Q (1) | scores |
| q_free | 1 | scores, after the last of a work item (1) | producer |
| ready | ST | the producer's threads: rows with their scales; it: validity (4 x 129) | scores |
| p_free | ST | left, right: the products of a step are done (2) | scores |
| sums_ready | 4 | scores: the divisors of a work item are written (1) | left, right |
| t_ready | 2 | producer: a work item is described in `info` (1) | all others |
| t_empty | 2 | all others: it is read (3) | producer |

That weights are written and that rows are read, named barriers say (signals.py). Divisors have four
places, because with ST 2 scores are at most two work items ahead.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from openmla.kernels.gluon.barriers import barrier_pair, barriers
from openmla.kernels.gluon.scores import LN_2, MINUS_INF, opaque_zero, signed
from openmla.kernels.hopper.dense.softmax import quad_sums
from openmla.kernels.hopper.latent.epilogue import divisors, place_of, write_stat
from openmla.kernels.hopper.latent.kernel import masked, wait_tile
from openmla.kernels.hopper.latent.softmax import follow, rescaled, row_sums
from openmla.kernels.hopper.latent.source import STEP
from openmla.kernels.hopper.latent.work_items import FIELDS, read_work_item
from openmla.kernels.hopper.sparse_fp8.epilogue import write_heads
from openmla.kernels.hopper.sparse_fp8.rows import ARRIVALS, PARTS, producer
from openmla.kernels.hopper.sparse_fp8.scores import (
    any_missing,
    begin_scores,
    finish_scores,
    higher,
    next_reference,
    row_scales,
    weigh,
)
from openmla.kernels.hopper.sparse_fp8.signals import signal_weights, wait_weights
from openmla.kernels.hopper.sparse_fp8.values import add_values

WARPS = gl.constexpr(4)


@gluon.jit
def slot_of(n, ST: gl.constexpr):
    """(slot of step number n, parity of its barriers)."""
    return n % ST + opaque_zero(), (n // ST) & 1


@gluon.jit
def tell_factor(stats, slot, factor, row_sum):
    """What O is multiplied by before a step, and for each warp's rows whether any is not 1."""
    stats[0].index(slot).store(factor)
    # As if the threads that share a row had a number each: then one instruction asks all of a warp.
    every = rescaled(gl.full_like(row_sum, 1.0), factor)
    moved = gl.reshape(gl.where(every == 1.0, 0, 1), [WARPS, 64])
    stats[1].index(slot).store(gl.max(moved, 1))


@gluon.jit
def rescale_heads(O, stats, slot):
    """O^T times the factor of each head; nothing is multiplied where all are 1."""
    ALL: gl.constexpr = gl.BlockedLayout([WARPS], [32], [WARPS], [0])  # every thread has all
    OL: gl.constexpr = O[0].type.layout
    o0, o1, o2, o3 = O
    if gl.max(stats[1].index(slot).load(ALL), 0) != 0:
        factor = stats[0].index(slot).load(gl.SliceLayout(0, OL))[None, :]
        o0 = o0 * factor
        o1 = o1 * factor
        o2 = o2 * factor
        o3 = o3 * factor
    return o0, o1, o2, o3


@gluon.jit
def put_weights(S, missing, state, slot, first, tile, smem, scale, HOW: gl.constexpr):
    """From the scores of keys `first` … to weights, for whoever multiplies values with them."""
    row_max, row_sum, highest = state
    factor, heads = scale
    _k, p_smem, validity, stats, scales = smem
    SL: gl.constexpr = S.type.layout
    S = masked(signed(S, HOW[0]), missing, validity, slot, tile, first, heads, HOW[3])
    highest = higher(highest, S, factor, HOW[2])
    before = row_max
    row_max = next_reference(S, before, factor, scales, slot, HOW, SL)
    rescale = follow(before, row_max)
    tell_factor(stats, slot, rescale, row_sum)
    row_sum = rescaled(row_sum, rescale)
    weights, row_sum = weigh(S, row_max, row_sum, factor, scales, slot, HOW, SL)
    p_smem.index(opaque_zero() + slot).store(weights.to(p_smem.dtype))
    fence_async_shared()
    signal_weights(slot)
    return row_max, row_sum, highest


@gluon.jit
def write_rows(row_max, row_sum, highest, place, heads, results, inverse, HOW: gl.constexpr):
    """What is one per row: the divisors, lse and the largest score."""
    _out, lse_out, logits_out, sink_ptr = results
    divisor, lse = divisors(row_max, row_sums(row_sum, row_max), place, heads, sink_ptr, HOW)
    inverse.store(divisor)
    if lse_out[0] is not None:
        write_stat(lse, lse_out, place, heads, HOW[3])
    if logits_out[0] is not None:
        write_stat(highest * LN_2, logits_out, place, heads, HOW[3])


@gluon.jit
def scores(info, q_smem, smem, bars, results, scale, HOW: gl.constexpr):
    """Scores and weights of every step."""
    k_smem, _p, validity, stats, scales = smem
    q_bars, ready, p_free, sums_ready, t_bars = bars
    q_ready, q_free = q_bars
    factor, heads, q_scale_ptr = scale
    ST: gl.constexpr = k_smem[0].shape[0]
    MASK: gl.constexpr = HOW[3]
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 32])
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    unit = 1.0 if HOW[6] else factor
    turn = gl.program_id(0) * 0
    n = turn  # steps so far, over all work items
    tile, steps = read_work_item(info, t_bars, turn, MASK, False)
    while steps > 0:
        place = place_of(tile, heads, MASK, False)
        row_scale = row_scales(q_scale_ptr, place, heads, factor, HOW, SL)
        row_max = gl.full([64], MINUS_INF, gl.float32, RL)
        row_sum = quad_sums(gl.zeros([64, STEP], gl.float32, SL), STEP)
        highest = row_max
        mbarrier.wait(q_ready, turn & 1)
        for j in range(0, steps):
            slot, phase = slot_of(n, ST)
            wait_tile(ready.index(slot), phase, True)
            S = begin_scores(q_smem, k_smem, slot, HOW, SL)
            missing = any_missing(validity, slot, MASK)
            mbarrier.wait(p_free.index(slot), phase ^ 1)
            S = finish_scores(S, scales, slot, row_scale, HOW, SL)
            if j == steps - 1:
                mbarrier.arrive(q_free, count=1)
            state = (row_max, row_sum, highest)
            row_max, row_sum, highest = put_weights(
                S, missing, state, slot, j * STEP, tile, smem, (unit, heads), HOW
            )
            n += 1
        write_rows(row_max, row_sum, highest, place, heads, results, stats[2].index(turn & 3), HOW)
        mbarrier.arrive(sums_ready.index(turn & 3), count=1)
        turn += 1
        tile, steps = read_work_item(info, t_bars, turn, MASK, False)


@gluon.jit
def no_sums(OL: gl.constexpr):
    """O^T before the first key."""
    zero = gl.zeros([64, 64], gl.float32, OL)
    return zero, gl.zeros_like(zero), gl.zeros_like(zero), gl.zeros_like(zero)


@gluon.jit
def values(info, smem, bars, out, heads, SIDE: gl.constexpr, HOW: gl.constexpr):
    """Half of the output columns: left (SIDE 0) or right (1)."""
    k_smem, p_smem, _validity, stats, _scales = smem
    _q_bars, _ready, p_free, sums_ready, t_bars = bars
    ST: gl.constexpr = k_smem[0].shape[0]
    MASK: gl.constexpr = HOW[3]
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    turn = gl.program_id(0) * 0
    n = turn
    tile, steps = read_work_item(info, t_bars, turn, MASK, False)
    while steps > 0:
        O = no_sums(OL)
        for _ in range(0, steps):
            slot, _phase = slot_of(n, ST)
            wait_weights(slot, SIDE)
            O = rescale_heads(O, stats, slot)
            O = add_values(O, k_smem[0], p_smem, slot, SIDE)
            mbarrier.arrive(p_free.index(slot), count=1)
            n += 1
        mbarrier.wait(sums_ready.index(turn & 3), (turn >> 2) & 1)
        place = place_of(tile, heads, MASK, False)
        write_heads(O, stats[2].index(turn & 3), out, place, heads, 0, 256 * SIDE, MASK)
        turn += 1
        tile, steps = read_work_item(info, t_bars, turn, MASK, False)


@gluon.jit
def left(info, smem, bars, out, heads, HOW: gl.constexpr):
    """The left output columns."""
    values(info, smem, bars, out, heads, 0, HOW)


@gluon.jit
def right(info, smem, bars, out, heads, HOW: gl.constexpr):
    """The right output columns."""
    values(info, smem, bars, out, heads, 1, HOW)


@gluon.jit
def column_tiles(
    NUMBER: gl.constexpr, ROWS: gl.constexpr, DIMS: gl.constexpr, LAYOUTS: gl.constexpr
):
    """NUMBER tiles of ROWS rows: latent and rope columns. A missing rope stands for the latent."""
    latent = gl.allocate_shared_memory(gl.float8e4nv, [NUMBER, ROWS, DIMS[0]], LAYOUTS[0])
    rope = latent
    if DIMS[1] > 0:
        rope = gl.allocate_shared_memory(gl.float8e4nv, [NUMBER, ROWS, DIMS[1]], LAYOUTS[1])
    return latent, rope


COUNTS = ["topk", "rows", "tiles", "head_blocks", "heads", "batch", "total_q", "rest_q", "factor"]
STRIDES = [
    "indices_stride", "stride_page", "stride_row", "scale_page", "scale_row", "out_stride_t",
    "out_stride_h", "lse_stride_t", "lse_stride_h", "logits_stride_t", "logits_stride_h",
]  # fmt: skip
# Vectors of 4-byte elements, read and written one by one: a slice of a tensor is as good as all.
VECTORS = [
    "indices_ptr", "lengths_ptr", "cu_ptr", "lse_ptr", "logits_ptr", "sink_ptr", "scale_ptr",
    "q_scale_ptr", "counter_ptr",
]  # fmt: skip


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def sparse_fp8_kernel(  # noqa: PLR0913
    q_latent_desc,
    q_rope_desc,
    data_ptr,
    scale_ptr,
    indices_ptr,
    lengths_ptr,
    cu_ptr,
    out_ptr,
    lse_ptr,
    logits_ptr,
    sink_ptr,
    q_scale_ptr,
    counter_ptr,
    factor,
    topk,
    rows,
    tiles,
    head_blocks,
    heads,
    batch,
    total_q,
    rest_q,
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
    ST: gl.constexpr,
    DIMS: gl.constexpr,
    PAGE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    MASK: gl.constexpr,
    SIGN: gl.constexpr,
    SCALED_VALUES: gl.constexpr,
    REGISTERS: gl.constexpr,
    LAYOUTS: gl.constexpr,
):
    """DIMS: columns of a latent, of rope. PAGE, PAGE_SIZE, MASK: as sparse_kernel. SCALED_VALUES:
    whether the scales of rows are those of their values too, not of scores alone. LAYOUTS: of tiles
    of a latent, of rope, of P.
    """
    SCALED: gl.constexpr = scale_ptr is not None
    HOW: gl.constexpr = (
        SIGN, False, logits_ptr is not None, MASK, True, False, q_scale_ptr is not None, SCALED,
        DIMS[1] > 0, SCALED_VALUES,
    )  # fmt: skip
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    k_smem = column_tiles(ST, STEP, DIMS, LAYOUTS)
    q_smem = column_tiles(1, 64, DIMS, LAYOUTS)
    p_smem = gl.allocate_shared_memory(gl.float16, [ST, 64, STEP], LAYOUTS[2])
    bias = gl.allocate_shared_memory(gl.float32, [ST, STEP], LINEAR)
    flags = gl.allocate_shared_memory(gl.int32, [ST, PARTS * WARPS], LINEAR)
    scales = bias
    if SCALED:
        scales = gl.allocate_shared_memory(gl.float32, [ST, STEP], LINEAR)
    factors = gl.allocate_shared_memory(gl.float32, [ST, 64], LINEAR)
    moved = gl.allocate_shared_memory(gl.int32, [ST, WARPS], LINEAR)
    inverses = gl.allocate_shared_memory(gl.float32, [4, 64], LINEAR)
    info = gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], LINEAR)
    q_bars = barrier_pair(1, 1)
    ready = barriers(ST, ARRIVALS)
    p_free = barriers(ST, 2)
    sums_ready = barriers(4, 1)
    t_bars = (barriers(2, 1), barriers(2, 3))
    smem = (k_smem, p_smem, (bias, flags), (factors, moved, inverses), scales)
    bars = (q_bars, ready, p_free, sums_ready, t_bars)
    out = (out_ptr, out_stride_t, out_stride_h)
    lse = (lse_ptr, lse_stride_t, lse_stride_h)
    max_logits = (logits_ptr, logits_stride_t, logits_stride_h)
    results = (out, lse, max_logits, sink_ptr)
    source = (
        indices_ptr, lengths_ptr, topk, indices_stride, rows, cu_ptr, batch, total_q, heads,
        PAGE_SIZE, MASK, None, rest_q, counter_ptr,
    )  # fmt: skip
    data = (data_ptr, stride_page, stride_row, scale_ptr, scale_page, scale_row)
    descs = (q_latent_desc, q_rope_desc)
    load_smem = (q_smem, k_smem, (bias, flags), scales)
    scale = (factor, heads, q_scale_ptr)
    load_bars = (q_bars, ready, t_bars)
    gl.warp_specialize(
        [
            (left, (info, smem, bars, out, heads, HOW)),
            (right, (info, smem, bars, out, heads, HOW)),
            (scores, (info, q_smem, smem, bars, results, scale, HOW)),
            (
                producer,
                (info, source, data, (tiles, head_blocks), descs, load_smem, load_bars, ST, PAGE,
                 DIMS[1] > 0),
            ),
        ],
        [4, 4, 4],
        [REGISTERS[0], REGISTERS[1], REGISTERS[2]],
    )  # fmt: skip
