# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""Dense MLA prefill on Hopper with FP8 (e4m3) queries and keys. Out is bf16.

Roles, work items, barriers and the order of a step are those of dense/kernel.py, and so are
scheduler and epilogue. What differs:

| | |
|---|---|
| scores | FP8 products, twice the rate of bf16; rope columns in rope's own type |
| weights | no maximum before the exponentials of a block (softmax.py, correction.py) |
| V | 16 bits; of 8 bits it is upcast before the kernel (upcast.py) |

| shared memory | bytes (128 + 64 -> 128, NC 2, BN 128, ST 2) |
|---|---|
| q_main, q_tail, q_rope | NC x 64 x (128 + 0 + 64) = 24576 |
| q_wide: rope columns of Q in rope's type, if that is wider | NC x 64 x 64 x 2, or none |
| k_main, k_tail, k_rope | ST x 128 x (128 + 0 + 64) = 49152 |
| scales of keys | ST x 128 x 4, or none |
| v | ST x 128 x 128 x 2 = 65536 |
| info, barriers, epilogue's change of layout, warp states | as dense/kernel.py |

A warp that starts a product waits until the tensor core takes it. So QK of block j and PV of block
j - 1 are started together, and nothing stands between them: the weights of block j follow, under
PV, while the other consumer starts its products.

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

from openmla.kernels.gluon.barriers import barriers
from openmla.kernels.gluon.boxes import LANES
from openmla.kernels.gluon.scores import opaque_zero, signed
from openmla.kernels.hopper.dense.epilogue import finish
from openmla.kernels.hopper.dense.kernel import WARPS, column_tiles, read_work_item
from openmla.kernels.hopper.dense.scheduler import (
    BLOCKS,
    FIELDS,
    KEYS,
    SEEN,
    WHOLE,
    get,
    scheduler,
)
from openmla.kernels.hopper.dense.softmax import unpack
from openmla.kernels.hopper.dense_fp8.correction import correct
from openmla.kernels.hopper.dense_fp8.producer import producer
from openmla.kernels.hopper.dense_fp8.products import issue_qk, turn_signs, widen_rope
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
def next_place(stage, phase, ST: gl.constexpr):
    """The place in the rings after this one: (stage, parity of the round)."""
    last = stage == ST - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def release_keys(k_empty, q_empty, stage, last, WHO: gl.constexpr):
    """After the QK of a block; after that of a work item's last block Q too."""
    mbarrier.arrive(k_empty.index(stage), count=1)
    if last:  # a branch: the barrier that comes with an arrive costs every step
        mbarrier.arrive(q_empty.index(WHO), count=1)


@gluon.jit
def walk(  # noqa: PLR0913
    state, place, blocks, first, last, limits, factor, smem, bars, MASKED: gl.constexpr,
    WHO: gl.constexpr, HOW: gl.constexpr, DIMS: gl.constexpr, LAYOUTS: gl.constexpr,
):  # fmt: skip
    """Steps first … last - 1 of a work item; each weighs the block before it.

    state: packed weights of the block before, O without it, row_max and row_sum.
    place: where the block before is in the rings.
    """
    words, O, row_max, row_sum = state
    before, phase_before = place
    seen, keys = limits
    q_smem, k_smem, v_smem = smem
    q_empty, k_ready, k_empty, v_ready, v_empty = bars
    BN: gl.constexpr = k_smem[0].shape[1]
    ST: gl.constexpr = v_smem.shape[0]
    DTYPE: gl.constexpr = v_smem.dtype
    for c in range(first, last):
        stage, phase = next_place(before, phase_before, ST)
        mbarrier.wait(k_ready.index(stage), phase)
        mbarrier.wait(v_ready.index(before), phase_before)
        S_next = issue_qk(q_smem, k_smem, stage, WHO, LAYOUTS, DIMS)
        P = unpack(words, BN, DTYPE, LAYOUTS[1])
        O_next = warpgroup_mma(P, v_smem.index(before), O, is_async=True)
        S = warpgroup_mma_wait(1, deps=(S_next,))
        S = signed(S * key_scales(k_smem[3], stage, LAYOUTS[0], HOW[4]), HOW[1])
        if MASKED:
            skip = (blocks - 1 - c) * BN
            S = masked_scores(S, seen - skip, keys - skip, HOW[0])
        words, sums = weigh(S, row_max, factor, HOW[3], DTYPE)
        sums = known_before(sums)
        O, P = warpgroup_mma_wait(0, deps=(O_next, P))
        old = row_max
        words, sums, row_max = correct(words, S, sums, old, factor, HOW[3], DTYPE)
        rescale = gl.exp2(old - row_max)
        row_sum = row_sum * rescale + sums
        O = rescale_quads(O, rescale)
        mbarrier.arrive(v_empty.index(before), count=1)
        release_keys(k_empty, q_empty, stage, c == blocks - 1, WHO)
        before = stage
        phase_before = phase
    return (words, O, row_max, row_sum), (before, phase_before)


@gluon.jit
def consumer(
    info, smem, bars, results, factor, q_scale_ptr, WHO: gl.constexpr, NC: gl.constexpr,
    HOW: gl.constexpr, DIMS: gl.constexpr,
):  # fmt: skip
    """64 rows of every work item: rows 64 x WHO … of its tile."""
    q_smem, k_smem, v_smem = smem
    q_bars, k_ready, k_empty, v_ready, v_empty, t_ready, t_empty = bars
    q_ready, q_empty = q_bars
    BN: gl.constexpr = k_smem[0].shape[1]
    ST: gl.constexpr = v_smem.shape[0]
    DTYPE: gl.constexpr = v_smem.dtype
    D_V: gl.constexpr = DIMS[3]
    SPLIT: gl.constexpr = HOW[2]
    QK_GROUPS: gl.constexpr = 1 + (DIMS[1] > 0) + (DIMS[2] > 0)
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    RL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_V, 16])
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OL, k_width=2)
    LAYOUTS: gl.constexpr = (SL, PL, RL)
    walk_bars = (q_empty, k_ready, k_empty, v_ready, v_empty)
    turn = gl.program_id(0) * 0
    stage = turn  # of the block that S is of, and the parity of its round
    phase = turn
    mbarrier.wait(t_ready.index(0), 0)
    work = read_work_item(info, turn, SPLIT)
    blocks = get(info, turn, BLOCKS, WARPS)
    whole = get(info, turn, WHOLE, WARPS)
    keys = get(info, turn, KEYS, WARPS)
    seen = get(info, turn, SEEN, WARPS)
    mbarrier.arrive(t_empty.index(0), count=1)
    by = row_factors(q_scale_ptr, work, factor, WHO, SL)
    S = gl.zeros([64, BN], gl.float32, SL)
    if blocks > 0:
        mbarrier.wait(q_ready.index(WHO), 0)
        turn_signs(q_smem, q_scale_ptr, work, WHO, DIMS)
        widen_rope(q_smem, WHO, DIMS)
        mbarrier.wait(k_ready.index(0), 0)
        S_next = issue_qk(q_smem, k_smem, opaque_zero(), WHO, LAYOUTS, DIMS)
        S = warpgroup_mma_wait(0, deps=(S_next,))
    while blocks > 0:
        # S holds the scores of the work item's first block.
        S = S * key_scales(k_smem[3], stage, SL, HOW[4])
        mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.arrive(q_empty.index(WHO), count=1, pred=blocks == 1)
        skip = (blocks - 1) * BN
        seen += WHO * 64
        S = masked_scores(signed(S, HOW[1]), seen - skip, keys - skip, HOW[0])
        row_max = first_reference(S, by)
        O = gl.zeros([64, D_V], gl.float32, OL)
        words, row_sum = weigh(S, row_max, by, HOW[3], DTYPE)
        place = (stage, phase)
        # Blocks come from the last to the first, so those that need a mask come first.
        masked = blocks - gl.minimum(whole, blocks - 1)
        state = (words, O, row_max, row_sum)
        state, place = walk(
            state, place, blocks, 1, masked, (seen, keys), by, smem, walk_bars, True, WHO, HOW,
            DIMS, LAYOUTS,
        )  # fmt: skip
        state, place = walk(
            state, place, blocks, masked, blocks, (seen, keys), by, smem, walk_bars, False, WHO,
            HOW, DIMS, LAYOUTS,
        )  # fmt: skip
        words, O, row_max, row_sum = state
        # The last PV of this work item, then the first QK of the next.
        before, phase_before = place
        mbarrier.wait(v_ready.index(before), phase_before)
        P = unpack(words, BN, DTYPE, PL)
        O_next = warpgroup_mma(P, v_smem.index(before), O, is_async=True)
        turn += 1
        slot = turn & 1
        mbarrier.wait(t_ready.index(slot), (turn >> 1) & 1)
        next_work_item = read_work_item(info, slot, SPLIT)
        blocks = get(info, slot, BLOCKS, WARPS)
        whole = get(info, slot, WHOLE, WARPS)
        keys = get(info, slot, KEYS, WARPS)
        seen = get(info, slot, SEEN, WARPS)
        mbarrier.arrive(t_empty.index(slot), count=1)
        # After the last work item the product is idle: over the block before, which nobody
        # overwrites.
        stage, phase = next_place(before, phase_before, ST)
        stage = gl.where(blocks > 0, stage, before)
        mbarrier.wait(q_ready.index(WHO), turn & 1, pred=blocks > 0)
        turn_signs(q_smem, q_scale_ptr, next_work_item, WHO, DIMS)
        widen_rope(q_smem, WHO, DIMS)
        mbarrier.wait(k_ready.index(stage), phase, pred=blocks > 0)
        S_next = issue_qk(q_smem, k_smem, stage, WHO, LAYOUTS, DIMS)
        O, P = warpgroup_mma_wait(QK_GROUPS, deps=(O_next, P))
        mbarrier.arrive(v_empty.index(before), count=1)
        finish(O, gl.max(row_max, 1), row_sum, work, results, WHO, NC, SPLIT)
        S = warpgroup_mma_wait(0, deps=(S_next,))
        work = next_work_item
        by = row_factors(q_scale_ptr, work, factor, WHO, SL)


@gluon.jit
def key_tiles(ST: gl.constexpr, BN: gl.constexpr, DIMS: gl.constexpr, LAYOUTS: gl.constexpr,
              ROPE_TYPE: gl.constexpr, SCALED: gl.constexpr):  # fmt: skip
    """The ring of K: main, tail and rope columns, and the scales of keys. What is missing stands
    for the first."""
    NARROW: gl.constexpr = (DIMS[0], DIMS[1], 0)
    main, tail, rope = column_tiles(ST, BN, NARROW, LAYOUTS, gl.float8e4nv)
    if DIMS[2] > 0:
        rope = gl.allocate_shared_memory(ROPE_TYPE, [ST, BN, DIMS[2]], LAYOUTS[4])
    scales = main
    if SCALED:
        LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        scales = gl.allocate_shared_memory(gl.float32, [ST, BN], LINEAR)
    return main, tail, rope, scales


COUNTS = ["batch", "total_q", "rest_q", "total_k", "heads", "table_stride", "factor"]
STRIDES = ["out_stride_t", "out_stride_h", "lse_stride_t", "lse_stride_h"]
VECTORS = [
    "lse_ptr", "sink_ptr", "q_scale_ptr", "k_scale_ptr", "cu_q_ptr", "cu_k_ptr", "starts_ptr",
    "table_ptr",
    "counter_ptr",
]  # fmt: skip


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
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
    HG: gl.constexpr,
    SPLIT: gl.constexpr,
    SM_COUNT: gl.constexpr,
    REGISTERS: gl.constexpr,
    LAYOUTS: gl.constexpr,
):
    """As dense_kernel; LAYOUTS: of tiles of Q's main, tail and rope columns, of V, of K's rope."""
    Q_SCALED: gl.constexpr = q_scale_ptr is not None
    K_SCALED: gl.constexpr = k_scale_ptr is not None
    ROPE_TYPE: gl.constexpr = gl.float8e4nv if k_rope_desc is None else k_rope_desc.dtype
    HOW: gl.constexpr = (CAUSAL, SIGN, SPLIT, Q_SCALED, K_SCALED)
    TILE: gl.constexpr = (64 * NC, BN, CAUSAL, HG, SPLIT, SM_COUNT)
    q_main, q_tail, q_rope = column_tiles(NC, 64, DIMS, LAYOUTS, gl.float8e4nv)
    q_wide = q_main
    if ROPE_TYPE.primitive_bitwidth > 8:
        q_wide = gl.allocate_shared_memory(ROPE_TYPE, [NC, 64, DIMS[2]], LAYOUTS[4])
    q_smem = (q_main, q_tail, q_rope, q_wide)
    k_smem = key_tiles(ST, BN, DIMS, LAYOUTS, ROPE_TYPE, K_SCALED)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [ST, BN, DIMS[3]], LAYOUTS[3])
    info = gl.allocate_shared_memory(
        gl.int32, [2 * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    q_bars = (barriers(NC, 1), barriers(NC, 1))
    k_ready = barriers(ST, 1 + LANES if K_SCALED else 1)
    k_empty = barriers(ST, NC)
    v_ready = barriers(ST, 1)
    v_empty = barriers(ST, NC)
    t_ready = barriers(2, 1)
    t_empty = barriers(2, NC + 1)
    t_request = barriers(1, 1)
    shape = (cu_q_ptr, cu_k_ptr, batch, total_q, rest_q, total_k, heads, starts_ptr)
    smem = (q_smem, k_smem, v_smem)
    bars = (q_bars, k_ready, k_empty, v_ready, v_empty, t_ready, t_empty)
    out = (out_ptr, out_stride_t, out_stride_h)
    lse = (lse_ptr, lse_stride_t, lse_stride_h)
    results = (out, lse, sink_ptr, (part_sums_ptr, part_state_ptr))
    q_descs = (q_main_desc, q_tail_desc, q_rope_desc)
    k_descs = (k_main_desc, k_tail_desc, k_rope_desc, k_scale_ptr)
    load_bars = (q_bars, k_ready, k_empty, v_ready, v_empty, t_ready, t_empty, t_request)
    table = (table_ptr, table_stride)
    descs = (q_descs, k_descs, v_desc)
    draw_bars = (t_ready, t_empty, t_request)
    if NC == 1:
        gl.warp_specialize(
            [
                (consumer, (info, smem, bars, results, factor, q_scale_ptr, 0, NC, HOW, DIMS)),
                (producer, (info, descs, smem, load_bars, table, NC, BN, ST, DIMS, ROPE, SPLIT)),
                (scheduler, (info, draw_bars, counter_ptr, shape, TILE)),
            ],
            [1, 1],
            [REGISTERS[1], REGISTERS[1]],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (info, smem, bars, results, factor, q_scale_ptr, 0, NC, HOW, DIMS)),
                (consumer, (info, smem, bars, results, factor, q_scale_ptr, 1, NC, HOW, DIMS)),
                (producer, (info, descs, smem, load_bars, table, NC, BN, ST, DIMS, ROPE, SPLIT)),
                (scheduler, (info, draw_bars, counter_ptr, shape, TILE)),
            ],
            [4, 1, 1],
            [REGISTERS[0], REGISTERS[1], REGISTERS[1]],
        )
