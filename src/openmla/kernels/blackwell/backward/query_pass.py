"""The query pass on Blackwell: statistics of query rows, and d_q. bf16.

A block has 128 queries of one head, the work item of its number (gluon/gradients/work_items.py),
and walks the keys that they see, BN at a time.

| partition | warps | registers | does |
|---|---|---|---|
| group 0 (default), group 1 | 4 each | 208, 200 | half of the columns: weights, dS; then of d_q |
| multiply | 1 | 96 | issues all products |
| load | 1 | 96 | TMA loads of Q, d_out, K, V |

| barrier | number | completed by (count) | waited for by |
|---|---|---|---|
| q_ready, d_ready | 1 | TMA bytes of Q, of d_out (1) | multiply |
| k_ready, v_ready | ST | TMA bytes of K with rope, of V (1) | multiply |
| k_empty, v_empty | ST | commit of dS K, of dP (1) | load |
| t_full | 1 | both groups: their half of the statistics is in shared memory (2) | groups |
| s_full, dp_full | 1 | commit of the scores, of dP (1) | groups |
| s_empty, dp_empty | 1 | both groups have them in registers (2) | multiply |
| ds_full | 1 | both groups: dS is in tensor memory (2) | multiply |
| ds_empty | 1 | commit of dS K (1) | groups |

| shared memory | bytes (128 + 64 -> 128, BN 64, ST 3) |
|---|---|
| q_nope, q_rope, d_out | 128 x (128 + 64 + 128) x 2 = 81920; at the end d_q passes through |
| k_nope, k_rope, v | ST x 64 x (128 + 64 + 128) x 2 = 122880 |
| total, delta | 2 x 128 x 4 = 1024 |

    S = Q K^T    dP = d_out V^T    dS = exp2(S - total) * (dP - delta)    d_q += dS K

Products are issued in the order S(j + 1), dP(j + 1), dS(j) K: the scores of a block are made while
the groups work on those before, as soon as these are in registers. dS stays in tensor memory, as P
does in the forward pass. There is no maximum and nothing is rescaled, because lse is known.

Rows of K and V past a sequence are zeros (ragged descriptors): a dS of 0 times a NaN would be a
NaN. Rows of Q past a sequence stay in lanes that are not stored.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
)

from openmla.kernels.blackwell.backward.columns import allocate, half_of, store_half
from openmla.kernels.blackwell.backward.products import OWN, issue_own_gradients, issue_scores
from openmla.kernels.blackwell.backward.records import Exchanged, Given, QueryBarriers
from openmla.kernels.blackwell.backward.store import write_half
from openmla.kernels.blackwell.dense.columns import row_registers
from openmla.kernels.gluon.barriers import barriers
from openmla.kernels.gluon.boxes import load_ragged, load_rows
from openmla.kernels.gluon.gradients.loads import load_key_block, parts_of_rows
from openmla.kernels.gluon.gradients.records import (
    How,
    Parts,
    QueryMemory,
    QuerySources,
    Rows,
    RowStatistics,
    Saved,
    Sequences,
    Statistics,
    Tiling,
)
from openmla.kernels.gluon.gradients.statistics import GROUP_ROWS, PLUS_INF, row_statistics
from openmla.kernels.gluon.gradients.work_items import find_work_item
from openmla.kernels.gluon.scores import mask, signed

WARPS = gl.constexpr(4)  # of the first partition, which looks the work item up


@gluon.jit
def load_queries(sources, smem, bars, item, DIMS: gl.constexpr):
    """Load Q and d_out of a work item."""
    bar = bars.q_ready.index(0)
    mbarrier.expect(bar, OWN * (DIMS.nope + DIMS.rope) * 2)
    load_rows(sources.q.nope, item.token, item.head, 0, bar, smem.q.nope.index(0))
    if DIMS.rope > 0:
        load_rows(sources.q.rope, item.token, item.head, DIMS.nope, bar, smem.q.rope.index(0))
    bar = bars.d_ready.index(0)
    mbarrier.expect(bar, OWN * DIMS.v * 2)
    load_rows(sources.d_out, item.token, item.head, 0, bar, smem.d_out.index(0))


@gluon.jit
def load(sources, smem, bars, item, DIMS: gl.constexpr, HOW: gl.constexpr):
    """The load partition, from the last block of keys to the first.

    sources: QuerySources, smem: QueryMemory, bars: QueryBarriers, item: WorkItem, DIMS: Columns,
    HOW: How.
    """
    BN: gl.constexpr = smem.v.shape[1]
    ST: gl.constexpr = smem.v.shape[0]
    for c in range(0, item.blocks):
        stage = c % ST
        phase = ((c // ST) & 1) ^ 1
        row = (item.blocks - 1 - c) * BN
        mbarrier.wait(bars.k_empty.index(stage), phase)
        load_key_block(sources, smem, bars.k_ready.index(stage), stage, item, row, DIMS, HOW)
        if c == 0:
            load_queries(sources, smem, bars, item, DIMS)
        mbarrier.wait(bars.v_empty.index(stage), phase)
        ready = bars.v_ready.index(stage)
        mbarrier.expect(ready, BN * DIMS.v * 2)
        v = smem.v.index(stage)
        load_ragged(sources.v, item.start, item.length, row, item.head, ready, v)


@gluon.jit
def multiply(smem, tmem, bars, item, DIMS: gl.constexpr, TMEM: gl.constexpr):
    """The partition that issues products: those of block j, then dS K of block j - 1.

    smem: QueryMemory, bars: QueryBarriers, item: WorkItem, DIMS: Columns, TMEM: QueryColumns.
    """
    BN: gl.constexpr = smem.v.shape[1]
    ST: gl.constexpr = smem.v.shape[0]
    blocks = item.blocks
    if blocks > 0:
        mbarrier.wait(bars.q_ready.index(0), 0)
        mbarrier.wait(bars.d_ready.index(0), 0)
    for j in range(0, blocks + 1):
        if j < blocks:
            stage = j % ST
            phase = (j // ST) & 1
            mbarrier.wait(bars.k_ready.index(stage), phase)
            mbarrier.wait(bars.s_empty.index(0), (j & 1) ^ 1)
            issue_scores(smem.q, smem.k, tmem, stage, DIMS, TMEM)
            tcgen05_commit(bars.s_full.index(0))
            mbarrier.wait(bars.v_ready.index(stage), phase)
            mbarrier.wait(bars.dp_empty.index(0), (j & 1) ^ 1)
            values = smem.v.index(stage).permute((1, 0))
            dP = tmem.slice(TMEM.products, BN)
            tcgen05_mma(smem.d_out.index(0), values, dP, use_acc=False)
            tcgen05_commit(bars.dp_full.index(0))
            tcgen05_commit(bars.v_empty.index(stage))
        if j > 0:
            before = (j - 1) % ST
            mbarrier.wait(bars.ds_full.index(0), (j - 1) & 1)
            issue_own_gradients(smem.k, tmem, before, j > 1, DIMS, TMEM)
            # The groups wait for ds_empty last of all: no commit is in flight when they are done.
            tcgen05_commit(bars.k_empty.index(before))
            tcgen05_commit(bars.ds_empty.index(0))


@gluon.jit
def statistics_of_tile(
    exchanged, bars, item, given, D_V: gl.constexpr, WHO: gl.constexpr, RL: gl.constexpr
):
    """The RowStatistics of all 128 rows of a tile, in layout RL; group WHO works out 64 of them."""
    HALF: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0])
    own = row_statistics(item, given.saved, given.stats, D_V, WHO, HALF)
    exchanged.total.slice(WHO * GROUP_ROWS, GROUP_ROWS).store(own.total)
    exchanged.delta.slice(WHO * GROUP_ROWS, GROUP_ROWS).store(own.delta)
    mbarrier.arrive(bars.t_full.index(0), count=1)
    mbarrier.wait(bars.t_full.index(0), 0)
    return RowStatistics(total=exchanged.total.load(RL), delta=exchanged.delta.load(RL))


@gluon.jit
def differentiate(
    tmem,
    bars,
    item,
    rows,
    j,
    factor,
    BN: gl.constexpr,
    DTYPE: gl.constexpr,
    MASKED: gl.constexpr,
    WHO: gl.constexpr,
    HOW: gl.constexpr,
    TMEM: gl.constexpr,
):
    """Scores and dP of block j to dS: the columns of group WHO. rows: RowStatistics."""
    turn = j & 1
    mbarrier.wait(bars.s_full.index(0), turn)
    S = signed(half_of(tmem, TMEM.scores, BN, WHO), HOW.sign)
    mbarrier.arrive(bars.s_empty.index(0), count=1)
    if MASKED:
        skip = (item.blocks - 1 - j) * BN + WHO * (BN // 2)
        S = mask(S, item.limit - skip, item.length - skip, HOW.is_causal)
    P = gl.exp2(S * factor - rows.total[:, None])
    mbarrier.wait(bars.dp_full.index(0), turn)
    dP = half_of(tmem, TMEM.products, BN, WHO)
    mbarrier.arrive(bars.dp_empty.index(0), count=1)
    dS = P * (dP - rows.delta[:, None])
    mbarrier.wait(bars.ds_empty.index(0), turn ^ 1)
    store_half(tmem, dS, TMEM.gradients, DTYPE, WHO, TMEM)
    mbarrier.arrive(bars.ds_full.index(0), count=1)


@gluon.jit
def group(
    tmem,
    smem,
    exchanged,
    bars,
    item,
    given,
    factor,
    scale,
    WHO: gl.constexpr,
    HOW: gl.constexpr,
    DIMS: gl.constexpr,
    TMEM: gl.constexpr,
):
    """The partition of group WHO: half of the columns of every tile.

    smem: QueryMemory, exchanged: Exchanged, bars: QueryBarriers, item: WorkItem, given: Given,
    HOW: How, DIMS: Columns, TMEM: QueryColumns.
    """
    BN: gl.constexpr = smem.v.shape[1]
    DTYPE: gl.constexpr = smem.v.dtype
    RL: gl.constexpr = gl.SliceLayout(1, row_registers(gl.float32, BN // 2, 1))
    blocks = item.blocks
    if blocks > 0:
        rows = statistics_of_tile(exchanged, bars, item, given, DIMS.v, WHO, RL)
        # Blocks come from the last to the first, so those that need a mask come first.
        for j in range(0, item.masked):
            differentiate(tmem, bars, item, rows, j, factor, BN, DTYPE, True, WHO, HOW, TMEM)
        for j in range(item.masked, blocks):
            differentiate(tmem, bars, item, rows, j, factor, BN, DTYPE, False, WHO, HOW, TMEM)
        mbarrier.wait(bars.ds_empty.index(0), (blocks - 1) & 1)
        seeing = rows.total != PLUS_INF
        stage = smem.q.nope.index(0) if WHO == 0 else smem.d_out.index(0)
        write_half(tmem, TMEM.nope, DIMS.nope, stage, scale, seeing, given.d_q, item, 0, WHO)
        if DIMS.rope > 0:
            columns: gl.constexpr = DIMS.nope
            write_half(
                tmem, TMEM.rope, DIMS.rope, stage, scale, seeing, given.d_q, item, columns, WHO
            )


COUNTS = ["batch", "total_q", "total_k", "heads", "statistics_rows", "factor", "scale"]
STRIDES = [
    f"{name}_stride_{of}" for name in ("out", "lse", "d_out", "d_lse", "d_q") for of in ("t", "h")
]
# Vectors of 4-byte elements, read and written one by one: a slice of a tensor is as good as all.
VECTORS = ["lse_ptr", "d_lse_ptr", "sink_ptr", "cu_q_ptr", "cu_k_ptr"]


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def query_pass_kernel(  # noqa: PLR0913
    q_nope_desc,
    q_rope_desc,
    d_out_desc,
    k_nope_desc,
    k_rope_desc,
    v_desc,
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
    DIMS: gl.constexpr,
    ROPE: gl.constexpr,
    CAUSAL: gl.constexpr,
    SIGN: gl.constexpr,
    HG: gl.constexpr,
    LAYOUTS: gl.constexpr,
    REGISTERS: gl.constexpr,
    TMEM: gl.constexpr,
    TMEM_COLUMNS: gl.constexpr,
):
    """DIMS: Columns, ROPE: Problem.rope, LAYOUTS: TileLayouts, REGISTERS: Registers, TMEM:
    QueryColumns, TMEM_COLUMNS: columns to allocate. HG: heads of a group that shares L2. factor:
    |scale| in log2 units."""
    DTYPE: gl.constexpr = v_desc.dtype
    HOW: gl.constexpr = How(is_causal=CAUSAL, sign=SIGN, rope=ROPE)
    TILE: gl.constexpr = Tiling(
        own_rows=OWN, step_rows=BN, by_keys=False, is_causal=CAUSAL, head_group=HG
    )
    sequences = Sequences(
        cu_seqlens_q=cu_q_ptr,
        cu_seqlens_k=cu_k_ptr,
        batch=batch,
        total_q=total_q,
        total_k=total_k,
        heads=heads,
    )
    item = find_work_item(gl.program_id(0), sequences, TILE, WARPS)
    q_smem = parts_of_rows(1, OWN, DIMS, LAYOUTS, DTYPE)
    d_out_smem = gl.allocate_shared_memory(DTYPE, [1, OWN, DIMS.v], LAYOUTS.v)
    k_smem = parts_of_rows(ST, BN, DIMS, LAYOUTS, DTYPE)
    v_smem = gl.allocate_shared_memory(DTYPE, [ST, BN, DIMS.v], LAYOUTS.v)
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    rows_smem = gl.allocate_shared_memory(gl.float32, [2, OWN], LINEAR)
    bars = QueryBarriers(
        q_ready=barriers(1, 1),
        d_ready=barriers(1, 1),
        k_ready=barriers(ST, 1),
        k_empty=barriers(ST, 1),
        v_ready=barriers(ST, 1),
        v_empty=barriers(ST, 1),
        t_full=barriers(1, 2),
        s_full=barriers(1, 1),
        s_empty=barriers(1, 2),
        dp_full=barriers(1, 1),
        dp_empty=barriers(1, 2),
        ds_full=barriers(1, 2),
        ds_empty=barriers(1, 1),
    )
    tmem = allocate(TMEM_COLUMNS, TMEM)
    smem = QueryMemory(q=q_smem, d_out=d_out_smem, k=k_smem, v=v_smem)
    own = Exchanged(total=rows_smem.index(0), delta=rows_smem.index(1))
    sources = QuerySources(
        q=Parts(q_nope_desc, q_rope_desc),
        d_out=d_out_desc,
        k=Parts(k_nope_desc, k_rope_desc),
        v=v_desc,
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
    given = Given(saved=saved, stats=stats, d_q=d_q)
    gl.warp_specialize(
        [
            (group, (tmem, smem, own, bars, item, given, factor, scale, 0, HOW, DIMS, TMEM)),
            (group, (tmem, smem, own, bars, item, given, factor, scale, 1, HOW, DIMS, TMEM)),
            (multiply, (smem, tmem, bars, item, DIMS, TMEM)),
            (load, (sources, smem, bars, item, DIMS, HOW)),
        ],
        [4, 1, 1],
        [REGISTERS.group, REGISTERS.single, REGISTERS.single],
    )
