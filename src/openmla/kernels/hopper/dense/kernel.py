# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""Dense MLA prefill on Hopper: per-head K and V, one rope row for all heads. bf16 or fp16.

A block works on BM = 64 x NC queries of one head at a time and walks their keys BN at a time.
Blocks stay and draw the next work item of work (tiles.py) from a counter (scheduler.py).

| partition | warps | registers | does |
|---|---|---|---|
| consumer 0 (default), consumer 1 (if NC 2) | 4 each | 240 | 64 rows: QK, softmax, PV, store |
| producer | 1 | 24 | TMA loads of Q, K, V (producer.py) |
| scheduler | 1 | 24 | draws work items, works out their rows and keys |

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

With a mask of keys, four words for each row come with a block of K, and no block is without a mask.
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
from openmla.kernels.hopper.dense.epilogue import finish
from openmla.kernels.hopper.dense.producer import producer
from openmla.kernels.hopper.dense.scheduler import (
    BLOCKS,
    FIELDS,
    HEAD,
    KEYS,
    ROWS,
    SEEN,
    SLOT,
    TOKEN,
    WHOLE,
    get,
    scheduler,
)
from openmla.kernels.hopper.dense.softmax import (
    hide,
    keep_before,
    keep_bits,
    load_words,
    pack,
    rescale_rows,
    softmax_first,
    softmax_step,
    unpack,
)

WARPS = gl.constexpr(4)  # of a consumer


@gluon.jit
def issue_qk(q_smem, k_smem, stage, WHO: gl.constexpr, SL: gl.constexpr, DIMS: gl.constexpr):
    """Start the scores of a block: one product per part of the columns."""
    q_main, q_tail, q_rope = q_smem
    k_main, k_tail, k_rope = k_smem
    BN: gl.constexpr = k_main.shape[1]
    S = gl.zeros([64, BN], gl.float32, SL)
    k = k_main.index(stage).permute((1, 0))
    S = warpgroup_mma(q_main.index(opaque_zero() + WHO), k, S, use_acc=False, is_async=True)
    if DIMS[1] > 0:
        k = k_tail.index(stage).permute((1, 0))
        S = warpgroup_mma(q_tail.index(opaque_zero() + WHO), k, S, is_async=True)
    if DIMS[2] > 0:
        k = k_rope.index(stage).permute((1, 0))
        S = warpgroup_mma(q_rope.index(opaque_zero() + WHO), k, S, is_async=True)
    return S


@gluon.jit
def walk(  # noqa: PLR0913
    state, it, blocks, first, last, limits, factor, smem, bars, MASKED: gl.constexpr,
    WHO: gl.constexpr, HOW: gl.constexpr, DIMS: gl.constexpr, LAYOUTS: gl.constexpr,
):  # fmt: skip
    """Steps first … last - 1 of a work item; each multiplies V of the block before it.

    state: packed P of the block before, O without it, row_max, row_sum, and the rescale O still
    needs.
    """
    words, O, row_max, row_sum, rescale = state
    seen, keys = limits
    q_smem, k_smem, v_smem, mask_smem = smem
    q_empty, k_ready, k_empty, v_ready, v_empty = bars
    BN: gl.constexpr = v_smem.shape[1]
    ST: gl.constexpr = v_smem.shape[0]
    DTYPE: gl.constexpr = v_smem.dtype
    NC: gl.constexpr = q_smem[0].shape[0]
    for c in range(first, last):
        stage = it % ST
        if HOW[3]:
            stage += opaque_zero()  # or the words' addresses are carried, and one too many
        before = (it + (ST - 1)) % ST
        mbarrier.wait(k_ready.index(stage), (it // ST) & 1)
        S_next = issue_qk(q_smem, k_smem, stage, WHO, LAYOUTS[0], DIMS)
        O = rescale_rows(O, rescale)
        mbarrier.wait(v_ready.index(before), ((it - 1) // ST) & 1)
        P = unpack(words, BN, DTYPE, LAYOUTS[1])
        O_next = warpgroup_mma(P, v_smem.index(before), O, is_async=True)
        S = warpgroup_mma_wait(1, deps=(S_next,))
        if HOW[3]:
            bits = load_words(mask_smem.index(stage * NC + WHO), S)
        mbarrier.arrive(k_empty.index(stage), count=1)
        if c == blocks - 1:  # a branch: the barrier that comes with an arrive costs every step
            mbarrier.arrive(q_empty.index(WHO), count=1)
        S = signed(S, HOW[1])
        if MASKED:
            skip = (blocks - 1 - c) * BN
            S = hide(S, seen - skip, keys - skip, HOW[0])
        if HOW[3]:
            S = keep_bits(S, bits)
        weights, row_max, row_sum, rescale = softmax_step(
            S, row_max, row_sum, factor, MASKED or HOW[3], BN
        )
        row_sum = keep_before(row_sum)
        O, P = warpgroup_mma_wait(0, deps=(O_next, P))
        mbarrier.arrive(v_empty.index(before), count=1)
        words = pack(weights, BN, DTYPE)
        it += 1
    return (words, O, row_max, row_sum, rescale), it


@gluon.jit
def consumer(
    info, smem, bars, results, factor, WHO: gl.constexpr, NC: gl.constexpr, HOW: gl.constexpr,
    DIMS: gl.constexpr,
):  # fmt: skip
    """64 rows of every work item: rows 64 x WHO … of its tile."""
    q_smem, k_smem, v_smem, mask_smem = smem
    q_bars, k_ready, k_empty, v_ready, v_empty, t_ready, t_empty = bars
    q_ready, q_empty = q_bars
    BN: gl.constexpr = v_smem.shape[1]
    ST: gl.constexpr = v_smem.shape[0]
    DTYPE: gl.constexpr = v_smem.dtype
    D_V: gl.constexpr = DIMS[3]
    SPLIT: gl.constexpr = HOW[2]
    QK_GROUPS: gl.constexpr = 1 + (DIMS[1] > 0) + (DIMS[2] > 0)
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_V, 16])
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OL, k_width=2)
    LAYOUTS: gl.constexpr = (SL, PL)
    walk_bars = (q_empty, k_ready, k_empty, v_ready, v_empty)
    turn = gl.program_id(0) * 0
    it = turn  # key blocks so far, over all work items
    mbarrier.wait(t_ready.index(0), 0)
    work = read_work_item(info, turn, SPLIT)
    blocks = get(info, turn, BLOCKS, WARPS)
    whole = get(info, turn, WHOLE, WARPS)
    keys = get(info, turn, KEYS, WARPS)
    seen = get(info, turn, SEEN, WARPS)
    mbarrier.arrive(t_empty.index(0), count=1)
    S = gl.zeros([64, BN], gl.float32, SL)
    if blocks > 0:
        mbarrier.wait(q_ready.index(WHO), 0)
        mbarrier.wait(k_ready.index(0), 0)
        S_next = issue_qk(q_smem, k_smem, opaque_zero(), WHO, SL, DIMS)
        S = warpgroup_mma_wait(0, deps=(S_next,))
    while blocks > 0:
        # S holds the scores of the work item's first block, number `it`.
        if HOW[3]:
            bits = load_words(mask_smem.index(it % ST * NC + WHO), S)
        mbarrier.arrive(k_empty.index(it % ST), count=1)
        mbarrier.arrive(q_empty.index(WHO), count=1, pred=blocks == 1)
        skip = (blocks - 1) * BN
        seen += WHO * 64
        S = hide(signed(S, HOW[1]), seen - skip, keys - skip, HOW[0])
        if HOW[3]:
            S = keep_bits(S, bits)
        weights, row_max, row_sum = softmax_first(S, factor, BN)
        words = pack(weights, BN, DTYPE)
        O = gl.zeros([64, D_V], gl.float32, OL)
        rescale = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, SL))
        it += 1
        # Blocks come from the last to the first, so those that need a mask come first.
        masked = blocks - gl.minimum(whole, blocks - 1)
        state = (words, O, row_max, row_sum, rescale)
        state, it = walk(
            state, it, blocks, 1, masked, (seen, keys), factor, smem, walk_bars, True, WHO, HOW,
            DIMS, LAYOUTS,
        )  # fmt: skip
        state, it = walk(
            state, it, blocks, masked, blocks, (seen, keys), factor, smem, walk_bars, False, WHO,
            HOW, DIMS, LAYOUTS,
        )  # fmt: skip
        words, O, row_max, row_sum, rescale = state
        # The last PV of this work item, then the first QK of the next.
        before = (it + (ST - 1)) % ST
        O = rescale_rows(O, rescale)
        mbarrier.wait(v_ready.index(before), ((it - 1) // ST) & 1)
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
        stage = gl.where(blocks > 0, it % ST, before)
        mbarrier.wait(q_ready.index(WHO), turn & 1, pred=blocks > 0)
        mbarrier.wait(k_ready.index(stage), (it // ST) & 1, pred=blocks > 0)
        S_next = issue_qk(q_smem, k_smem, stage, WHO, SL, DIMS)
        O, P = warpgroup_mma_wait(QK_GROUPS, deps=(O_next, P))
        mbarrier.arrive(v_empty.index(before), count=1)
        finish(O, row_max, row_sum, work, results, WHO, NC, SPLIT)
        S = warpgroup_mma_wait(0, deps=(S_next,))
        work = next_work_item


@gluon.jit
def read_work_item(info, slot, SPLIT: gl.constexpr):
    """What the epilogue needs to know: head, first token, rows, workspace slot."""
    head = get(info, slot, HEAD, WARPS)
    token = get(info, slot, TOKEN, WARPS)
    rows = get(info, slot, ROWS, WARPS)
    part = head * 0
    if SPLIT > 0:
        part = get(info, slot, SLOT, WARPS)
    return head, token, rows, part


@gluon.jit
def column_tiles(
    NUMBER: gl.constexpr, HIGH: gl.constexpr, DIMS: gl.constexpr, LAYOUTS: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """NUMBER tiles of Q or K: main, tail and rope columns. A missing part stands for the first."""
    main = gl.allocate_shared_memory(DTYPE, [NUMBER, HIGH, DIMS[0]], LAYOUTS[0])
    tail = main
    rope = main
    if DIMS[1] > 0:
        tail = gl.allocate_shared_memory(DTYPE, [NUMBER, HIGH, DIMS[1]], LAYOUTS[1])
    if DIMS[2] > 0:
        rope = gl.allocate_shared_memory(DTYPE, [NUMBER, HIGH, DIMS[2]], LAYOUTS[2])
    return main, tail, rope


COUNTS = ["batch", "total_q", "rest_q", "total_k", "heads", "table_stride", "factor"]
STRIDES = ["out_stride_t", "out_stride_h", "lse_stride_t", "lse_stride_h"]


# Vectors of 4-byte elements, read and written one by one: a slice of a tensor is as good as all.
VECTORS = ["lse_ptr", "sink_ptr", "cu_q_ptr", "cu_k_ptr", "starts_ptr", "table_ptr", "counter_ptr"]


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def dense_kernel(  # noqa: PLR0913
    q_main_desc, q_tail_desc, q_rope_desc, k_main_desc, k_tail_desc, k_rope_desc, v_desc, mask_desc,
    out_ptr, lse_ptr, sink_ptr, cu_q_ptr, cu_k_ptr, starts_ptr, table_ptr, counter_ptr,
    part_sums_ptr, part_state_ptr, factor, batch, total_q, rest_q, total_k, heads, table_stride,
    out_stride_t, out_stride_h, lse_stride_t, lse_stride_h, NC: gl.constexpr, BN: gl.constexpr,
    ST: gl.constexpr, DIMS: gl.constexpr, ROPE: gl.constexpr, CAUSAL: gl.constexpr,
    SIGN: gl.constexpr, HG: gl.constexpr, SPLIT: gl.constexpr, SM_COUNT: gl.constexpr,
    REGISTERS: gl.constexpr, LAYOUTS: gl.constexpr,
):  # fmt: skip
    """DIMS: columns of main, tail, rope, V. ROPE: source and page size. SPLIT: fewest keys of a
    range (0: never). REGISTERS: consumer, producer. LAYOUTS: of [rows, columns] tiles, as DIMS."""
    DTYPE: gl.constexpr = v_desc.dtype
    HOW: gl.constexpr = (CAUSAL, SIGN, SPLIT, mask_desc is not None)
    TILE: gl.constexpr = (64 * NC, BN, CAUSAL, HG, SPLIT, SM_COUNT)
    shape = (cu_q_ptr, cu_k_ptr, batch, total_q, rest_q, total_k, heads, starts_ptr)
    q_smem = column_tiles(NC, 64, DIMS, LAYOUTS, DTYPE)
    k_smem = column_tiles(ST, BN, DIMS, LAYOUTS, DTYPE)
    v_smem = gl.allocate_shared_memory(DTYPE, [ST, BN, DIMS[3]], LAYOUTS[3])
    info = gl.allocate_shared_memory(
        gl.int32, [2 * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    q_bars = (barriers(NC, 1), barriers(NC, 1))
    k_ready = barriers(ST, 1)
    k_empty = barriers(ST, NC)
    v_ready = barriers(ST, 1)
    v_empty = barriers(ST, NC)
    t_ready = barriers(2, 1)
    t_empty = barriers(2, NC + 1)
    t_request = barriers(1, 1)
    smem = (q_smem, k_smem, v_smem, mask_desc)
    if mask_desc is not None:
        words = gl.allocate_shared_memory(gl.int32, [ST * NC, 64, 4], mask_desc.layout)
        smem = (q_smem, k_smem, v_smem, words)
    bars = (q_bars, k_ready, k_empty, v_ready, v_empty, t_ready, t_empty)
    out = (out_ptr, out_stride_t, out_stride_h)
    lse = (lse_ptr, lse_stride_t, lse_stride_h)
    results = (out, lse, sink_ptr, (part_sums_ptr, part_state_ptr))
    q_descs = (q_main_desc, q_tail_desc, q_rope_desc)
    k_descs = (k_main_desc, k_tail_desc, k_rope_desc)
    load_bars = (q_bars, k_ready, k_empty, v_ready, v_empty, t_ready, t_empty, t_request)
    table = (table_ptr, table_stride)
    descs = (q_descs, k_descs, v_desc, mask_desc)
    draw_bars = (t_ready, t_empty, t_request)
    if NC == 1:
        gl.warp_specialize(
            [
                (consumer, (info, smem, bars, results, factor, 0, NC, HOW, DIMS)),
                (producer, (info, descs, smem, load_bars, table, NC, BN, ST, DIMS, ROPE, SPLIT)),
                (scheduler, (info, draw_bars, counter_ptr, shape, TILE)),
            ],
            [1, 1],
            [REGISTERS[1], REGISTERS[1]],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (info, smem, bars, results, factor, 0, NC, HOW, DIMS)),
                (consumer, (info, smem, bars, results, factor, 1, NC, HOW, DIMS)),
                (producer, (info, descs, smem, load_bars, table, NC, BN, ST, DIMS, ROPE, SPLIT)),
                (scheduler, (info, draw_bars, counter_ptr, shape, TILE)),
            ],
            [4, 1, 1],
            [REGISTERS[0], REGISTERS[1], REGISTERS[1]],
        )
