"""The key pass on Blackwell: d_k and d_v. bf16.

A block has 128 keys of one head, the work item of its number (gluon/gradients/work_items.py), and
walks the queries that see them, BQ at a time.

| partition | warps | registers | does |
|---|---|---|---|
| group 0 (default), group 1 | 4 each | 208, 200 | half the columns: P^T, dS^T; then of d_k, d_v |
| multiply | 1 | 96 | issues all products |
| load | 1 | 96 | TMA loads of K, V, Q, d_out, statistics |

| barrier | number | completed by (count) | waited for by |
|---|---|---|---|
| k_ready, v_ready | 1 | TMA bytes of K, of V (1) | multiply |
| q_ready | ST | TMA bytes of Q with rope, of totals and deltas (1) | multiply, groups |
| d_ready | ST | TMA bytes of d_out (1) | multiply |
| q_empty, d_empty | ST | commit of dS^T Q, of P^T d_out (1) | load |
| s_full, dp_full | 1 | commit of the scores, of dP^T (1) | groups |
| s_empty, dp_empty | 1 | both groups have them in registers (2) | multiply |
| p_full, ds_full | 1 | both groups: P^T, dS^T is in tensor memory (2) | multiply |
| p_empty, ds_empty | 1 | commit of P^T d_out, of dS^T Q (1) | groups |

| shared memory | bytes (128 + 64 -> 128, BQ 64, ST 3) |
|---|---|
| k_nope, k_rope, v | 128 x (128 + 64 + 128) x 2 = 81920; at the end d_k and d_v pass through |
| q_nope, q_rope, d_out | ST x 64 x (128 + 64 + 128) x 2 = 122880 |
| total, delta | ST x 64 x 2 x 4 = 1536 |

    S^T = K Q^T    P^T = exp2(S^T - total)    dP^T = V d_out^T    dS^T = P^T * (dP^T - delta)
    d_v += P^T d_out                          d_k += dS^T Q

Scores are transposed, so that P^T and dS^T are left operands in tensor memory, all of whose columns
are taken with 128 + 64 -> 128. Products are issued in the order S(j + 1), dP(j + 1), P(j) d_out,
dS(j) Q, as in query_pass.py.

Rows of Q and d_out past a sequence are zeros (ragged descriptors), and their total is +inf, which
makes weights of 0. Rows of K and V past a sequence stay in lanes that are not stored. Keys that
nobody sees are written as +0, whatever they hold.
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
from openmla.kernels.blackwell.backward.records import KeyBarriers
from openmla.kernels.blackwell.backward.store import write_half
from openmla.kernels.blackwell.dense.columns import row_registers, weights_at
from openmla.kernels.gluon.barriers import barriers
from openmla.kernels.gluon.boxes import load_ragged, load_rows
from openmla.kernels.gluon.gradients.loads import load_query_block, parts_of_rows
from openmla.kernels.gluon.gradients.records import (
    How,
    KeyGradients,
    KeyMemory,
    KeySources,
    Parts,
    Rows,
    Sequences,
    Tiling,
)
from openmla.kernels.gluon.gradients.work_items import find_work_item
from openmla.kernels.gluon.scores import MINUS_INF, signed

WARPS = gl.constexpr(4)  # of the first partition, which looks the work item up


@gluon.jit
def load_keys(sources, smem, bars, item, DIMS: gl.constexpr, HOW: gl.constexpr):
    """Load K and V of a work item."""
    bar = bars.k_ready.index(0)
    mbarrier.expect(bar, OWN * (DIMS.nope + DIMS.rope) * 2)
    load_rows(sources.k.nope, item.token, item.head, 0, bar, smem.k.nope.index(0))
    if DIMS.rope > 0:
        head = item.head
        if HOW.rope == "shared":
            head = head * 0
        load_rows(sources.k.rope, item.token, head, 0, bar, smem.k.rope.index(0))
    bar = bars.v_ready.index(0)
    mbarrier.expect(bar, OWN * DIMS.v * 2)
    load_rows(sources.v, item.token, item.head, 0, bar, smem.v.index(0))


@gluon.jit
def load(sources, smem, bars, item, DIMS: gl.constexpr, HOW: gl.constexpr):
    """The load partition, from the first block of queries to the last.

    sources: KeySources, smem: KeyMemory, bars: KeyBarriers, item: WorkItem, DIMS: Columns, HOW:
    How.
    """
    BQ: gl.constexpr = smem.d_out.shape[1]
    ST: gl.constexpr = smem.d_out.shape[0]
    for c in range(0, item.blocks):
        stage = c % ST
        phase = ((c // ST) & 1) ^ 1
        row = (item.first + c) * BQ
        mbarrier.wait(bars.q_empty.index(stage), phase)
        load_query_block(sources, smem, bars.q_ready.index(stage), stage, item, row, DIMS)
        if c == 0:
            load_keys(sources, smem, bars, item, DIMS, HOW)
        mbarrier.wait(bars.d_empty.index(stage), phase)
        ready = bars.d_ready.index(stage)
        mbarrier.expect(ready, BQ * DIMS.v * 2)
        d_out = smem.d_out.index(stage)
        load_ragged(sources.d_out, item.start, item.length, row, item.head, ready, d_out)


@gluon.jit
def multiply(smem, tmem, bars, item, DIMS: gl.constexpr, TMEM: gl.constexpr):
    """The partition that issues products: those of block j, then the sums of block j - 1.

    smem: KeyMemory, bars: KeyBarriers, item: WorkItem, DIMS: Columns, TMEM: KeyColumns.
    """
    BQ: gl.constexpr = smem.d_out.shape[1]
    ST: gl.constexpr = smem.d_out.shape[0]
    DTYPE: gl.constexpr = smem.d_out.dtype
    blocks = item.blocks
    if blocks > 0:
        mbarrier.wait(bars.k_ready.index(0), 0)
        mbarrier.wait(bars.v_ready.index(0), 0)
    for j in range(0, blocks + 1):
        if j < blocks:
            stage = j % ST
            phase = (j // ST) & 1
            mbarrier.wait(bars.q_ready.index(stage), phase)
            mbarrier.wait(bars.s_empty.index(0), (j & 1) ^ 1)
            issue_scores(smem.k, smem.q, tmem, stage, DIMS, TMEM)
            tcgen05_commit(bars.s_full.index(0))
            mbarrier.wait(bars.d_ready.index(stage), phase)
            mbarrier.wait(bars.dp_empty.index(0), (j & 1) ^ 1)
            d_out = smem.d_out.index(stage).permute((1, 0))
            tcgen05_mma(smem.v.index(0), d_out, tmem.slice(TMEM.products, BQ), use_acc=False)
            tcgen05_commit(bars.dp_full.index(0))
        if j > 0:
            before = (j - 1) % ST
            mbarrier.wait(bars.p_full.index(0), (j - 1) & 1)
            P = weights_at(tmem, TMEM.weights, BQ, DTYPE, TMEM)
            tcgen05_mma(P, smem.d_out.index(before), tmem.slice(TMEM.v, DIMS.v), use_acc=j > 1)
            tcgen05_commit(bars.p_empty.index(0))
            tcgen05_commit(bars.d_empty.index(before))
            mbarrier.wait(bars.ds_full.index(0), (j - 1) & 1)
            issue_own_gradients(smem.q, tmem, before, j > 1, DIMS, TMEM)
            # The groups wait for ds_empty last of all: no commit is in flight when they are done.
            tcgen05_commit(bars.q_empty.index(before))
            tcgen05_commit(bars.ds_empty.index(0))


@gluon.jit
def hide_before(S, first):
    """Transposed scores [keys, queries]: row r keeps columns from first + r on; -inf in others."""
    SL: gl.constexpr = S.type.layout
    row = gl.arange(0, S.shape[0], gl.SliceLayout(1, SL))
    column = gl.arange(0, S.shape[1], gl.SliceLayout(0, SL))
    return gl.where(column[None, :] >= (row + first)[:, None], S, MINUS_INF)


@gluon.jit
def differentiate(
    tmem,
    smem,
    bars,
    item,
    j,
    factor,
    MASKED: gl.constexpr,
    WHO: gl.constexpr,
    HOW: gl.constexpr,
    TMEM: gl.constexpr,
):
    """Scores and dP of block j to P^T and dS^T: the columns of group WHO."""
    BQ: gl.constexpr = smem.d_out.shape[1]
    ST: gl.constexpr = smem.d_out.shape[0]
    DTYPE: gl.constexpr = smem.d_out.dtype
    HALF: gl.constexpr = BQ // 2
    CL: gl.constexpr = gl.SliceLayout(0, row_registers(gl.float32, HALF, 1))
    stage = j % ST
    turn = j & 1
    mbarrier.wait(bars.q_ready.index(stage), (j // ST) & 1)
    total = smem.total.index(stage).slice(WHO * HALF, HALF).load(CL)
    mbarrier.wait(bars.s_full.index(0), turn)
    S = signed(half_of(tmem, TMEM.scores, BQ, WHO), HOW.sign)
    mbarrier.arrive(bars.s_empty.index(0), count=1)
    if MASKED and HOW.is_causal:
        S = hide_before(S, item.limit - (item.first + j) * BQ - WHO * HALF)
    P = gl.exp2(S * factor - total[None, :])
    mbarrier.wait(bars.p_empty.index(0), turn ^ 1)
    store_half(tmem, P, TMEM.weights, DTYPE, WHO, TMEM)
    mbarrier.arrive(bars.p_full.index(0), count=1)
    delta = smem.delta.index(stage).slice(WHO * HALF, HALF).load(CL)
    mbarrier.wait(bars.dp_full.index(0), turn)
    dP = half_of(tmem, TMEM.products, BQ, WHO)
    mbarrier.arrive(bars.dp_empty.index(0), count=1)
    dS = P * (dP - delta[None, :])
    mbarrier.wait(bars.ds_empty.index(0), turn ^ 1)
    store_half(tmem, dS, TMEM.gradients, DTYPE, WHO, TMEM)
    mbarrier.arrive(bars.ds_full.index(0), count=1)


@gluon.jit
def group(
    tmem,
    smem,
    bars,
    item,
    gradients,
    factor,
    scale,
    WHO: gl.constexpr,
    HOW: gl.constexpr,
    DIMS: gl.constexpr,
    TMEM: gl.constexpr,
):
    """The partition of group WHO: half of the columns of every tile.

    smem: KeyMemory, bars: KeyBarriers, item: WorkItem, gradients: KeyGradients, HOW: How, DIMS:
    Columns, TMEM: KeyColumns.
    """
    BQ: gl.constexpr = smem.d_out.shape[1]
    RL: gl.constexpr = gl.SliceLayout(1, row_registers(gl.float32, BQ // 2, 1))
    blocks = item.blocks
    if blocks > 0:
        for j in range(0, item.masked):
            differentiate(tmem, smem, bars, item, j, factor, True, WHO, HOW, TMEM)
        for j in range(item.masked, blocks):
            differentiate(tmem, smem, bars, item, j, factor, False, WHO, HOW, TMEM)
        mbarrier.wait(bars.ds_empty.index(0), (blocks - 1) & 1)
        seen = gl.full([OWN], 0, gl.int32, RL) < item.length
        stage = smem.k.nope.index(0) if WHO == 0 else smem.v.index(0)
        write_half(tmem, TMEM.v, DIMS.v, stage, 1.0, seen, gradients.v, item, 0, WHO)
        write_half(tmem, TMEM.nope, DIMS.nope, stage, scale, seen, gradients.k, item, 0, WHO)
        if DIMS.rope > 0:
            write_half(tmem, TMEM.rope, DIMS.rope, stage, scale, seen, gradients.rope, item, 0, WHO)


COUNTS = ["batch", "total_q", "total_k", "heads", "factor", "scale"]
STRIDES = [f"{name}_stride_{of}" for name in ("d_k", "d_v", "d_rope") for of in ("t", "h")]
# Vectors of 4-byte elements, read one by one: a slice of a tensor is as good as all.
VECTORS = ["cu_q_ptr", "cu_k_ptr"]


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def key_pass_kernel(  # noqa: PLR0913
    k_nope_desc,
    k_rope_desc,
    v_desc,
    q_nope_desc,
    q_rope_desc,
    d_out_desc,
    statistics_desc,
    d_k_ptr,
    d_v_ptr,
    d_rope_ptr,
    cu_q_ptr,
    cu_k_ptr,
    factor,
    scale,
    batch,
    total_q,
    total_k,
    heads,
    d_k_stride_t,
    d_k_stride_h,
    d_v_stride_t,
    d_v_stride_h,
    d_rope_stride_t,
    d_rope_stride_h,
    BQ: gl.constexpr,
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
    KeyColumns, TMEM_COLUMNS: columns to allocate. HG: heads of a group that shares L2. factor:
    |scale| in log2 units."""
    DTYPE: gl.constexpr = v_desc.dtype
    HOW: gl.constexpr = How(is_causal=CAUSAL, sign=SIGN, rope=ROPE)
    TILE: gl.constexpr = Tiling(
        own_rows=OWN, step_rows=BQ, by_keys=True, is_causal=CAUSAL, head_group=HG
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
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    k_smem = parts_of_rows(1, OWN, DIMS, LAYOUTS, DTYPE)
    v_smem = gl.allocate_shared_memory(DTYPE, [1, OWN, DIMS.v], LAYOUTS.v)
    q_smem = parts_of_rows(ST, BQ, DIMS, LAYOUTS, DTYPE)
    d_out_smem = gl.allocate_shared_memory(DTYPE, [ST, BQ, DIMS.v], LAYOUTS.v)
    total_smem = gl.allocate_shared_memory(gl.float32, [ST, BQ], LINEAR)
    delta_smem = gl.allocate_shared_memory(gl.float32, [ST, BQ], LINEAR)
    bars = KeyBarriers(
        k_ready=barriers(1, 1),
        v_ready=barriers(1, 1),
        q_ready=barriers(ST, 1),
        d_ready=barriers(ST, 1),
        d_empty=barriers(ST, 1),
        q_empty=barriers(ST, 1),
        s_full=barriers(1, 1),
        s_empty=barriers(1, 2),
        dp_full=barriers(1, 1),
        dp_empty=barriers(1, 2),
        p_full=barriers(1, 2),
        p_empty=barriers(1, 1),
        ds_full=barriers(1, 2),
        ds_empty=barriers(1, 1),
    )
    tmem = allocate(TMEM_COLUMNS, TMEM)
    smem = KeyMemory(
        k=k_smem, v=v_smem, q=q_smem, d_out=d_out_smem, total=total_smem, delta=delta_smem
    )
    sources = KeySources(
        k=Parts(k_nope_desc, k_rope_desc),
        v=v_desc,
        q=Parts(q_nope_desc, q_rope_desc),
        d_out=d_out_desc,
        statistics=statistics_desc,
        heads=heads,
    )
    gradients = KeyGradients(
        k=Rows(d_k_ptr, d_k_stride_t, d_k_stride_h),
        v=Rows(d_v_ptr, d_v_stride_t, d_v_stride_h),
        rope=Rows(d_rope_ptr, d_rope_stride_t, d_rope_stride_h),
    )
    gl.warp_specialize(
        [
            (group, (tmem, smem, bars, item, gradients, factor, scale, 0, HOW, DIMS, TMEM)),
            (group, (tmem, smem, bars, item, gradients, factor, scale, 1, HOW, DIMS, TMEM)),
            (multiply, (smem, tmem, bars, item, DIMS, TMEM)),
            (load, (sources, smem, bars, item, DIMS, HOW)),
        ],
        [4, 1, 1],
        [REGISTERS.group, REGISTERS.single, REGISTERS.single],
    )
