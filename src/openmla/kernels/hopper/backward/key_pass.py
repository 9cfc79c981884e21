"""The key pass on Hopper: d_k and d_v. bf16.

A CTA has 128 keys of one head at a time and walks the queries that see them, BQ at a time. CTAs are
persistent and fetch work items (gluon/gradients/work_items.py) from an atomic counter.

| partition | warps | registers | does |
|---|---|---|---|
| consumer 0 (default), consumer 1 | 4 each | 240 | 64 keys: S^T, dP^T, dS^T, d_k, d_v |
| producer | 1 | 24 | TMA loads of K, V, Q, d_out, statistics |
| scheduler | 1 | 24 | fetches work items, works out their keys and queries |

| barrier | number | completed by (count) | waited for by |
|---|---|---|---|
| k_ready | 2 | TMA bytes of one consumer's K and V (1) | that consumer |
| k_empty | 2 | that consumer, after the last scores of a work item (1) | producer |
| q_ready | ST | TMA bytes of Q with rope, of totals and deltas, of bits (1) | consumers |
| d_ready | VST | TMA bytes of d_out (1) | consumers |
| q_empty, d_empty | ST, VST | both consumers, after the last product with Q, d_out (2) | producer |
| t_ready, t_empty, t_request | 2, 2, 1 | as in query_pass.py | |

| shared memory | bytes (128 + 64 -> 128, BQ 32, ST 3) |
|---|---|
| k_nope, k_rope, v | 2 x 64 x (128 + 64 + 128) x 2 = 81920 |
| q_nope, q_rope, d_out | ST x 32 x (128 + 64 + 128) x 2 = 61440 |
| total, delta | ST x 32 x 2 x 4 = 768 |

    S^T = K Q^T    P^T = exp2(S^T - total)    dP^T = V d_out^T    dS^T = P^T * (dP^T - delta)
    d_v += P^T d_out                          d_k += dS^T Q

Scores are transposed, so that P^T and dS^T are left operands in registers. d_k, its rope columns
and d_v take 160 registers of a thread, which leaves little: with BQ 64
ptxas spills and serializes the products.

Rows of Q and d_out past a sequence are zeros (ragged descriptors), and their total is +inf, which
makes weights of 0. Rows of K and V past a sequence stay in rows that are not stored. Keys that
nobody sees are written as +0, whatever they hold.

With a key mask, the bits of a block come with its Q: ST x 2 x 64 words, 1536 bytes more.

192 + 64 -> 256 columns: d_k and d_v would take 256 registers of a thread, so the pass is launched
twice, for d_v without dP^T, and for d_k (GRADIENTS). K, Q and d_k are two tiles of 128 columns, as
in query_pass.py. The ring of d_out has VST = 2 slots: d_k needs it for dP^T alone; d_v needs it
with the block after, and does not wait for it before.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openmla.kernels.gluon.barriers import barriers
from openmla.kernels.gluon.boxes import load_ragged, load_rows
from openmla.kernels.gluon.gradients.loads import (
    load_bits,
    load_query_block,
    panel_of,
    parts_of_rows,
    tiles_of_words,
)
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
from openmla.kernels.gluon.scores import signed
from openmla.kernels.hopper.backward.masks import hide_before
from openmla.kernels.hopper.backward.products import (
    NC,
    WARPS,
    WGMMA_ROWS,
    issue_own_gradients,
    issue_scores,
    issue_weight_gradients,
)
from openmla.kernels.hopper.backward.records import KeyBarriers, Sums
from openmla.kernels.hopper.backward.rings import free_phase_of, slot_of
from openmla.kernels.hopper.backward.scheduler import (
    BLOCKS,
    FIRST,
    LIMIT,
    MASKED,
    get_work_item,
    scheduler,
)
from openmla.kernels.hopper.backward.store import write_gradient, write_part
from openmla.kernels.hopper.dense.scheduler import allocate_info, get
from openmla.kernels.hopper.dense.softmax import keep_bits, load_words, pack, unpack


@gluon.jit
def load_keys(sources, smem, bars, item, phase, DIMS: gl.constexpr, HOW: gl.constexpr):
    """Load K and V of each consumer, as soon as it has finished with its last ones."""
    for w in gl.static_range(2):
        bar = bars.k_ready.index(w)
        mbarrier.wait(bars.k_empty.index(w), phase)
        mbarrier.expect(bar, WGMMA_ROWS * (DIMS.nope + DIMS.rope + DIMS.v) * 2)
        row = item.token + w * WGMMA_ROWS
        load_rows(sources.k.nope, row, item.head, 0, bar, smem.k.nope.index(w))
        if DIMS.rope > 0:
            head = item.head
            if HOW.rope == "shared":
                head = head * 0
            rope = smem.k.rope.index(w)
            if DIMS.tail > 0:
                tail = panel_of(rope, sources.k_tail, 0)
                load_rows(sources.k_tail, row, item.head, DIMS.nope, bar, tail)
                rope = panel_of(rope, sources.k.rope, 1)
            load_rows(sources.k.rope, row, head, 0, bar, rope)
        load_rows(sources.v, row, item.head, 0, bar, smem.v.index(w))


@gluon.jit
def producer(info, sources, smem, bars, DIMS: gl.constexpr, HOW: gl.constexpr):
    """Load what the scheduler announces, work item after work item.

    sources: KeySources, smem: KeyMemory, bars: KeyBarriers, DIMS: Columns, HOW: How.
    """
    BQ: gl.constexpr = smem.d_out.shape[1]
    ST: gl.constexpr = smem.total.shape[0]
    DST: gl.constexpr = smem.d_out.shape[0]
    OWN: gl.constexpr = NC * WGMMA_ROWS
    BITS: gl.constexpr = OWN * BQ // 8 if HOW.has_key_mask else 0  # bytes of a block
    turn = gl.program_id(0) * 0
    it = turn  # query blocks so far, over all work items
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
            row = (item.first + c) * BQ
            mbarrier.wait(bars.q_empty.index(stage), phase)
            ready = bars.q_ready.index(stage)
            load_query_block(sources, smem, ready, stage, item, row, DIMS, BITS)
            if HOW.has_key_mask:
                line = (item.place + row) // BQ
                column = (item.rows - 1) // OWN * OWN
                load_bits(sources.bits, line, column, ready, smem.bits, stage * NC, NC)
            if c == 0:
                load_keys(sources, smem, bars, item, (turn & 1) ^ 1, DIMS, HOW)
            at = slot_of(it, stage, DST, ST)
            mbarrier.wait(bars.d_empty.index(at), free_phase_of(it, phase, DST, ST))
            ready = bars.d_ready.index(at)
            mbarrier.expect(ready, BQ * DIMS.v * 2)
            d_out = smem.d_out.index(at)
            load_ragged(sources.d_out, item.start, item.length, row, item.head, ready, d_out)
            it += 1
        turn += 1
        mbarrier.wait(bars.t_ready.index(turn & 1), (turn >> 1) & 1)
        blocks = get(info, turn & 1, BLOCKS, 1)


@gluon.jit
def issue_sums(words_p, words_s, sums, smem, stage, at, DIMS: gl.constexpr, HOW: gl.constexpr):
    """Start d_v += P^T d_out and d_k += dS^T Q of a block; sums: Sums, two or three products.

    stage, at: the slots of its Q and of its d_out.

    Returns the Sums in flight, P^T and dS^T; of gradients that are not wanted, what was given.
    """
    BQ: gl.constexpr = smem.d_out.shape[1]
    DTYPE: gl.constexpr = smem.d_out.dtype
    VL: gl.constexpr = gl.DotOperandLayout(0, sums.v.type.layout, 2)
    v = sums.v
    d_k = Parts(sums.nope, sums.rope)
    P = words_p
    dS = words_s
    if HOW.gradients != "k":
        P = unpack(words_p, BQ, DTYPE, VL)
        v = warpgroup_mma(P, smem.d_out.index(at), sums.v, is_async=True)
    if HOW.gradients != "v":
        d_k, dS = issue_own_gradients(words_s, d_k, smem.q, stage, DIMS)
    return Sums(v, d_k.nope, d_k.rope), P, dS


@gluon.jit
def weights_of(
    S, smem, stage, limit, factor, MASKED: gl.constexpr, WHO: gl.constexpr, HOW: gl.constexpr
):
    """P^T of a block of queries; with a mask, 0 before the first query that sees a key.

    limit: that query of the consumer's first key, counted from the block's first.
    """
    SL: gl.constexpr = S.type.layout
    S = signed(S, HOW.sign)
    if HOW.has_key_mask:
        S = keep_bits(S, load_words(smem.bits.index(stage * NC + WHO), S))
    if MASKED and HOW.is_causal:
        S = hide_before(S, limit)
    total = smem.total.index(stage).load(gl.SliceLayout(0, SL))
    return gl.exp2(S * factor - total[None, :])


@gluon.jit
def score_gradients(P, dP, smem, stage):
    """dS^T of a block."""
    delta = smem.delta.index(stage).load(gl.SliceLayout(0, dP.type.layout))
    return P * (dP - delta[None, :])


@gluon.jit
def walk(  # noqa: PLR0913
    words_p,
    words_s,
    sums,
    it,
    limit,
    first,
    last,
    factor,
    smem,
    bars,
    MASKED: gl.constexpr,
    WHO: gl.constexpr,
    HOW: gl.constexpr,
    DIMS: gl.constexpr,
    SL: gl.constexpr,
):
    """Steps first … last - 1 of a work item; each adds the products of the block before.

    Takes and returns P^T and dS^T in pairs, Sums and the number of the next block; smem: KeyMemory,
    bars: KeyBarriers, HOW: How, DIMS: Columns.
    """
    BQ: gl.constexpr = smem.d_out.shape[1]
    ST: gl.constexpr = smem.total.shape[0]
    DST: gl.constexpr = smem.d_out.shape[0]
    DTYPE: gl.constexpr = smem.d_out.dtype
    # Products in flight: one of dP^T, and of the sums.
    MORE: gl.constexpr = HOW.gradients != "v"
    ADDED: gl.constexpr = (HOW.gradients != "k") + MORE * (1 + (DIMS.rope > 0))
    v, nope, rope = sums
    for c in range(first, last):
        stage = it % ST
        before = (it + (ST - 1)) % ST
        mbarrier.wait(bars.q_ready.index(stage), (it // ST) & 1)
        S_next = issue_scores(smem.k, smem.q, stage, WHO, SL, DIMS)
        at = slot_of(it, stage, DST, ST)
        at_before = slot_of(it + (DST - 1), before, DST, ST)
        if MORE:
            mbarrier.wait(bars.d_ready.index(at), (it // DST) & 1)
            dP_next = issue_weight_gradients(smem.v, smem.d_out, at, WHO, SL)
        else:
            mbarrier.wait(bars.d_ready.index(at_before), ((it - 1) // DST) & 1)
        added, P_left, dS_left = issue_sums(
            words_p, words_s, Sums(v, nope, rope), smem, before, at_before, DIMS, HOW
        )
        S = warpgroup_mma_wait(MORE + ADDED, deps=(S_next,))
        P = weights_of(S, smem, stage, limit - c * BQ, factor, MASKED, WHO, HOW)
        if MORE:
            dP = warpgroup_mma_wait(ADDED, deps=(dP_next,))
            dS = score_gradients(P, dP, smem, stage)
        if HOW.gradients == "k":
            mbarrier.arrive(bars.d_empty.index(at), count=1)
        if HOW.gradients == "v":
            v, P_left = warpgroup_mma_wait(0, deps=(added.v, P_left))
        elif HOW.gradients == "k":
            nope, rope, dS_left = warpgroup_mma_wait(0, deps=(added.nope, added.rope, dS_left))
        elif DIMS.rope > 0:
            v, nope, rope, P_left, dS_left = warpgroup_mma_wait(
                0, deps=(added.v, added.nope, added.rope, P_left, dS_left)
            )
        else:
            v, nope, P_left, dS_left = warpgroup_mma_wait(
                0, deps=(added.v, added.nope, P_left, dS_left)
            )
        mbarrier.arrive(bars.q_empty.index(before), count=1)
        if HOW.gradients != "k":
            mbarrier.arrive(bars.d_empty.index(at_before), count=1)
            words_p = pack(P, BQ, DTYPE)
        if MORE:
            words_s = pack(dS, BQ, DTYPE)
        it += 1
    return words_p, words_s, Sums(v, nope, rope), it


@gluon.jit
def consumer(
    info,
    smem,
    bars,
    gradients,
    factor,
    scale,
    WHO: gl.constexpr,
    HOW: gl.constexpr,
    DIMS: gl.constexpr,
):
    """64 keys of every work item: rows 64 x WHO … of its tile.

    smem: KeyMemory, bars: KeyBarriers, gradients: KeyGradients, HOW: How, DIMS: Columns.
    """
    BQ: gl.constexpr = smem.d_out.shape[1]
    ST: gl.constexpr = smem.total.shape[0]
    DST: gl.constexpr = smem.d_out.shape[0]
    DTYPE: gl.constexpr = smem.d_out.dtype
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BQ, 16])
    VL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIMS.v, 16])
    NL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIMS.nope, 16])
    NOPE: gl.constexpr = DIMS.nope
    ROPE: gl.constexpr = DIMS.rope
    VALUE: gl.constexpr = DIMS.v
    turn = gl.program_id(0) * 0
    it = turn  # query blocks so far, over all work items
    mbarrier.wait(bars.t_ready.index(0), 0)
    blocks = get(info, turn, BLOCKS, WARPS)
    while blocks > 0:
        slot = turn & 1
        masked = get(info, slot, MASKED, WARPS)
        # The query that sees the consumer's first key, counted from the first block.
        limit = get(info, slot, LIMIT, WARPS) - get(info, slot, FIRST, WARPS) * BQ + WHO * 64
        stage = it % ST
        mbarrier.wait(bars.k_ready.index(WHO), turn & 1)
        mbarrier.wait(bars.q_ready.index(stage), (it // ST) & 1)
        S_next = issue_scores(smem.k, smem.q, stage, WHO, SL, DIMS)
        at = slot_of(it, stage, DST, ST)
        if HOW.gradients != "v":
            mbarrier.wait(bars.d_ready.index(at), (it // DST) & 1)
        if HOW.gradients == "v":
            S = warpgroup_mma_wait(0, deps=(S_next,))
            P = weights_of(S, smem, stage, limit, factor, True, WHO, HOW)
            words_p = pack(P, BQ, DTYPE)
            words_s = words_p
        else:
            dP_next = issue_weight_gradients(smem.v, smem.d_out, at, WHO, SL)
            S, dP = warpgroup_mma_wait(0, deps=(S_next, dP_next))
            if HOW.gradients == "k":
                mbarrier.arrive(bars.d_empty.index(at), count=1)
            P = weights_of(S, smem, stage, limit, factor, True, WHO, HOW)
            words_p = pack(P, BQ, DTYPE)
            words_s = pack(score_gradients(P, dP, smem, stage), BQ, DTYPE)
        it += 1
        v = gl.zeros([64, VALUE], gl.float32, VL)
        nope = gl.zeros([64, NOPE], gl.float32, NL)
        rope = nope
        if DIMS.rope > 0:
            RL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIMS.rope, 16])
            rope = gl.zeros([64, ROPE], gl.float32, RL)
        sums = Sums(v, nope, rope)
        masked = gl.maximum(masked, 1)
        words_p, words_s, sums, it = walk(
            words_p,
            words_s,
            sums,
            it,
            limit,
            1,
            masked,
            factor,
            smem,
            bars,
            True,
            WHO,
            HOW,
            DIMS,
            SL,
        )
        words_p, words_s, sums, it = walk(
            words_p,
            words_s,
            sums,
            it,
            limit,
            masked,
            blocks,
            factor,
            smem,
            bars,
            False,
            WHO,
            HOW,
            DIMS,
            SL,
        )
        mbarrier.arrive(bars.k_empty.index(WHO), count=1)
        before = (it + (ST - 1)) % ST
        at_before = slot_of(it + (DST - 1), before, DST, ST)
        if HOW.gradients == "v":
            mbarrier.wait(bars.d_ready.index(at_before), ((it - 1) // DST) & 1)
        added, P_left, dS_left = issue_sums(
            words_p, words_s, sums, smem, before, at_before, DIMS, HOW
        )
        item = get_work_item(info, slot, WARPS)
        mbarrier.arrive(bars.t_empty.index(slot), count=1)
        turn += 1
        mbarrier.wait(bars.t_ready.index(turn & 1), (turn >> 1) & 1)
        blocks = get(info, turn & 1, BLOCKS, WARPS)
        if HOW.gradients == "v":
            v, P_left = warpgroup_mma_wait(0, deps=(added.v, P_left))
        elif HOW.gradients == "k":
            nope, rope, dS_left = warpgroup_mma_wait(0, deps=(added.nope, added.rope, dS_left))
        elif DIMS.rope > 0:
            v, nope, rope, P_left, dS_left = warpgroup_mma_wait(
                0, deps=(added.v, added.nope, added.rope, P_left, dS_left)
            )
        else:
            v, nope, P_left, dS_left = warpgroup_mma_wait(
                0, deps=(added.v, added.nope, P_left, dS_left)
            )
        mbarrier.arrive(bars.q_empty.index(before), count=1)
        if HOW.gradients != "k":
            mbarrier.arrive(bars.d_empty.index(at_before), count=1)
        seen = item.length > 0
        if HOW.gradients != "k":
            write_gradient(v, 1.0, seen, gradients.v, item, 0, WHO)
        if HOW.gradients != "v":
            write_gradient(nope, scale, seen, gradients.k, item, 0, WHO)
            if DIMS.tail > 0:
                TAIL: gl.constexpr = DIMS.tail
                both = gl.permute(gl.reshape(rope, [64, ROPE // TAIL, TAIL]), (0, 2, 1))
                tail, rope = gl.split(both)
                write_gradient(tail, scale, seen, gradients.k, item, DIMS.nope, WHO)
            if DIMS.rope > 0:
                if HOW.rope == "shared":
                    write_part(rope, scale, seen, gradients.rope, item, WHO)
                else:
                    write_gradient(rope, scale, seen, gradients.rope, item, 0, WHO)


COUNTS = ["batch", "total_q", "total_k", "heads", "factor", "scale"]
STRIDES = [f"{name}_stride_{of}" for name in ("d_k", "d_v", "d_rope") for of in ("t", "h")]
# Vectors of 4-byte elements, read one by one: a slice of a tensor is as good as all.
VECTORS = ["cu_q_ptr", "cu_k_ptr", "counter_ptr"]


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def key_pass_kernel(  # noqa: PLR0913
    k_nope_desc,
    k_rope_desc,
    v_desc,
    q_nope_desc,
    q_rope_desc,
    d_out_desc,
    statistics_desc,
    bits_desc,
    k_tail_desc,
    d_k_ptr,
    d_v_ptr,
    d_rope_ptr,
    cu_q_ptr,
    cu_k_ptr,
    counter_ptr,
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
    VST: gl.constexpr,
    DIMS: gl.constexpr,
    ROPE: gl.constexpr,
    CAUSAL: gl.constexpr,
    SIGN: gl.constexpr,
    HG: gl.constexpr,
    REGISTERS: gl.constexpr,
    LAYOUTS: gl.constexpr,
    GRADIENTS: gl.constexpr = "all",
):
    """DIMS: Columns, ROPE: Problem.rope, REGISTERS: Registers, LAYOUTS: TileLayouts. HG: heads of a
    group that shares L2. factor: |scale| in log2 units. ST, VST: slots of the rings of Q, of d_out.
    GRADIENTS: How.gradients."""
    DTYPE: gl.constexpr = v_desc.dtype
    HOW: gl.constexpr = How(
        is_causal=CAUSAL,
        sign=SIGN,
        rope=ROPE,
        has_key_mask=bits_desc is not None,
        gradients=GRADIENTS,
    )
    TILE: gl.constexpr = Tiling(
        own_rows=64 * NC, step_rows=BQ, by_keys=True, is_causal=CAUSAL, head_group=HG
    )
    sequences = Sequences(
        cu_seqlens_q=cu_q_ptr,
        cu_seqlens_k=cu_k_ptr,
        batch=batch,
        total_q=total_q,
        total_k=total_k,
        heads=heads,
    )
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    k_smem = parts_of_rows(NC, 64, DIMS, LAYOUTS, DTYPE)
    v_smem = gl.allocate_shared_memory(DTYPE, [NC, 64, DIMS.v], LAYOUTS.v)
    q_smem = parts_of_rows(ST, BQ, DIMS, LAYOUTS, DTYPE)
    d_out_smem = gl.allocate_shared_memory(DTYPE, [VST, BQ, DIMS.v], LAYOUTS.v)
    total_smem = gl.allocate_shared_memory(gl.float32, [ST, BQ], LINEAR)
    delta_smem = gl.allocate_shared_memory(gl.float32, [ST, BQ], LINEAR)
    info = allocate_info()
    bars = KeyBarriers(
        k_ready=barriers(NC, 1),
        k_empty=barriers(NC, 1),
        q_ready=barriers(ST, 1),
        q_empty=barriers(ST, NC),
        d_ready=barriers(VST, 1),
        d_empty=barriers(VST, NC),
        t_ready=barriers(2, 1),
        t_empty=barriers(2, NC + 1),
        t_request=barriers(1, 1),
    )
    bits_smem = None
    if HOW.has_key_mask:
        bits_smem = tiles_of_words(ST * NC, BQ)
    smem = KeyMemory(
        k=k_smem,
        v=v_smem,
        q=q_smem,
        d_out=d_out_smem,
        total=total_smem,
        delta=delta_smem,
        bits=bits_smem,
    )
    sources = KeySources(
        k=Parts(k_nope_desc, k_rope_desc),
        v=v_desc,
        q=Parts(q_nope_desc, q_rope_desc),
        d_out=d_out_desc,
        statistics=statistics_desc,
        heads=heads,
        bits=bits_desc,
        k_tail=k_tail_desc,
    )
    gradients = KeyGradients(
        k=Rows(d_k_ptr, d_k_stride_t, d_k_stride_h),
        v=Rows(d_v_ptr, d_v_stride_t, d_v_stride_h),
        rope=Rows(d_rope_ptr, d_rope_stride_t, d_rope_stride_h),
    )
    gl.warp_specialize(
        [
            (consumer, (info, smem, bars, gradients, factor, scale, 0, HOW, DIMS)),
            (consumer, (info, smem, bars, gradients, factor, scale, 1, HOW, DIMS)),
            (producer, (info, sources, smem, bars, DIMS, HOW)),
            (scheduler, (info, bars, counter_ptr, sequences, TILE)),
        ],
        [4, 1, 1],
        [REGISTERS.consumer, REGISTERS.producer, REGISTERS.producer],
    )
