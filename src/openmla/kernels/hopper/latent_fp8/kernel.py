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
| q_empty | 1 | scores, after the last of a work item (1) | producer |
| k_ready | ST | threads of the producer: rows, scales (4 x 128); it: validity (4 x 1) | scores |
| p_empty | ST | left, right: the products of a step are done (2) | scores |
| sums_ready | 4 | scores: the divisors of a work item are written (1) | left, right |
| item_ready | 2 | producer: a work item is published in `info` (1) | all others |
| item_empty | 2 | all others: it is read (3) | producer |

Named barriers (signals.py) signal that weights are written and that rows are read. Divisors have
four places, because with ST 2 scores are at most two work items ahead.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from openmla.kernels.gluon.barriers import barrier_pair, barriers
from openmla.kernels.gluon.dequantize.records import CacheRows
from openmla.kernels.gluon.pages import Pages
from openmla.kernels.gluon.ranges.records import Output
from openmla.kernels.gluon.scores import LN_2, MINUS_INF, opaque_zero, signed
from openmla.kernels.hopper.accumulator import quad_sums
from openmla.kernels.hopper.latent.epilogue import divisors, place_of, write_stat
from openmla.kernels.hopper.latent.records import (
    LISTED,
    Results,
    RowDescriptors,
    Sequences,
    Source,
    TileCounts,
    Validity,
)
from openmla.kernels.hopper.latent.signals import allocate_info, read_work_item, wait_tile
from openmla.kernels.hopper.latent.softmax import follow, rescaled, row_sums
from openmla.kernels.hopper.latent.source import STEP, masked
from openmla.kernels.hopper.latent_fp8.epilogue import write_heads
from openmla.kernels.hopper.latent_fp8.records import (
    Barriers,
    How,
    RowTiles,
    Smem,
    State,
    Stats,
)
from openmla.kernels.hopper.latent_fp8.rows import ARRIVALS, PARTS, producer
from openmla.kernels.hopper.latent_fp8.scores import (
    any_missing,
    begin_scores,
    finish_scores,
    higher,
    next_reference,
    row_scales,
    weigh,
)
from openmla.kernels.hopper.latent_fp8.signals import signal_weights, wait_weights
from openmla.kernels.hopper.latent_fp8.values import add_values

WARPS = gl.constexpr(4)


@gluon.jit
def slot_of(n, ST: gl.constexpr):
    """(slot of step number n, parity of its barriers)."""
    return n % ST + opaque_zero(), (n // ST) & 1


@gluon.jit
def put_factor(stats, slot, factor, row_sum):
    """Write what O is multiplied by before a step, and for each warp's rows whether any factor is
    not 1, to `Stats`."""
    stats.factors.index(slot).store(factor)
    # As if the threads that share a row had a number each: then one instruction asks all of a warp.
    every = rescaled(gl.full_like(row_sum, 1.0), factor)
    moved = gl.reshape(gl.where(every == 1.0, 0, 1), [WARPS, 64])
    stats.moved.index(slot).store(gl.max(moved, 1))


@gluon.jit
def rescale_heads(O, stats, slot):
    """O^T times the factor of each head; nothing is multiplied where all are 1."""
    ALL: gl.constexpr = gl.BlockedLayout([WARPS], [32], [WARPS], [0])  # every thread has all
    o0, o1, o2, o3 = O
    OL: gl.constexpr = o0.type.layout
    if gl.max(stats.moved.index(slot).load(ALL), 0) != 0:
        factor = stats.factors.index(slot).load(gl.SliceLayout(0, OL))[None, :]
        o0 = o0 * factor
        o1 = o1 * factor
        o2 = o2 * factor
        o3 = o3 * factor
    return o0, o1, o2, o3


@gluon.jit
def put_weights(S, missing, state, slot, first, tile, smem, factor, heads, HOW: gl.constexpr):
    """From the scores of keys `first` … to weights for left and right; returns the `State` after
    the step."""
    row_max, row_sum, highest = state
    scales = smem.scales
    SL: gl.constexpr = S.type.layout
    S = masked(signed(S, HOW.sign), missing, smem.validity, slot, tile, first, heads, HOW.mask)
    highest = higher(highest, S, factor, HOW.wants_logits)
    before = row_max
    row_max = next_reference(S, before, factor, scales, slot, HOW, SL)
    rescale = follow(before, row_max)
    put_factor(smem.stats, slot, rescale, row_sum)
    row_sum = rescaled(row_sum, rescale)
    weights, row_sum = weigh(S, row_max, row_sum, factor, scales, slot, HOW, SL)
    smem.p.index(opaque_zero() + slot).store(weights.to(smem.p.dtype))
    fence_async_shared()
    signal_weights(slot)
    return State(row_max=row_max, row_sum=row_sum, highest=highest)


@gluon.jit
def write_rows(state, place, heads, results, inverse, HOW: gl.constexpr):
    """Write what is one per row: the divisors to shared memory, lse and the largest score to
    `Results`."""
    row_max, row_sum, highest = state
    row_sum = row_sums(row_sum, row_max)
    divisor, lse = divisors(row_max, row_sum, place, heads, results.sink, HOW.mask, False)
    inverse.store(divisor)
    if results.lse.base is not None:
        write_stat(lse, results.lse, place, heads, HOW.mask)
    if results.max_logits.base is not None:
        write_stat(highest * LN_2, results.max_logits, place, heads, HOW.mask)


@gluon.jit
def scores(info, smem, bars, results, factor, heads, q_scale_ptr, HOW: gl.constexpr):
    """Scores and weights of every step."""
    ST: gl.constexpr = smem.k.latent.shape[0]
    MASK: gl.constexpr = HOW.mask
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 32])
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    unit = 1.0 if HOW.has_q_scale else factor
    turn = gl.program_id(0) * 0
    n = turn  # steps so far, over all work items
    tile, steps = read_work_item(info, bars, turn, MASK, False)
    while steps > 0:
        place = place_of(tile, heads, MASK, False)
        row_scale = row_scales(q_scale_ptr, place, heads, factor, HOW, SL)
        row_max = gl.full([64], MINUS_INF, gl.float32, RL)
        row_sum = quad_sums(gl.zeros([64, STEP], gl.float32, SL), STEP)
        state = State(row_max=row_max, row_sum=row_sum, highest=row_max)
        mbarrier.wait(bars.q_ready, turn & 1)
        for j in range(0, steps):
            slot, phase = slot_of(n, ST)
            wait_tile(bars.k_ready.index(slot), phase, True)
            S = begin_scores(smem.q, smem.k, slot, HOW, SL)
            missing = any_missing(smem.validity, slot, MASK)
            mbarrier.wait(bars.p_empty.index(slot), phase ^ 1)
            S = finish_scores(S, smem.scales, slot, row_scale, HOW, SL)
            if j == steps - 1:
                mbarrier.arrive(bars.q_empty, count=1)
            state = put_weights(S, missing, state, slot, j * STEP, tile, smem, unit, heads, HOW)
            n += 1
        write_rows(state, place, heads, results, smem.stats.inverses.index(turn & 3), HOW)
        mbarrier.arrive(bars.sums_ready.index(turn & 3), count=1)
        turn += 1
        tile, steps = read_work_item(info, bars, turn, MASK, False)


@gluon.jit
def no_sums(OL: gl.constexpr):
    """O^T before the first key."""
    zero = gl.zeros([64, 64], gl.float32, OL)
    return zero, gl.zeros_like(zero), gl.zeros_like(zero), gl.zeros_like(zero)


@gluon.jit
def values(info, smem, bars, out, heads, SIDE: gl.constexpr, HOW: gl.constexpr):
    """Half of the output columns: left (SIDE 0) or right (1), for an `Output`."""
    ST: gl.constexpr = smem.k.latent.shape[0]
    MASK: gl.constexpr = HOW.mask
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    turn = gl.program_id(0) * 0
    n = turn
    tile, steps = read_work_item(info, bars, turn, MASK, False)
    while steps > 0:
        O = no_sums(OL)
        for _ in range(0, steps):
            slot, _phase = slot_of(n, ST)
            wait_weights(slot, SIDE)
            O = rescale_heads(O, smem.stats, slot)
            O = add_values(O, smem.k.latent, smem.p, slot, SIDE)
            mbarrier.arrive(bars.p_empty.index(slot), count=1)
            n += 1
        mbarrier.wait(bars.sums_ready.index(turn & 3), (turn >> 2) & 1)
        place = place_of(tile, heads, MASK, False)
        inverse = smem.stats.inverses.index(turn & 3)
        write_heads(O, inverse, out, place, heads, 0, 256 * SIDE, MASK)
        turn += 1
        tile, steps = read_work_item(info, bars, turn, MASK, False)


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
    """NUMBER `RowTiles` of ROWS rows."""
    latent = gl.allocate_shared_memory(gl.float8e4nv, [NUMBER, ROWS, DIMS.latent], LAYOUTS.latent)
    rope = latent
    if DIMS.rope > 0:
        rope = gl.allocate_shared_memory(gl.float8e4nv, [NUMBER, ROWS, DIMS.rope], LAYOUTS.rope)
    return RowTiles(latent=latent, rope=rope)


COUNTS = ["topk", "rows", "tiles", "head_blocks", "heads", "batch", "total_q", "rest_q", "factor"]
COUNTS += ["page_size", "page_inverse", "mean_tiles"]
STRIDES = [
    "indices_stride",
    "stride_page",
    "stride_row",
    "scale_page",
    "scale_row",
    "out_stride_t",
    "out_stride_h",
    "lse_stride_t",
    "lse_stride_h",
    "logits_stride_t",
    "logits_stride_h",
]
# Vectors of 4-byte elements, read and written one by one: a slice of a tensor is as good as all.
VECTORS = [
    "indices_ptr",
    "lengths_ptr",
    "cu_ptr",
    "lse_ptr",
    "logits_ptr",
    "sink_ptr",
    "scale_ptr",
    "q_scale_ptr",
    "counter_ptr",
]


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def latent_fp8_kernel(  # noqa: PLR0913
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
    page_size,
    page_inverse,
    mean_tiles,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    logits_stride_t,
    logits_stride_h,
    ST: gl.constexpr,
    DIMS: gl.constexpr,
    CHUNK: gl.constexpr,
    MASK: gl.constexpr,
    SIGN: gl.constexpr,
    SCALED_VALUES: gl.constexpr,
    REGISTERS: gl.constexpr,
    LAYOUTS: gl.constexpr,
):
    """MLA over listed rows or pages, with the arguments of latent_kernel and scales of queries.

    page_size, page_inverse, mean_tiles, CHUNK, MASK: see latent_kernel. SCALED_VALUES: whether the
    scales of rows are those of their values too, not of scores alone. DIMS: `RowColumns`. LAYOUTS:
    `TileLayouts`. REGISTERS: `Registers`.
    """
    ROPE: gl.constexpr = DIMS.rope > 0
    SCALED: gl.constexpr = scale_ptr is not None
    HOW: gl.constexpr = How(
        sign=SIGN,
        mask=MASK,
        wants_logits=logits_ptr is not None,
        has_rope=ROPE,
        has_q_scale=q_scale_ptr is not None,
        has_row_scales=SCALED,
        scales_values=SCALED_VALUES,
    )
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    k_smem = column_tiles(ST, STEP, DIMS, LAYOUTS)
    q_smem = column_tiles(1, 64, DIMS, LAYOUTS)
    p_smem = gl.allocate_shared_memory(gl.float16, [ST, 64, STEP], LAYOUTS.p)
    bias = gl.allocate_shared_memory(gl.float32, [ST, STEP], LINEAR)
    flags = gl.allocate_shared_memory(gl.int32, [ST, PARTS * WARPS], LINEAR)
    scales = bias
    if SCALED:
        scales = gl.allocate_shared_memory(gl.float32, [ST, STEP], LINEAR)
    factors = gl.allocate_shared_memory(gl.float32, [ST, 64], LINEAR)
    moved = gl.allocate_shared_memory(gl.int32, [ST, WARPS], LINEAR)
    inverses = gl.allocate_shared_memory(gl.float32, [4, 64], LINEAR)
    info = allocate_info()
    q_ready, q_empty = barrier_pair(1, 1)
    bars = Barriers(
        q_ready=q_ready,
        q_empty=q_empty,
        k_ready=barriers(ST, ARRIVALS),
        p_empty=barriers(ST, 2),
        sums_ready=barriers(4, 1),
        item_ready=barriers(2, 1),
        item_empty=barriers(2, 3),
    )
    smem = Smem(
        q=q_smem,
        k=k_smem,
        p=p_smem,
        validity=Validity(bias=bias, flags=flags),
        stats=Stats(factors=factors, moved=moved, inverses=inverses),
        scales=scales,
    )
    results = Results(
        out=Output(base=out_ptr, token_stride=out_stride_t, head_stride=out_stride_h),
        lse=Output(base=lse_ptr, token_stride=lse_stride_t, head_stride=lse_stride_h),
        max_logits=Output(
            base=logits_ptr, token_stride=logits_stride_t, head_stride=logits_stride_h
        ),
        sink=sink_ptr,
        parts=None,
    )
    pages = Pages(size=page_size, inverse=page_inverse)
    sequences = None
    if MASK != LISTED:
        sequences = Sequences(
            cu_seqlens_q=cu_ptr,
            batch=batch,
            total_q=total_q,
            heads=heads,
            pages=pages,
            mean_tiles=mean_tiles,
            mask=MASK,
            rest_q=rest_q,
        )
    source = Source(
        table=indices_ptr,
        lengths=lengths_ptr,
        most_keys=topk,
        table_stride=indices_stride,
        pool_rows=rows,
        sequences=sequences,
        counter=counter_ptr,
        part_rows=None,
    )
    data = CacheRows(
        data_ptr=data_ptr,
        page_stride=stride_page,
        row_stride=stride_row,
        scale_ptr=scale_ptr,
        scale_page_stride=scale_page,
        scale_row_stride=scale_row,
        rope_ptr=None,
        pages=pages,
    )
    counts = TileCounts(tiles=tiles, head_blocks=head_blocks)
    q_descs = RowDescriptors(latent=q_latent_desc, rope=q_rope_desc)
    gl.warp_specialize(
        [
            (left, (info, smem, bars, results.out, heads, HOW)),
            (right, (info, smem, bars, results.out, heads, HOW)),
            (scores, (info, smem, bars, results, factor, heads, q_scale_ptr, HOW)),
            (producer, (info, source, data, counts, q_descs, smem, bars, ST, ROPE, CHUNK)),
        ],
        [4, 4, 4],
        [REGISTERS.consumer, REGISTERS.scores, REGISTERS.producer],
    )
