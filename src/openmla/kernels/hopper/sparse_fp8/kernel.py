# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""MLA prefill in latent form on Hopper with FP8 (e4m3) queries and rows. Out is bf16.

A program works on 64 rows of scores at a time, as latent/kernel.py does, and walks their keys in
blocks of 64. Scores are FP8 products. O is computed transposed, from values that are read from the
rows, converted to fp16 and multiplied out of registers (values.py).

| partition | warps | registers | does |
|---|---|---|---|
| left (default) | 4 | 200 | O^T of the left output columns |
| right | 4 | 200 | O^T of the right output columns |
| scores | 4 | 72 | scores, softmax, weights (scores.py); lse |
| producer | 4 | 40 | loads Q, gathers rows (rows.py) |

| barrier | number | completed by (count) | waited for by |
|---|---|---|---|
| q_ready | 1 | TMA bytes of Q (1) | scores |
| q_free | 1 | scores, after the last of a work item (1) | producer |
| ready | R | threads of the producer: a block of rows with its scales (128) | all others |
| free | R | left, right: the products of its values are done (2) | producer |
| valid | R | producer: validity of a block is written (1) | scores |
| p_ready | R | scores: weights of a block, and factors of O, are written (1) | left, right |
| sums_ready | 4 | scores: the divisors of a work item are written (1) | left, right |
| t_ready | 2 | producer: a work item is described in `info` (1) | all others |
| t_empty | 2 | all others: it is read (3) | producer |

Weights of a block lie in a slot of their own number, so nobody has to say that they are read: when
the slot holds rows again, they are. Divisors have four places, because with R 4 scores are at most
three work items ahead.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from openmla.kernels.gluon.barriers import barrier_pair, barriers
from openmla.kernels.gluon.scores import LN_2, MINUS_INF, opaque_zero, signed
from openmla.kernels.hopper.latent.epilogue import divisors, place_of, write_stat
from openmla.kernels.hopper.latent.kernel import any_missing, higher, masked, wait_tile
from openmla.kernels.hopper.latent.softmax import first_sums, follow, rescaled, row_sums
from openmla.kernels.hopper.latent.work_items import FIELDS, read_work_item
from openmla.kernels.hopper.sparse_fp8.epilogue import write_half
from openmla.kernels.hopper.sparse_fp8.rows import producer
from openmla.kernels.hopper.sparse_fp8.scores import (
    begin_scores,
    finish_scores,
    next_reference,
    row_scales,
    weigh,
)
from openmla.kernels.hopper.sparse_fp8.values import add_values, landed, load_pairs

WARPS = gl.constexpr(4)


@gluon.jit
def slot_of(n, R: gl.constexpr):
    """(slot of block number n, parity of its barriers)."""
    return n % R, (n // R) & 1


@gluon.jit
def tell_factor(stats, slot, factor):
    """What O is multiplied by before a block, and for each warp's rows whether any is not 1."""
    stats[0].index(slot).store(factor)
    moved = gl.reshape(gl.where(factor == 1.0, 0, 1), [WARPS, 16])
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
def put_weights(S, missing, state, b, first, tile, smem, p_ready, scale, HOW: gl.constexpr):
    """From the scores of block b to its weights, for whoever multiplies values with them."""
    row_max, row_sum, highest = state
    factor, heads = scale
    _k, p_smem, validity, stats, scales = smem
    SL: gl.constexpr = S.type.layout
    S = masked(signed(S, HOW[0]), missing, validity, b, tile, first, heads, HOW[3])
    highest = higher(highest, S, factor, HOW[2])
    before = row_max
    row_max = next_reference(S, before, factor, scales, b, HOW, SL)
    rescale = follow(before, row_max)
    tell_factor(stats, b, rescale)
    row_sum = rescaled(row_sum, rescale)
    weights, row_sum = weigh(S, row_max, row_sum, factor, scales, b, HOW, SL)
    p_smem.index(opaque_zero() + b).store(weights.to(p_smem.dtype))
    fence_async_shared()
    mbarrier.arrive(p_ready.index(b), count=1)
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
    """Scores and weights of every block."""
    k_smem, _p, validity, stats, scales = smem
    q_bars, ready, _free, valid, p_ready, sums_ready, t_bars = bars
    q_ready, q_free = q_bars
    factor, heads, q_scale_ptr = scale
    R: gl.constexpr = k_smem[0].shape[0]
    MASK: gl.constexpr = HOW[3]
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    unit = 1.0 if HOW[6] else factor
    turn = gl.program_id(0) * 0
    n = turn  # blocks so far, over all work items
    tile, steps = read_work_item(info, t_bars, turn, MASK, False)
    while steps > 0:
        place = place_of(tile, heads, MASK, False)
        row_scale = row_scales(q_scale_ptr, place, heads, factor, HOW, SL)
        row_max = gl.full([64], MINUS_INF, gl.float32, RL)
        row_sum = first_sums(gl.zeros([64, 64], gl.float32, SL))
        highest = row_max
        mbarrier.wait(q_ready, turn & 1)
        for j in range(0, 2 * steps):
            b, phase = slot_of(n, R)
            wait_tile(ready.index(b), phase, True)
            S = begin_scores(q_smem, k_smem, b, HOW, SL)
            missing = any_missing(validity, valid, b, phase, MASK)
            S = finish_scores(S, scales, b, row_scale, HOW, SL)
            if j == 2 * steps - 1:
                mbarrier.arrive(q_free, count=1)
            state = (row_max, row_sum, highest)
            row_max, row_sum, highest = put_weights(
                S, missing, state, b, j * 64, tile, smem, p_ready, (unit, heads), HOW
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
    _q_bars, _ready, free, _valid, p_ready, sums_ready, t_bars = bars
    R: gl.constexpr = k_smem[0].shape[0]
    MASK: gl.constexpr = HOW[3]
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    turn = gl.program_id(0) * 0
    n = turn
    tile, steps = read_work_item(info, t_bars, turn, MASK, False)
    while steps > 0:
        O = no_sums(OL)
        for _ in range(0, steps):  # two blocks
            b, phase = slot_of(n, R)
            mbarrier.wait(p_ready.index(b), phase)
            O = rescale_heads(O, stats, b)
            pairs = load_pairs(k_smem[0], b, 2 * SIDE)
            O, flight = add_values(O, pairs, k_smem, p_smem, b, SIDE)
            mbarrier.wait(p_ready.index(b + 1), phase)
            pairs = load_pairs(k_smem[0], b + 1, 2 * SIDE)
            O = landed(O, flight)
            mbarrier.arrive(free.index(b), count=1)
            O = rescale_heads(O, stats, b + 1)
            O, flight = add_values(O, pairs, k_smem, p_smem, b + 1, SIDE)
            O = landed(O, flight)
            mbarrier.arrive(free.index(b + 1), count=1)
            n += 2
        mbarrier.wait(sums_ready.index(turn & 3), (turn >> 2) & 1)
        place = place_of(tile, heads, MASK, False)
        write_half(O, stats[2].index(turn & 3), out, place, heads, 256 * SIDE, MASK)
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
def column_tiles(NUMBER: gl.constexpr, DIMS: gl.constexpr, LAYOUTS: gl.constexpr):
    """NUMBER tiles of 64 rows: latent and rope columns. A missing rope stands for the latent."""
    latent = gl.allocate_shared_memory(gl.float8e4nv, [NUMBER, 64, DIMS[0]], LAYOUTS[0])
    rope = latent
    if DIMS[1] > 0:
        rope = gl.allocate_shared_memory(gl.float8e4nv, [NUMBER, 64, DIMS[1]], LAYOUTS[1])
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
    k_smem = column_tiles(2 * ST, DIMS, LAYOUTS)
    q_smem = column_tiles(1, DIMS, LAYOUTS)
    p_smem = gl.allocate_shared_memory(gl.float16, [2 * ST, 64, 64], LAYOUTS[2])
    bias = gl.allocate_shared_memory(gl.float32, [2 * ST, 64], LINEAR)
    flags = gl.allocate_shared_memory(gl.int32, [2 * ST, WARPS], LINEAR)
    scales = bias
    if SCALED:
        scales = gl.allocate_shared_memory(gl.float32, [2 * ST, 64], LINEAR)
    factors = gl.allocate_shared_memory(gl.float32, [2 * ST, 64], LINEAR)
    moved = gl.allocate_shared_memory(gl.int32, [2 * ST, WARPS], LINEAR)
    inverses = gl.allocate_shared_memory(gl.float32, [4, 64], LINEAR)
    info = gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], LINEAR)
    q_bars = barrier_pair(1, 1)
    ready = barriers(2 * ST, 128)
    free = barriers(2 * ST, 2)
    valid = barriers(2 * ST, 1)
    p_ready = barriers(2 * ST, 1)
    sums_ready = barriers(4, 1)
    t_bars = (barriers(2, 1), barriers(2, 3))
    smem = (k_smem, p_smem, (bias, flags), (factors, moved, inverses), scales)
    bars = (q_bars, ready, free, valid, p_ready, sums_ready, t_bars)
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
    load_bars = (q_bars, ready, free, valid, t_bars)
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
