# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""Dense MLA prefill on Hopper: per-head K and V, one rope row for all heads. bf16 or fp16.

A CTA works on BM = 64 x NC queries of one head at a time and walks their keys BN at a time. CTAs
are persistent and fetch work items (tiles.py) from an atomic counter (scheduler.py).

| partition | warps | registers | does |
|---|---|---|---|
| consumer 0 (default), consumer 1 (if NC 2) | 4 each | 240 | 64 rows: QK, softmax, PV, store |
| producer | 1 | 24 | TMA loads of Q, K, V (producer.py) |
| scheduler | 1 | 24 | fetches work items, works out their rows and keys |

| barrier | number | completed by (count) | waited for by |
|---|---|---|---|
| q_ready | NC | TMA bytes of one consumer's Q (1) | that consumer |
| q_empty | NC | that consumer, after the last QK of a work item (1) | producer |
| k_ready, v_ready | ST | TMA bytes of K with rope, of V (1) | consumers |
| k_empty, v_empty | ST | every consumer, after QK, after PV (NC) | producer |
| t_ready | 2 | scheduler: a work item is described in `info` (1) | producer, consumers |
| t_empty | 2 | producer and consumers have read it (NC + 1) | scheduler |
| t_request | 1 | producer, two key blocks before the end of a work item (1) | scheduler |

| shared memory | bytes (128 + 64 -> 128, NC 2, BN 128, ST 2) |
|---|---|
| q_main, q_tail, q_rope | NC x 64 x (128 + 0 + 64) x 2 = 49152 |
| k_main, k_tail, k_rope | ST x 128 x (128 + 0 + 64) x 2 = 98304 |
| v | ST x 128 x 128 x 2 = 65536 |
| mask, if there is one | ST x NC x 64 x 16 = 4096 |
| info, barriers | 128 + 144 |
| epilogue's change of layout, warp states | 8192 + 8 |

d_nope is one tile of columns, or two (192 = 128 + 64), because tile widths are powers of two.

A consumer keeps two products in flight: QK of block j and PV of block j - 1, with the softmax of
block j under PV. At the end of a work item the last PV and the first QK of the next work item
overlap, and normalizing and storing runs under that QK. Nothing is in flight on a loop's back edge,
or ptxas would put waits between all wgmma.

With a key mask, four words for each row come with a block of K, and no block is without a mask.

With a window, blocks in which a row's window begins are masked again, in a third loop (tiles.py
says which blocks a tile visits).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openmla.kernels.gluon.barriers import barriers
from openmla.kernels.gluon.scores import opaque_zero, signed
from openmla.kernels.hopper.accumulator import rescale_rows
from openmla.kernels.hopper.dense.epilogue import finish
from openmla.kernels.hopper.dense.producer import producer
from openmla.kernels.hopper.dense.records import (
    Barriers,
    BlockTable,
    ColumnTiles,
    How,
    Limits,
    MmaLayouts,
    Output,
    Requests,
    Results,
    SharedMemory,
    SoftmaxState,
    Sources,
    Tiling,
)
from openmla.kernels.hopper.dense.scheduler import (
    CUT,
    SINCE,
    allocate_info,
    get,
    get_consumer_item,
    scheduler,
)
from openmla.kernels.hopper.dense.softmax import (
    hide,
    keep_before,
    keep_bits,
    load_words,
    pack,
    softmax_first,
    softmax_step,
    unpack,
)

WARPS = gl.constexpr(4)  # of a consumer


@gluon.jit
def issue_qk(q, k, stage, WHO: gl.constexpr, SL: gl.constexpr, DIMS: gl.constexpr):
    """Start the scores of a block: one product for each of the ColumnTiles q and k."""
    BN: gl.constexpr = k.main.shape[1]
    S = gl.zeros([64, BN], gl.float32, SL)
    keys = k.main.index(stage).permute((1, 0))
    S = warpgroup_mma(q.main.index(opaque_zero() + WHO), keys, S, use_acc=False, is_async=True)
    if DIMS.tail > 0:
        keys = k.tail.index(stage).permute((1, 0))
        S = warpgroup_mma(q.tail.index(opaque_zero() + WHO), keys, S, is_async=True)
    if DIMS.rope > 0:
        keys = k.rope.index(stage).permute((1, 0))
        S = warpgroup_mma(q.rope.index(opaque_zero() + WHO), keys, S, is_async=True)
    return S


@gluon.jit
def walk(  # noqa: PLR0913
    state,
    it,
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
    """Steps first … last - 1 of a work item; each multiplies V of the block before it.

    Takes and returns a SoftmaxState and the number of the next block; limits: Limits, smem:
    SharedMemory, bars: Barriers, HOW: How, DIMS: Columns, LAYOUTS: MmaLayouts.
    """
    words, O, row_max, row_sum, rescale = state
    BN: gl.constexpr = smem.v.shape[1]
    ST: gl.constexpr = smem.v.shape[0]
    DTYPE: gl.constexpr = smem.v.dtype
    NC: gl.constexpr = smem.q.main.shape[0]
    for c in range(first, last):
        stage = it % ST
        if HOW.has_key_mask:
            stage += opaque_zero()  # or the words' addresses are carried, and one too many
        before = (it + (ST - 1)) % ST
        mbarrier.wait(bars.k_ready.index(stage), (it // ST) & 1)
        S_next = issue_qk(smem.q, smem.k, stage, WHO, LAYOUTS.scores, DIMS)
        O = rescale_rows(O, rescale)
        mbarrier.wait(bars.v_ready.index(before), ((it - 1) // ST) & 1)
        P = unpack(words, BN, DTYPE, LAYOUTS.weights)
        O_next = warpgroup_mma(P, smem.v.index(before), O, is_async=True)
        S = warpgroup_mma_wait(1, deps=(S_next,))
        if HOW.has_key_mask:
            bits = load_words(smem.key_mask.index(stage * NC + WHO), S)
        mbarrier.arrive(bars.k_empty.index(stage), count=1)
        if c == blocks - 1:  # a branch: the barrier that comes with an arrive costs every step
            mbarrier.arrive(bars.q_empty.index(WHO), count=1)
        S = signed(S, HOW.sign)
        if MASKED:
            skip = (blocks - 1 - c) * BN
            if HOW.has_window:
                since = limits.since - skip
                S = hide(S, limits.seen - skip, limits.keys - skip, HOW.is_causal, since)
            else:
                S = hide(S, limits.seen - skip, limits.keys - skip, HOW.is_causal)
        if HOW.has_key_mask:
            S = keep_bits(S, bits)
        weights, row_max, row_sum, rescale = softmax_step(
            S, row_max, row_sum, factor, MASKED or HOW.has_key_mask, BN
        )
        row_sum = keep_before(row_sum)
        O, P = warpgroup_mma_wait(0, deps=(O_next, P))
        mbarrier.arrive(bars.v_empty.index(before), count=1)
        words = pack(weights, BN, DTYPE)
        it += 1
    return SoftmaxState(words, O, row_max, row_sum, rescale), it


@gluon.jit
def consumer(
    info,
    smem,
    bars,
    results,
    factor,
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
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_V, 16])
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OL, k_width=2)
    LAYOUTS: gl.constexpr = MmaLayouts(scores=SL, weights=PL)
    turn = gl.program_id(0) * 0
    it = turn  # key blocks so far, over all work items
    mbarrier.wait(bars.t_ready.index(0), 0)
    tile, blocks, whole, keys, seen = get_consumer_item(info, turn, WARPS, HOW.min_split)
    if HOW.has_window:
        cut = get(info, turn, CUT, WARPS)
        since = get(info, turn, SINCE, WARPS)
    mbarrier.arrive(bars.t_empty.index(0), count=1)
    S = gl.zeros([64, BN], gl.float32, SL)
    if blocks > 0:
        mbarrier.wait(bars.q_ready.index(WHO), 0)
        mbarrier.wait(bars.k_ready.index(0), 0)
        S_next = issue_qk(smem.q, smem.k, opaque_zero(), WHO, SL, DIMS)
        S = warpgroup_mma_wait(0, deps=(S_next,))
    while blocks > 0:
        # S holds the scores of the work item's first block, number `it`.
        if HOW.has_key_mask:
            bits = load_words(smem.key_mask.index(it % ST * NC + WHO), S)
        mbarrier.arrive(bars.k_empty.index(it % ST), count=1)
        mbarrier.arrive(bars.q_empty.index(WHO), count=1, pred=blocks == 1)
        skip = (blocks - 1) * BN
        seen += WHO * 64
        if HOW.has_window:
            since += WHO * 64
            S = hide(signed(S, HOW.sign), seen - skip, keys - skip, HOW.is_causal, since - skip)
        else:
            S = hide(signed(S, HOW.sign), seen - skip, keys - skip, HOW.is_causal)
        if HOW.has_key_mask:
            S = keep_bits(S, bits)
        weights, row_max, row_sum = softmax_first(S, factor, BN)
        words = pack(weights, BN, DTYPE)
        O = gl.zeros([64, D_V], gl.float32, OL)
        rescale = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, SL))
        it += 1
        # Blocks come from the last to the first, so those that need a mask come first.
        masked = blocks - gl.minimum(whole, blocks - 1)
        late = blocks
        limits = Limits(seen, keys)
        if HOW.has_window:
            late = gl.maximum(blocks - cut, masked)
            limits = Limits(seen, keys, since)
        state = SoftmaxState(words, O, row_max, row_sum, rescale)
        state, it = walk(
            state,
            it,
            blocks,
            1,
            masked,
            limits,
            factor,
            smem,
            bars,
            True,
            WHO,
            HOW,
            DIMS,
            LAYOUTS,
        )
        state, it = walk(
            state,
            it,
            blocks,
            masked,
            late,
            limits,
            factor,
            smem,
            bars,
            False,
            WHO,
            HOW,
            DIMS,
            LAYOUTS,
        )
        if HOW.has_window:
            state, it = walk(
                state,
                it,
                blocks,
                late,
                blocks,
                limits,
                factor,
                smem,
                bars,
                True,
                WHO,
                HOW,
                DIMS,
                LAYOUTS,
            )
        words, O, row_max, row_sum, rescale = state
        # The last PV of this work item, then the first QK of the next.
        before = (it + (ST - 1)) % ST
        O = rescale_rows(O, rescale)
        mbarrier.wait(bars.v_ready.index(before), ((it - 1) // ST) & 1)
        P = unpack(words, BN, DTYPE, PL)
        O_next = warpgroup_mma(P, smem.v.index(before), O, is_async=True)
        turn += 1
        slot = turn & 1
        mbarrier.wait(bars.t_ready.index(slot), (turn >> 1) & 1)
        next_tile, blocks, whole, keys, seen = get_consumer_item(info, slot, WARPS, HOW.min_split)
        if HOW.has_window:
            cut = get(info, slot, CUT, WARPS)
            since = get(info, slot, SINCE, WARPS)
        mbarrier.arrive(bars.t_empty.index(slot), count=1)
        # After the last work item the product is idle: it reads the block before, which the
        # producer does not overwrite any more.
        stage = gl.where(blocks > 0, it % ST, before)
        mbarrier.wait(bars.q_ready.index(WHO), turn & 1, pred=blocks > 0)
        mbarrier.wait(bars.k_ready.index(stage), (it // ST) & 1, pred=blocks > 0)
        S_next = issue_qk(smem.q, smem.k, stage, WHO, SL, DIMS)
        O, P = warpgroup_mma_wait(QK_GROUPS, deps=(O_next, P))
        mbarrier.arrive(bars.v_empty.index(before), count=1)
        finish(O, row_max, row_sum, tile, results, WHO, NC, HOW.min_split)
        S = warpgroup_mma_wait(0, deps=(S_next,))
        tile = next_tile


@gluon.jit
def column_tiles(
    NUMBER: gl.constexpr,
    HIGH: gl.constexpr,
    DIMS: gl.constexpr,
    LAYOUTS: gl.constexpr,
    DTYPE: gl.constexpr,
    ROPE_LAYOUT: gl.constexpr,
    ROPE_DTYPE: gl.constexpr,
):
    """NUMBER ColumnTiles of HIGH rows of Q or K; a part that does not exist is an alias of `main`.

    DIMS: Columns, LAYOUTS: TileLayouts.
    """
    main = gl.allocate_shared_memory(DTYPE, [NUMBER, HIGH, DIMS.main], LAYOUTS.main)
    tail = main
    rope = main
    if DIMS.tail > 0:
        tail = gl.allocate_shared_memory(DTYPE, [NUMBER, HIGH, DIMS.tail], LAYOUTS.tail)
    if DIMS.rope > 0:
        rope = gl.allocate_shared_memory(ROPE_DTYPE, [NUMBER, HIGH, DIMS.rope], ROPE_LAYOUT)
    return ColumnTiles(main, tail, rope)


@gluon.jit
def allocate_barriers(NC: gl.constexpr, ST: gl.constexpr, K_ARRIVALS: gl.constexpr):
    """Barriers; K_ARRIVALS: the count of k_ready, of which 1 is for TMA bytes."""
    return Barriers(
        q_ready=barriers(NC, 1),
        q_empty=barriers(NC, 1),
        k_ready=barriers(ST, K_ARRIVALS),
        k_empty=barriers(ST, NC),
        v_ready=barriers(ST, 1),
        v_empty=barriers(ST, NC),
        t_ready=barriers(2, 1),
        t_empty=barriers(2, NC + 1),
        t_request=barriers(1, 1),
    )


COUNTS = ["batch", "total_q", "rest_q", "total_k", "heads", "table_stride", "factor"]
STRIDES = ["out_stride_t", "out_stride_h", "lse_stride_t", "lse_stride_h"]


# Vectors of 4-byte elements, read and written one by one: a slice of a tensor is as good as all.
VECTORS = ["lse_ptr", "sink_ptr", "cu_q_ptr", "cu_k_ptr", "starts_ptr", "table_ptr", "counter_ptr"]


@gluon.jit(do_not_specialize=[*COUNTS, "window", *STRIDES], do_not_specialize_on_alignment=VECTORS)
def dense_kernel(  # noqa: PLR0913
    q_main_desc,
    q_tail_desc,
    q_rope_desc,
    k_main_desc,
    k_tail_desc,
    k_rope_desc,
    v_desc,
    mask_desc,
    out_ptr,
    lse_ptr,
    sink_ptr,
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
    window,
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
    """DIMS: Columns, ROPE: Rope, REGISTERS: Registers, LAYOUTS: TileLayouts. SPLIT: fewest keys of
    a range of a split request (0: never). GROUP_KEYS: of a group of heads that shares L2."""
    DTYPE: gl.constexpr = v_desc.dtype
    HOW: gl.constexpr = How(
        is_causal=CAUSAL,
        sign=SIGN,
        min_split=SPLIT,
        has_key_mask=mask_desc is not None,
        has_window=window is not None,
    )
    TILE: gl.constexpr = Tiling(
        block_m=64 * NC,
        block_n=BN,
        is_causal=CAUSAL,
        group_keys=GROUP_KEYS,
        min_split=SPLIT,
        sm_count=SM_COUNT,
    )
    requests = Requests(
        cu_seqlens_q=cu_q_ptr,
        cu_seqlens_k=cu_k_ptr,
        batch=batch,
        total_q=total_q,
        rest_q=rest_q,
        total_k=total_k,
        heads=heads,
        k_start=starts_ptr,
        window=window,
    )
    Q_ROPE: gl.constexpr = LAYOUTS.rope
    K_ROPE: gl.constexpr = LAYOUTS.k_rope
    q_smem = column_tiles(NC, 64, DIMS, LAYOUTS, DTYPE, Q_ROPE, DTYPE)
    k_smem = column_tiles(ST, BN, DIMS, LAYOUTS, DTYPE, K_ROPE, DTYPE)
    v_smem = gl.allocate_shared_memory(DTYPE, [ST, BN, DIMS.v], LAYOUTS.v)
    info = allocate_info()
    bars = allocate_barriers(NC, ST, 1)
    mask_smem = None
    if mask_desc is not None:
        mask_smem = gl.allocate_shared_memory(gl.int32, [ST * NC, 64, 4], mask_desc.layout)
    smem = SharedMemory(
        q=q_smem, q_wide_rope=None, k=k_smem, k_scale=None, v=v_smem, key_mask=mask_smem
    )
    sources = Sources(
        q=ColumnTiles(q_main_desc, q_tail_desc, q_rope_desc),
        k=ColumnTiles(k_main_desc, k_tail_desc, k_rope_desc),
        k_scale=None,
        v=v_desc,
        key_mask=mask_desc,
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
                (consumer, (info, smem, bars, results, factor, 0, NC, HOW, DIMS)),
                (producer, (info, sources, smem, bars, table, NC, BN, ST, DIMS, ROPE, SPLIT)),
                (scheduler, (info, bars, counter_ptr, requests, TILE)),
            ],
            [1, 1],
            [REGISTERS.producer, REGISTERS.producer],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (info, smem, bars, results, factor, 0, NC, HOW, DIMS)),
                (consumer, (info, smem, bars, results, factor, 1, NC, HOW, DIMS)),
                (producer, (info, sources, smem, bars, table, NC, BN, ST, DIMS, ROPE, SPLIT)),
                (scheduler, (info, bars, counter_ptr, requests, TILE)),
            ],
            [4, 1, 1],
            [REGISTERS.consumer, REGISTERS.producer, REGISTERS.producer],
        )
