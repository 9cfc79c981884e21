# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""Dense MLA prefill on Hopper with FP8 (e4m3) queries and keys. Out is bf16.

Partitions, work items and barriers are those of dense/kernel.py, and so are the producer, the
scheduler, the epilogue and the records. What differs:

| | |
|---|---|
| scores | FP8 products, twice the rate of bf16; rope columns in rope's own type |
| weights | no maximum before the exponentials of a block (softmax.py, correction.py) |
| V | 16 bits; e4m3 values are upcast before the kernel (gluon/upcast/kernel.py) |

| shared memory | bytes (128 + 64 -> 128, NC 2, BN 128, ST 2) |
|---|---|
| q_main, q_tail, q_rope | NC x 64 x (128 + 0 + 64) = 24576 |
| q_wide: rope columns of Q in rope's type, if that is wider | NC x 64 x 64 x 2, or none |
| k_main, k_tail, k_rope | ST x 128 x (128 + 0 + 64) = 49152 |
| scales of keys | ST x 128 x 4, or none |
| v | ST x 128 x 128 x 2 = 65536 |
| info, barriers, epilogue's change of layout, warp states | as dense/kernel.py |

QK of block j and PV of block j - 1 are started one after the other; between them, under QK, O is
rescaled, and K of block j - 1 and V of block j - 2 are released. The weights of block j follow,
under PV, while the other consumer starts its products. A step is as long as what a warp issues in
it, not as its products (docs/fp8.md).

Scores are multiplied by k_scale when they come, and by q_scale in the exponents, without its sign:
that goes into Q (products.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openmla.kernels.gluon.boxes import LANES
from openmla.kernels.gluon.scores import opaque_zero, signed
from openmla.kernels.hopper.dense.epilogue import finish
from openmla.kernels.hopper.dense.kernel import (
    COUNTS,
    STRIDES,
    VECTORS,
    WARPS,
    allocate_barriers,
    column_tiles,
)
from openmla.kernels.hopper.dense.producer import producer
from openmla.kernels.hopper.dense.records import (
    BlockTable,
    ColumnTiles,
    How,
    Limits,
    MmaLayouts,
    Output,
    Requests,
    Results,
    SharedMemory,
    Sources,
    Tiling,
)
from openmla.kernels.hopper.dense.scheduler import allocate_info, get_consumer_item, scheduler
from openmla.kernels.hopper.dense.softmax import unpack
from openmla.kernels.hopper.dense_fp8.correction import correct
from openmla.kernels.hopper.dense_fp8.products import issue_qk, turn_signs, widen_rope
from openmla.kernels.hopper.dense_fp8.records import BlocksBefore, RingPlace, SoftmaxState
from openmla.kernels.hopper.dense_fp8.softmax import (
    first_reference,
    key_scales,
    known_before,
    masked_scores,
    rescale_quads,
    row_factors,
    weigh,
)


@gluon.jit
def next_place(place, ST: gl.constexpr):
    """The RingPlace after this one."""
    last = place.stage == ST - 1
    return RingPlace(
        stage=gl.where(last, 0, place.stage + 1),
        phase=gl.where(last, place.phase ^ 1, place.phase),
    )


@gluon.jit
def walk(  # noqa: PLR0913
    state,
    done,
    blocks,
    first,
    last,
    limits,
    factor,
    smem,
    bars,
    MASKED: gl.constexpr,
    WHO: gl.constexpr,
    HOW: gl.constexpr,
    DIMS: gl.constexpr,
    LAYOUTS: gl.constexpr,
):
    """Steps first … last - 1 of a work item; each weighs the block before it.

    Takes and returns a SoftmaxState and BlocksBefore; limits: Limits, smem: SharedMemory, bars:
    Barriers, HOW: How, DIMS: Columns, LAYOUTS: MmaLayouts.

    Between the last weights of a block and the first product of the next stands only what that
    product needs. Sums, rescaling and what is released come under it.
    """
    words, O, row_max, row_sum, rescale = state
    before, older = done
    BN: gl.constexpr = smem.v.shape[1]
    ST: gl.constexpr = smem.v.shape[0]
    DTYPE: gl.constexpr = smem.v.dtype
    for c in range(first, last):
        here = next_place(before, ST)
        mbarrier.wait(bars.k_ready.index(here.stage), here.phase)
        S_next = issue_qk(smem, here.stage, WHO, LAYOUTS, DIMS)
        mbarrier.arrive(bars.k_empty.index(before.stage), count=1)
        if c > 1:
            mbarrier.arrive(bars.v_empty.index(older), count=1)
        O = rescale_quads(O, rescale)
        mbarrier.wait(bars.v_ready.index(before.stage), before.phase)
        P = unpack(words, BN, DTYPE, LAYOUTS.weights)
        O_next = warpgroup_mma(P, smem.v.index(before.stage), O, is_async=True)
        S = warpgroup_mma_wait(1, deps=(S_next,))
        S = signed(S * key_scales(smem.k_scale, here.stage, LAYOUTS.scores), HOW.sign)
        if MASKED:
            skip = (blocks - 1 - c) * BN
            S = masked_scores(S, limits.seen - skip, limits.keys - skip, HOW.is_causal)
        words, sums = weigh(S, row_max, factor, HOW.has_q_scale, DTYPE)
        sums = known_before(sums)
        O, P = warpgroup_mma_wait(0, deps=(O_next, P))
        old = row_max
        words, sums, row_max = correct(words, S, sums, old, factor, HOW.has_q_scale, DTYPE)
        rescale = gl.exp2(old - row_max)
        row_sum = row_sum * rescale + sums
        older = before.stage
        before = here
    return SoftmaxState(words, O, row_max, row_sum, rescale), BlocksBefore(before, older)


@gluon.jit
def consumer(
    info,
    smem,
    bars,
    results,
    factor,
    q_scale_ptr,
    WHO: gl.constexpr,
    NC: gl.constexpr,
    HOW: gl.constexpr,
    DIMS: gl.constexpr,
):
    """64 rows of every work item: rows 64 x WHO … of its tile.

    smem: SharedMemory, bars: Barriers, results: Results, HOW: How, DIMS: Columns.
    """
    BN: gl.constexpr = smem.v.shape[1]
    ST: gl.constexpr = smem.v.shape[0]
    DTYPE: gl.constexpr = smem.v.dtype
    D_V: gl.constexpr = DIMS.v
    QK_GROUPS: gl.constexpr = 1 + (DIMS.tail > 0) + (DIMS.rope > 0)
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    RL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_V, 16])
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OL, k_width=2)
    LAYOUTS: gl.constexpr = MmaLayouts(scores=SL, weights=PL, rope_scores=RL)
    turn = gl.program_id(0) * 0
    place = RingPlace(stage=turn, phase=turn)  # of the block whose scores are in S
    mbarrier.wait(bars.t_ready.index(0), 0)
    tile, blocks, whole, keys, seen = get_consumer_item(info, turn, WARPS, HOW.min_split)
    mbarrier.arrive(bars.t_empty.index(0), count=1)
    by = row_factors(q_scale_ptr, tile, factor, WHO, SL)
    S = gl.zeros([64, BN], gl.float32, SL)
    if blocks > 0:
        mbarrier.wait(bars.q_ready.index(WHO), 0)
        turn_signs(smem.q, q_scale_ptr, tile, WHO, DIMS)
        widen_rope(smem, WHO, DIMS)
        mbarrier.wait(bars.k_ready.index(0), 0)
        S_next = issue_qk(smem, opaque_zero(), WHO, LAYOUTS, DIMS)
        S = warpgroup_mma_wait(0, deps=(S_next,))
    while blocks > 0:
        # S holds the scores of the work item's first block.
        S = S * key_scales(smem.k_scale, place.stage, SL)
        skip = (blocks - 1) * BN
        seen += WHO * 64
        S = masked_scores(signed(S, HOW.sign), seen - skip, keys - skip, HOW.is_causal)
        row_max = first_reference(S, by)
        O = gl.zeros([64, D_V], gl.float32, OL)
        words, row_sum = weigh(S, row_max, by, HOW.has_q_scale, DTYPE)
        # Blocks come from the last to the first, so those that need a mask come first.
        masked = blocks - gl.minimum(whole, blocks - 1)
        rescale = gl.full(row_sum.shape, 1.0, gl.float32, row_sum.type.layout)
        state = SoftmaxState(words, O, row_max, row_sum, rescale)
        state, done = walk(
            state,
            BlocksBefore(place, place.stage),
            blocks,
            1,
            masked,
            Limits(seen, keys),
            by,
            smem,
            bars,
            True,
            WHO,
            HOW,
            DIMS,
            LAYOUTS,
        )
        state, done = walk(
            state,
            done,
            blocks,
            masked,
            blocks,
            Limits(seen, keys),
            by,
            smem,
            bars,
            False,
            WHO,
            HOW,
            DIMS,
            LAYOUTS,
        )
        words, O, row_max, row_sum, rescale = state
        before, older = done
        O = rescale_quads(O, rescale)
        # The last PV of this work item, then the first QK of the next.
        mbarrier.wait(bars.v_ready.index(before.stage), before.phase)
        P = unpack(words, BN, DTYPE, PL)
        O_next = warpgroup_mma(P, smem.v.index(before.stage), O, is_async=True)
        mbarrier.arrive(bars.k_empty.index(before.stage), count=1)
        mbarrier.arrive(bars.q_empty.index(WHO), count=1)
        if blocks > 1:
            mbarrier.arrive(bars.v_empty.index(older), count=1)
        turn += 1
        slot = turn & 1
        mbarrier.wait(bars.t_ready.index(slot), (turn >> 1) & 1)
        next_tile, blocks, whole, keys, seen = get_consumer_item(info, slot, WARPS, HOW.min_split)
        mbarrier.arrive(bars.t_empty.index(slot), count=1)
        # After the last work item the product is idle: it reads the block before, which the
        # producer does not overwrite any more.
        place = next_place(before, ST)
        place = RingPlace(gl.where(blocks > 0, place.stage, before.stage), place.phase)
        mbarrier.wait(bars.q_ready.index(WHO), turn & 1, pred=blocks > 0)
        turn_signs(smem.q, q_scale_ptr, next_tile, WHO, DIMS)
        widen_rope(smem, WHO, DIMS)
        mbarrier.wait(bars.k_ready.index(place.stage), place.phase, pred=blocks > 0)
        S_next = issue_qk(smem, place.stage, WHO, LAYOUTS, DIMS)
        O, P = warpgroup_mma_wait(QK_GROUPS, deps=(O_next, P))
        mbarrier.arrive(bars.v_empty.index(before.stage), count=1)
        finish(O, gl.max(row_max, 1), row_sum, tile, results, WHO, NC, HOW.min_split)
        S = warpgroup_mma_wait(0, deps=(S_next,))
        tile = next_tile
        by = row_factors(q_scale_ptr, tile, factor, WHO, SL)


SCALES = ["q_scale_ptr", "k_scale_ptr"]


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS + SCALES)
def dense_fp8_kernel(  # noqa: PLR0913
    q_main_desc,
    q_tail_desc,
    q_rope_desc,
    k_main_desc,
    k_tail_desc,
    k_rope_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    sink_ptr,
    q_scale_ptr,
    k_scale_ptr,
    cu_q_ptr,
    cu_k_ptr,
    starts_ptr,
    table_ptr,
    counter_ptr,
    part_sums_ptr,
    part_state_ptr,
    factor,
    batch,
    total_q,
    rest_q,
    total_k,
    heads,
    table_stride,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    NC: gl.constexpr,
    BN: gl.constexpr,
    ST: gl.constexpr,
    DIMS: gl.constexpr,
    ROPE: gl.constexpr,
    CAUSAL: gl.constexpr,
    SIGN: gl.constexpr,
    GROUP_KEYS: gl.constexpr,
    SPLIT: gl.constexpr,
    SM_COUNT: gl.constexpr,
    REGISTERS: gl.constexpr,
    LAYOUTS: gl.constexpr,
):
    """Arguments are those of dense_kernel, and scales of queries and of keys."""
    K_SCALED: gl.constexpr = k_scale_ptr is not None
    ROPE_TYPE: gl.constexpr = gl.float8e4nv if k_rope_desc is None else k_rope_desc.dtype
    HOW: gl.constexpr = How(
        is_causal=CAUSAL,
        sign=SIGN,
        min_split=SPLIT,
        has_q_scale=q_scale_ptr is not None,
    )
    TILE: gl.constexpr = Tiling(
        block_m=64 * NC,
        block_n=BN,
        is_causal=CAUSAL,
        group_keys=GROUP_KEYS,
        min_split=SPLIT,
        sm_count=SM_COUNT,
    )
    Q_ROPE: gl.constexpr = LAYOUTS.rope
    K_ROPE: gl.constexpr = LAYOUTS.k_rope
    q_smem = column_tiles(NC, 64, DIMS, LAYOUTS, gl.float8e4nv, Q_ROPE, gl.float8e4nv)
    q_wide_rope = None
    if ROPE_TYPE.primitive_bitwidth > 8:
        q_wide_rope = gl.allocate_shared_memory(ROPE_TYPE, [NC, 64, DIMS.rope], LAYOUTS.k_rope)
    k_smem = column_tiles(ST, BN, DIMS, LAYOUTS, gl.float8e4nv, K_ROPE, ROPE_TYPE)
    k_scale_smem = None
    if K_SCALED:
        LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        k_scale_smem = gl.allocate_shared_memory(gl.float32, [ST, BN], LINEAR)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [ST, BN, DIMS.v], LAYOUTS.v)
    info = allocate_info()
    bars = allocate_barriers(NC, ST, 1 + LANES if K_SCALED else 1)
    requests = Requests(
        cu_seqlens_q=cu_q_ptr,
        cu_seqlens_k=cu_k_ptr,
        batch=batch,
        total_q=total_q,
        rest_q=rest_q,
        total_k=total_k,
        heads=heads,
        k_start=starts_ptr,
    )
    smem = SharedMemory(
        q=q_smem,
        q_wide_rope=q_wide_rope,
        k=k_smem,
        k_scale=k_scale_smem,
        v=v_smem,
        key_mask=None,
    )
    sources = Sources(
        q=ColumnTiles(q_main_desc, q_tail_desc, q_rope_desc),
        k=ColumnTiles(k_main_desc, k_tail_desc, k_rope_desc),
        k_scale=k_scale_ptr,
        v=v_desc,
        key_mask=None,
    )
    results = Results(
        out=Output(out_ptr, out_stride_t, out_stride_h),
        lse=Output(lse_ptr, lse_stride_t, lse_stride_h),
        sink=sink_ptr,
        part_sums=part_sums_ptr,
        part_state=part_state_ptr,
    )
    table = BlockTable(table_ptr, table_stride)
    if NC == 1:
        gl.warp_specialize(
            [
                (consumer, (info, smem, bars, results, factor, q_scale_ptr, 0, NC, HOW, DIMS)),
                (producer, (info, sources, smem, bars, table, NC, BN, ST, DIMS, ROPE, SPLIT)),
                (scheduler, (info, bars, counter_ptr, requests, TILE)),
            ],
            [1, 1],
            [REGISTERS.producer, REGISTERS.producer],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (info, smem, bars, results, factor, q_scale_ptr, 0, NC, HOW, DIMS)),
                (consumer, (info, smem, bars, results, factor, q_scale_ptr, 1, NC, HOW, DIMS)),
                (producer, (info, sources, smem, bars, table, NC, BN, ST, DIMS, ROPE, SPLIT)),
                (scheduler, (info, bars, counter_ptr, requests, TILE)),
            ],
            [4, 1, 1],
            [REGISTERS.consumer, REGISTERS.producer, REGISTERS.producer],
        )
