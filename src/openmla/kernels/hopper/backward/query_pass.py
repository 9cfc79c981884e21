"""The query pass on Hopper: statistics of query rows, and d_q. bf16.

A CTA has 128 queries of one head at a time and walks the keys that they see, BN at a time. CTAs are
persistent and fetch work items (gluon/gradients/work_items.py) from an atomic counter.

| partition | warps | registers | does |
|---|---|---|---|
| consumer 0 (default), consumer 1 | 4 each | 240 | 64 rows: statistics, scores, dP, dS, d_q |
| producer | 1 | 24 | TMA loads of Q, d_out, K, V |
| scheduler | 1 | 24 | fetches work items, works out their rows and keys |

| barrier | number | completed by (count) | waited for by |
|---|---|---|---|
| q_ready | 2 | TMA bytes of one consumer's Q and d_out (1) | that consumer |
| q_empty | 2 | that consumer, after the last scores of a work item (1) | producer |
| k_ready, v_ready | ST, VST | TMA bytes of K with rope and bits, of V (1) | consumers |
| k_empty, v_empty | ST, VST | both consumers, after dS K, after dP (2) | producer |
| t_ready | 2 | scheduler: a work item is described in `info` (1) | producer, consumers |
| t_empty | 2 | producer and consumers have read it (3) | scheduler |
| t_request | 1 | producer, two key blocks before the end of a work item (1) | scheduler |

| shared memory | bytes (128 + 64 -> 128, BN 64, ST 3) |
|---|---|
| q_nope, q_rope | 2 x 64 x (128 + 64) x 2 = 49152 |
| d_out | 2 x 64 x 128 x 2 = 32768 |
| k_nope, k_rope | ST x 64 x (128 + 64) x 2 = 73728 |
| v | ST x 64 x 128 x 2 = 49152 |

    S = Q K^T    dP = d_out V^T    dS = exp2(S - total) * (dP - delta)    d_q += dS K

A step has three products in flight: S and dP of block j, and dS K of block j - 1, under which dS of
block j is computed: dS stays in registers, as P does in the forward pass. There is no maximum and
nothing is rescaled, because lse is known. Nothing is in flight on a loop's back edge, or ptxas
would put waits between all wgmma.

Rows of K and V past a sequence are zeros (ragged descriptors): a dS of 0 times a NaN would be a
NaN. Rows of Q past a sequence stay in rows that are not stored.

With a key mask, the bits of a block come with its K: ST x 2 x 64 x 2 words, 3072 bytes more. No
block is without a mask then, and none is skipped.

192 + 64 -> 256 columns: Q and K are two tiles of 128, the second of which begins with the last 64
columns without rope. Q and d_out take 131072 bytes, so BN is 32, and the ring of V has VST = 2
slots: V of a block is needed until dP, K until the block after.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from openmla.kernels.gluon.barriers import barriers
from openmla.kernels.gluon.boxes import load_ragged, load_rows
from openmla.kernels.gluon.gradients.loads import (
    load_bits,
    load_key_block,
    parts_of_rows,
    tiles_of_words,
)
from openmla.kernels.gluon.gradients.records import (
    How,
    Parts,
    QueryMemory,
    QuerySources,
    Rows,
    Saved,
    Sequences,
    Statistics,
    Tiling,
)
from openmla.kernels.gluon.gradients.statistics import PLUS_INF, row_statistics
from openmla.kernels.gluon.scores import signed
from openmla.kernels.hopper.backward.products import (
    NC,
    WARPS,
    WGMMA_ROWS,
    issue_own_gradients,
    issue_scores,
    issue_weight_gradients,
)
from openmla.kernels.hopper.backward.records import QueryBarriers
from openmla.kernels.hopper.backward.rings import free_phase_of, slot_of
from openmla.kernels.hopper.backward.scheduler import BLOCKS, get_work_item, scheduler
from openmla.kernels.hopper.backward.store import write_gradient
from openmla.kernels.hopper.dense.scheduler import allocate_info, get
from openmla.kernels.hopper.dense.softmax import hide, keep_bits, load_words, pack


@gluon.jit
def load_queries(sources, smem, bars, item, phase, DIMS: gl.constexpr):
    """Load Q and d_out of each consumer, as soon as it has finished with its last ones."""
    for w in gl.static_range(2):
        bar = bars.q_ready.index(w)
        mbarrier.wait(bars.q_empty.index(w), phase)
        mbarrier.expect(bar, WGMMA_ROWS * (DIMS.nope + DIMS.rope + DIMS.v) * 2)
        row = item.token + w * WGMMA_ROWS
        load_rows(sources.q.nope, row, item.head, 0, bar, smem.q.nope.index(w))
        if DIMS.rope > 0:
            load_rows(sources.q.rope, row, item.head, DIMS.nope, bar, smem.q.rope.index(w))
        load_rows(sources.d_out, row, item.head, 0, bar, smem.d_out.index(w))


@gluon.jit
def producer(info, sources, smem, bars, DIMS: gl.constexpr, HOW: gl.constexpr):
    """Load what the scheduler announces, work item after work item.

    sources: QuerySources, smem: QueryMemory, bars: QueryBarriers, DIMS: Columns, HOW: How.
    """
    BN: gl.constexpr = smem.v.shape[1]
    ST: gl.constexpr = smem.k.nope.shape[0]
    VST: gl.constexpr = smem.v.shape[0]
    BITS: gl.constexpr = NC * WGMMA_ROWS * BN // 8 if HOW.has_key_mask else 0  # bytes of a block
    turn = gl.program_id(0) * 0
    it = turn  # key blocks so far, over all work items
    mbarrier.wait(bars.t_ready.index(0), 0)
    blocks = get(info, 0, BLOCKS, 1)
    while blocks > 0:
        slot = turn & 1
        item = get_work_item(info, slot, 1)
        mbarrier.arrive(bars.t_empty.index(slot), count=1)
        for c in range(0, blocks):
            late = c == gl.maximum(blocks - 2, 0)
            mbarrier.arrive(bars.t_request.index(0), count=1, pred=late)
            stage = it % ST
            phase = ((it // ST) & 1) ^ 1
            row = (blocks - 1 - c) * BN
            mbarrier.wait(bars.k_empty.index(stage), phase)
            ready = bars.k_ready.index(stage)
            load_key_block(sources, smem, ready, stage, item, row, DIMS, HOW, BITS)
            if HOW.has_key_mask:
                column = item.place * (BN // 32)
                load_bits(sources.bits, row // BN, column, ready, smem.bits, stage * NC, NC)
            if c == 0:
                load_queries(sources, smem, bars, item, (turn & 1) ^ 1, DIMS)
            at = slot_of(it, stage, VST, ST)
            mbarrier.wait(bars.v_empty.index(at), free_phase_of(it, phase, VST, ST))
            ready = bars.v_ready.index(at)
            mbarrier.expect(ready, BN * DIMS.v * 2)
            v = smem.v.index(at)
            load_ragged(sources.v, item.start, item.length, row, item.head, ready, v)
            it += 1
        turn += 1
        mbarrier.wait(bars.t_ready.index(turn & 1), (turn >> 1) & 1)
        blocks = get(info, turn & 1, BLOCKS, 1)


@gluon.jit
def weights_of(
    S,
    smem,
    stage,
    total,
    factor,
    skip,
    item,
    MASKED: gl.constexpr,
    WHO: gl.constexpr,
    HOW: gl.constexpr,
):
    """exp2(S - total); with a mask, 0 where a key is not seen. skip: keys before the block."""
    S = signed(S, HOW.sign)
    if HOW.has_key_mask:
        S = keep_bits(S, load_words(smem.bits.index(stage * NC + WHO), S))
    if MASKED:
        S = hide(S, item.limit + WHO * 64 - skip, item.length - skip, HOW.is_causal)
    return gl.exp2(S * factor - total[:, None])


@gluon.jit
def walk(  # noqa: PLR0913
    words,
    d_q,
    it,
    item,
    first,
    last,
    rows,
    factor,
    smem,
    bars,
    MASKED: gl.constexpr,
    WHO: gl.constexpr,
    HOW: gl.constexpr,
    DIMS: gl.constexpr,
    SL: gl.constexpr,
):
    """Steps first … last - 1 of a work item; each multiplies dS of the block before with its K.

    Takes and returns dS in pairs, d_q (Parts) and the number of the next block; item: WorkItem,
    rows: RowStatistics, smem: QueryMemory, bars: QueryBarriers, HOW: How, DIMS: Columns.
    """
    BN: gl.constexpr = smem.v.shape[1]
    ST: gl.constexpr = smem.k.nope.shape[0]
    VST: gl.constexpr = smem.v.shape[0]
    DTYPE: gl.constexpr = smem.v.dtype
    PARTS: gl.constexpr = 1 + (DIMS.rope > 0)
    d_nope, d_rope = d_q
    for c in range(first, last):
        stage = it % ST
        before = (it + (ST - 1)) % ST
        mbarrier.wait(bars.k_ready.index(stage), (it // ST) & 1)
        S_next = issue_scores(smem.q, smem.k, stage, WHO, SL, DIMS)
        at = slot_of(it, stage, VST, ST)
        mbarrier.wait(bars.v_ready.index(at), (it // VST) & 1)
        dP_next = issue_weight_gradients(smem.d_out, smem.v, at, WHO, SL)
        next_q, dS = issue_own_gradients(words, Parts(d_nope, d_rope), smem.k, before, DIMS)
        S = warpgroup_mma_wait(1 + PARTS, deps=(S_next,))
        skip = (item.blocks - 1 - c) * BN
        P = weights_of(S, smem, stage, rows.total, factor, skip, item, MASKED, WHO, HOW)
        dP = warpgroup_mma_wait(PARTS, deps=(dP_next,))
        mbarrier.arrive(bars.v_empty.index(at), count=1)
        gradients = P * (dP - rows.delta[:, None])
        if DIMS.rope > 0:
            d_nope, d_rope, dS = warpgroup_mma_wait(0, deps=(next_q.nope, next_q.rope, dS))
        else:
            d_nope, dS = warpgroup_mma_wait(0, deps=(next_q.nope, dS))
        mbarrier.arrive(bars.k_empty.index(before), count=1)
        words = pack(gradients, BN, DTYPE)
        it += 1
    return words, Parts(d_nope, d_rope), it


@gluon.jit
def consumer(
    info,
    smem,
    bars,
    saved,
    stats,
    d_q_rows,
    factor,
    scale,
    WHO: gl.constexpr,
    HOW: gl.constexpr,
    DIMS: gl.constexpr,
):
    """64 rows of every work item: rows 64 x WHO … of its tile.

    smem: QueryMemory, bars: QueryBarriers, saved: Saved, stats: Statistics, d_q_rows: Rows.
    """
    BN: gl.constexpr = smem.v.shape[1]
    ST: gl.constexpr = smem.k.nope.shape[0]
    VST: gl.constexpr = smem.v.shape[0]
    DTYPE: gl.constexpr = smem.v.dtype
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    NL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIMS.nope, 16])
    NOPE: gl.constexpr = DIMS.nope
    ROPE: gl.constexpr = DIMS.rope
    turn = gl.program_id(0) * 0
    it = turn  # key blocks so far, over all work items
    mbarrier.wait(bars.t_ready.index(0), 0)
    blocks = get(info, turn, BLOCKS, WARPS)
    while blocks > 0:
        slot = turn & 1
        item = get_work_item(info, slot, WARPS)
        mbarrier.arrive(bars.t_empty.index(slot), count=1)
        # The first block, with the statistics under its products.
        stage = it % ST
        mbarrier.wait(bars.q_ready.index(WHO), turn & 1)
        mbarrier.wait(bars.k_ready.index(stage), (it // ST) & 1)
        S_next = issue_scores(smem.q, smem.k, stage, WHO, SL, DIMS)
        at = slot_of(it, stage, VST, ST)
        mbarrier.wait(bars.v_ready.index(at), (it // VST) & 1)
        dP_next = issue_weight_gradients(smem.d_out, smem.v, at, WHO, SL)
        rows = row_statistics(item, saved, stats, DIMS.v, WHO, SL)
        S, dP = warpgroup_mma_wait(0, deps=(S_next, dP_next))
        mbarrier.arrive(bars.v_empty.index(at), count=1)
        skip = (blocks - 1) * BN
        P = weights_of(S, smem, stage, rows.total, factor, skip, item, True, WHO, HOW)
        words = pack(P * (dP - rows.delta[:, None]), BN, DTYPE)
        it += 1
        nope = gl.zeros([64, NOPE], gl.float32, NL)
        rope = nope
        if DIMS.rope > 0:
            RL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIMS.rope, 16])
            rope = gl.zeros([64, ROPE], gl.float32, RL)
        d_q = Parts(nope, rope)
        # Blocks come from the last to the first, so those that need a mask come first.
        masked = gl.maximum(item.masked, 1)
        words, d_q, it = walk(
            words, d_q, it, item, 1, masked, rows, factor, smem, bars, True, WHO, HOW, DIMS, SL
        )
        words, d_q, it = walk(
            words,
            d_q,
            it,
            item,
            masked,
            blocks,
            rows,
            factor,
            smem,
            bars,
            False,
            WHO,
            HOW,
            DIMS,
            SL,
        )
        mbarrier.arrive(bars.q_empty.index(WHO), count=1)
        before = (it + (ST - 1)) % ST
        next_q, dS = issue_own_gradients(words, d_q, smem.k, before, DIMS)
        turn += 1
        mbarrier.wait(bars.t_ready.index(turn & 1), (turn >> 1) & 1)
        blocks = get(info, turn & 1, BLOCKS, WARPS)
        seeing = gl.convert_layout(rows.total, gl.SliceLayout(1, NL)) != PLUS_INF
        if DIMS.rope > 0:
            nope, rope, dS = warpgroup_mma_wait(0, deps=(next_q.nope, next_q.rope, dS))
        else:
            nope, dS = warpgroup_mma_wait(0, deps=(next_q.nope, dS))
        mbarrier.arrive(bars.k_empty.index(before), count=1)
        write_gradient(nope, scale, seeing[:, None], d_q_rows, item, 0, WHO)
        if DIMS.rope > 0:
            narrow = gl.convert_layout(rows.total, gl.SliceLayout(1, RL)) != PLUS_INF
            write_gradient(rope, scale, narrow[:, None], d_q_rows, item, DIMS.nope, WHO)


COUNTS = ["batch", "total_q", "total_k", "heads", "statistics_rows", "factor", "scale"]
STRIDES = [
    f"{name}_stride_{of}" for name in ("out", "lse", "d_out", "d_lse", "d_q") for of in ("t", "h")
]
# Vectors of 4-byte elements, read and written one by one: a slice of a tensor is as good as all.
VECTORS = ["lse_ptr", "d_lse_ptr", "sink_ptr", "cu_q_ptr", "cu_k_ptr", "counter_ptr"]


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def query_pass_kernel(  # noqa: PLR0913
    q_nope_desc,
    q_rope_desc,
    d_out_desc,
    k_nope_desc,
    k_rope_desc,
    v_desc,
    bits_desc,
    k_tail_desc,
    out_ptr,
    d_out_ptr,
    lse_ptr,
    d_lse_ptr,
    sink_ptr,
    d_q_ptr,
    statistics_ptr,
    part_sink_ptr,
    cu_q_ptr,
    cu_k_ptr,
    counter_ptr,
    factor,
    scale,
    batch,
    total_q,
    total_k,
    heads,
    statistics_rows,
    out_stride_t,
    out_stride_h,
    d_out_stride_t,
    d_out_stride_h,
    lse_stride_t,
    lse_stride_h,
    d_lse_stride_t,
    d_lse_stride_h,
    d_q_stride_t,
    d_q_stride_h,
    BN: gl.constexpr,
    ST: gl.constexpr,
    VST: gl.constexpr,
    DIMS: gl.constexpr,
    ROPE: gl.constexpr,
    CAUSAL: gl.constexpr,
    SIGN: gl.constexpr,
    HG: gl.constexpr,
    REGISTERS: gl.constexpr,
    LAYOUTS: gl.constexpr,
):
    """DIMS: Columns, ROPE: Problem.rope, REGISTERS: Registers, LAYOUTS: TileLayouts. HG: heads of a
    group that shares L2. factor: |scale| in log2 units."""
    DTYPE: gl.constexpr = v_desc.dtype
    HOW: gl.constexpr = How(
        is_causal=CAUSAL, sign=SIGN, rope=ROPE, has_key_mask=bits_desc is not None
    )
    TILE: gl.constexpr = Tiling(
        own_rows=64 * NC, step_rows=BN, by_keys=False, is_causal=CAUSAL, head_group=HG
    )
    sequences = Sequences(
        cu_seqlens_q=cu_q_ptr,
        cu_seqlens_k=cu_k_ptr,
        batch=batch,
        total_q=total_q,
        total_k=total_k,
        heads=heads,
    )
    q_smem = parts_of_rows(NC, 64, DIMS, LAYOUTS, DTYPE)
    d_out_smem = gl.allocate_shared_memory(DTYPE, [NC, 64, DIMS.v], LAYOUTS.v)
    k_smem = parts_of_rows(ST, BN, DIMS, LAYOUTS, DTYPE)
    v_smem = gl.allocate_shared_memory(DTYPE, [VST, BN, DIMS.v], LAYOUTS.v)
    info = allocate_info()
    bars = QueryBarriers(
        q_ready=barriers(NC, 1),
        q_empty=barriers(NC, 1),
        k_ready=barriers(ST, 1),
        k_empty=barriers(ST, NC),
        v_ready=barriers(VST, 1),
        v_empty=barriers(VST, NC),
        t_ready=barriers(2, 1),
        t_empty=barriers(2, NC + 1),
        t_request=barriers(1, 1),
    )
    bits_smem = None
    if HOW.has_key_mask:
        bits_smem = tiles_of_words(ST * NC, BN)
    smem = QueryMemory(q=q_smem, d_out=d_out_smem, k=k_smem, v=v_smem, bits=bits_smem)
    sources = QuerySources(
        q=Parts(q_nope_desc, q_rope_desc),
        d_out=d_out_desc,
        k=Parts(k_nope_desc, k_rope_desc),
        v=v_desc,
        bits=bits_desc,
        k_tail=k_tail_desc,
    )
    saved = Saved(
        out=Rows(out_ptr, out_stride_t, out_stride_h),
        d_out=Rows(d_out_ptr, d_out_stride_t, d_out_stride_h),
        lse=Rows(lse_ptr, lse_stride_t, lse_stride_h),
        d_lse=Rows(d_lse_ptr, d_lse_stride_t, d_lse_stride_h),
        sink=sink_ptr,
    )
    stats = Statistics(
        base=statistics_ptr, rows=statistics_rows, part_sink=part_sink_ptr, heads=heads
    )
    d_q = Rows(d_q_ptr, d_q_stride_t, d_q_stride_h)
    gl.warp_specialize(
        [
            (consumer, (info, smem, bars, saved, stats, d_q, factor, scale, 0, HOW, DIMS)),
            (consumer, (info, smem, bars, saved, stats, d_q, factor, scale, 1, HOW, DIMS)),
            (producer, (info, sources, smem, bars, DIMS, HOW)),
            (scheduler, (info, bars, counter_ptr, sequences, TILE)),
        ],
        [4, 1, 1],
        [REGISTERS.consumer, REGISTERS.producer, REGISTERS.producer],
    )
