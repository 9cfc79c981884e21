"""The key pass on CDNA4: d_k and d_v. bf16.

A block has BM keys of one head and walks the queries that see one of them, a step of them at a
time.

| waves | does |
|---|---|
| all 4 | 32 keys each: S^T, dP^T, P^T, dS^T, d_v, d_k; together they copy what is walked |

    S^T = K Q^T    dP^T = V d_out^T    dS^T = exp2(S^T - total) * (dP^T - delta)
    d_v += P^T d_out    d_k += dS^T Q

K, V and the sums stay in registers, of which a wave has 512, alone on its SIMD. Steps are counted
from the sequence's first query, so bits do not depend on where the walk begins.

Waits, barriers and slots are those of the query pass (query_pass.py). Statistics of a step's
queries, totals and deltas, come to registers before the copies of their step are started and go to
LDS behind the products of the step before.

| LDS | bytes (128 + 64 -> 128, steps of 64 queries) |
|---|---|
| Q ring, nope and rope, 2 slots | 2 x 64 x (128 + 64) x 2 = 49152 |
| d_out ring, 2 slots | 2 x 64 x 128 x 2 = 32768 |
| totals, deltas, 2 slots | 2 x 64 x (4 + 4) = 1024 |

Rows of Q and d_out past a sequence are zeros, and their weights are 0 because their total is +inf:
only the steps that the diagonal cuts, which come first, have a mask.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4
from triton.experimental.gluon.language.amd.cdna4 import async_copy

from openmla.kernels.cdna4.backward.records import Columns, How, KeyItem, Own, Turns, Walked
from openmla.kernels.cdna4.backward.walk import (
    PIECE,
    across,
    add_products,
    along,
    columns_across,
    columns_along,
    copy_step,
    fragments,
    left_operand,
    needed,
    no_sums,
    rings_of,
    scores_of,
    slots_of,
    store_columns,
)
from openmla.kernels.cdna4.dense.records import HeadRows
from openmla.kernels.cdna4.mma_op import EDGE
from openmla.kernels.cdna4.records import Sequences
from openmla.kernels.cdna4.softmax import opaque_zero
from openmla.kernels.cdna4.tiles import first_row, first_tile, sequence_of, span
from openmla.kernels.gluon.scores import MINUS_INF, signed

# Statistics of a step: in registers one per lane, the same in all waves; in LDS one after the
# other.
LANES = gl.constexpr(gl.BlockedLayout([1], [64], [4], [0]))
IN_ORDER = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def key_item_of(program, sequences, BM: gl.constexpr):
    """The KeyItem of a program: heads fastest, tiles that walk the most first."""
    head = program % sequences.heads
    tile = program // sequences.heads
    batch = sequences.batch
    cu_k_ptr = sequences.cu_k_ptr
    total_q = sequences.total_q
    total_k = sequences.total_k
    sequence = sequence_of(tile, cu_k_ptr, batch, total_k, 1, BM)
    k_start, k_len = span(sequence, cu_k_ptr, batch, total_k, total_k)
    q_start, q_len = span(sequence, sequences.cu_q_ptr, batch, total_q, 0)
    row = first_row(tile, sequence, cu_k_ptr, total_k, 1, BM)
    return KeyItem(
        head=head,
        token=k_start + row,
        rows=k_len - row,
        query=q_start,
        queries=q_len,
        seeing=row - (k_len - q_len),
        place=first_tile(sequence, sequences.cu_q_ptr, total_q, 1, BM) * BM,
    )


@gluon.jit
def query_steps(item, BM: gl.constexpr, STEP: gl.constexpr, CAUSAL: gl.constexpr):
    """(the first step that is walked, the first that needs no mask, the one after the last)."""
    stop = (item.queries + STEP - 1) // STEP
    first = stop * 0
    masked = first
    if CAUSAL:
        first = gl.minimum(gl.maximum(item.seeing, 0) // STEP, stop)
        # From here on a query sees the tile's last key.
        masked = (gl.maximum(item.seeing + BM - 1, 0) + STEP - 1) // STEP
        masked = gl.minimum(masked, stop)
    return first, masked, stop


@gluon.jit
def hide_before(S, first):
    """Transposed scores [keys, queries]: row r keeps columns from first + r on; others are -inf."""
    SL: gl.constexpr = S.type.layout
    row = gl.arange(0, S.shape[0], gl.SliceLayout(1, SL))
    query = gl.arange(0, S.shape[1], gl.SliceLayout(0, SL)) + opaque_zero()
    return gl.where(query[None, :] >= (row + first)[:, None], S, MINUS_INF)


@gluon.jit
def statistics_of(ptr, first, stop, STEP: gl.constexpr):
    """Statistics of queries first, first + 1, … at `ptr`, if the step exists: each step of a
    sequence lies in tiles of its own. They are loaded before the copies of their step: waiting for
    them is then no wait for copies."""
    query = gl.arange(0, STEP, LANES)
    return cdna4.buffer_load(ptr + first.to(gl.int64), query, mask=query * 0 + first < stop)


@gluon.jit
def walk(  # noqa: PLR0913
    d_v,
    d_k,
    first,
    last,
    item,
    own,
    turns,
    rings,
    walked,
    factor,
    MASKED: gl.constexpr,
    HOW: gl.constexpr,
    BLOCK: gl.constexpr,
    LAYOUTS: gl.constexpr,
):
    """Steps first … last - 1; each starts the copies of the next. Takes and returns d_v and d_k,
    tiles of 32 columns.

    item: KeyItem, own: Own, turns: Turns, rings: Columns, walked: Walked.
    """
    MMA: gl.constexpr = LAYOUTS.matrices
    TILES: gl.constexpr = LAYOUTS.tiles
    SL: gl.constexpr = gl.SliceLayout(0, MMA.scores)
    BM: gl.constexpr = BLOCK.own_rows
    DTYPE: gl.constexpr = rings.nope.dtype
    STEP: gl.constexpr = BLOCK.step_rows
    for j in range(first, last):
        async_copy.wait_group(0)
        ahead = (j + 1) * STEP
        later = (j + 1) % BLOCK.slots
        totals = statistics_of(turns.totals_ptr, ahead, item.queries, STEP)
        deltas = statistics_of(turns.deltas_ptr, ahead, item.queries, STEP)
        copy_step(rings, later, walked, ahead, BLOCK, TILES)
        slots = slots_of(rings, j % BLOCK.slots)
        total_slot = turns.total.index(j % BLOCK.slots)
        delta_slot = turns.delta.index(j % BLOCK.slots)
        q = columns_across(slots, 0, BLOCK, LAYOUTS)
        for i in gl.static_range(STEP // EDGE):
            d_out = across(slots.v, i, TILES.v, MMA)
            total = total_slot.slice(i * EDGE, EDGE, 0).load(SL)
            if HOW.holds_reads:
                q = needed(q)
            S = signed(scores_of(own.columns, q, BM, MMA), HOW.sign)
            d_out_along = along(slots.v, i, TILES.v, MMA)
            delta = delta_slot.slice(i * EDGE, EDGE, 0).load(SL)
            dP = scores_of(own.v, d_out, BM, MMA)
            if MASKED:
                S = hide_before(S, item.seeing - (j * STEP + i * EDGE))
            P = gl.exp2(S * factor - total[None, :])
            q_along = columns_along(slots, i, BLOCK, LAYOUTS)
            d_v = add_products(d_v, left_operand(P, DTYPE, MMA), d_out_along)
            dS = left_operand(P * (dP - delta[None, :]), DTYPE, MMA)
            if i + 1 < STEP // EDGE:
                q = columns_across(slots, i + 1, BLOCK, LAYOUTS)
            d_k = add_products(d_k, dS, q_along)
        turns.total.index(later).store(totals)
        turns.delta.index(later).store(deltas)
    return d_v, d_k


COUNTS = ["batch", "total_q", "total_k", "heads", "statistics_rows", "factor", "scale"]
# Vectors of 4-byte elements, read one by one: a slice of a tensor is as good as all.
VECTORS = ["cu_q_ptr", "cu_k_ptr"]


@gluon.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=VECTORS)
def key_pass_kernel(  # noqa: PLR0913
    q_ptr,
    k_ptr,
    rope_ptr,
    v_ptr,
    d_out_ptr,
    statistics_ptr,
    d_k_ptr,
    d_rope_ptr,
    d_v_ptr,
    cu_q_ptr,
    cu_k_ptr,
    factor,
    scale,
    batch,
    total_q,
    total_k,
    heads,
    statistics_rows,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    rope_stride_t,
    rope_stride_h,
    v_stride_t,
    v_stride_h,
    d_out_stride_t,
    d_out_stride_h,
    d_k_stride_t,
    d_k_stride_h,
    d_rope_stride_t,
    d_rope_stride_h,
    d_v_stride_t,
    d_v_stride_h,
    BLOCK: gl.constexpr,
    CAUSAL: gl.constexpr,
    SIGN: gl.constexpr,
    HOLD: gl.constexpr,
    LAYOUTS: gl.constexpr,
):
    """One tile of keys of one head. BLOCK: BackwardBlock. LAYOUTS: BackwardLayouts. factor: |scale|
    in log2 units. d_rope: of a rope row that heads share, the part of each head. HOLD:
    How.holds_reads."""
    BM: gl.constexpr = BLOCK.own_rows
    STEP: gl.constexpr = BLOCK.step_rows
    MMA: gl.constexpr = LAYOUTS.matrices
    TILES: gl.constexpr = LAYOUTS.tiles
    HOW: gl.constexpr = How(is_causal=CAUSAL, sign=SIGN, holds_reads=HOLD)
    sequences = Sequences(cu_q_ptr, cu_k_ptr, None, batch, total_q, total_k, heads)
    item = key_item_of(gl.program_id(0), sequences, BM)
    if item.rows <= 0:
        return
    first, masked, stop = query_steps(item, BM, STEP, CAUSAL)

    # Pointers to query 0 of the sequence, for this head.
    head = item.head.to(gl.int64)
    query = item.query.to(gl.int64)
    q_row = q_ptr + (query * q_stride_t + head * q_stride_h) * PIECE
    nope = HeadRows(q_row, q_stride_t)
    rope = HeadRows(q_row + BLOCK.d_nope, q_stride_t)
    d_out_row = d_out_ptr + (query * d_out_stride_t + head * d_out_stride_h) * PIECE
    values = HeadRows(d_out_row, d_out_stride_t)
    columns = Columns(nope=nope, rope=rope, v=values)
    walked = Walked(columns=columns, limit=item.queries)
    rings = rings_of(q_ptr.dtype.element_ty, BLOCK, TILES)
    totals_ptr = statistics_ptr + (head * statistics_rows + item.place)
    turns = Turns(
        totals_ptr=totals_ptr,
        deltas_ptr=totals_ptr + heads.to(gl.int64) * statistics_rows,
        total=gl.allocate_shared_memory(gl.float32, [BLOCK.slots, STEP], IN_ORDER),
        delta=gl.allocate_shared_memory(gl.float32, [BLOCK.slots, STEP], IN_ORDER),
    )
    slot = first % BLOCK.slots
    start = first * STEP
    totals = statistics_of(turns.totals_ptr, start, item.queries, STEP)
    deltas = statistics_of(turns.deltas_ptr, start, item.queries, STEP)
    copy_step(rings, slot, walked, start, BLOCK, TILES)
    turns.total.index(slot).store(totals)
    turns.delta.index(slot).store(deltas)

    key = item.token.to(gl.int64)
    k_row = k_ptr + (key * k_stride_t + head * k_stride_h) * PIECE
    v_row = v_ptr + (key * v_stride_t + head * v_stride_h) * PIECE
    k = fragments(k_row, k_stride_t, item.rows, BLOCK.d_nope // EDGE, BM, MMA)
    if BLOCK.d_rope > 0:
        at = rope_ptr + (key * rope_stride_t + head * rope_stride_h) * PIECE
        k = k + fragments(at, rope_stride_t, item.rows, BLOCK.d_rope // EDGE, BM, MMA)
    v = fragments(v_row, v_stride_t, item.rows, BLOCK.d_v // EDGE, BM, MMA)
    own = Own(columns=k, v=v)

    d_v = no_sums(BLOCK.d_v, BM, MMA)
    d_k = no_sums(BLOCK.d_qk, BM, MMA)
    d_v, d_k = walk(
        d_v, d_k, first, masked, item, own, turns, rings, walked, factor, True, HOW, BLOCK, LAYOUTS
    )
    d_v, d_k = walk(
        d_v, d_k, masked, stop, item, own, turns, rings, walked, factor, False, HOW, BLOCK, LAYOUTS
    )
    async_copy.wait_group(0)
    d_v_row = d_v_ptr + (key * d_v_stride_t + head * d_v_stride_h)
    store_columns(d_v, 0, BLOCK.d_v, 1.0, None, d_v_row, d_v_stride_t, item.rows)
    d_k_row = d_k_ptr + (key * d_k_stride_t + head * d_k_stride_h)
    store_columns(d_k, 0, BLOCK.d_nope, scale, None, d_k_row, d_k_stride_t, item.rows)
    if BLOCK.d_rope > 0:
        ROPE: gl.constexpr = BLOCK.d_nope // EDGE
        d_rope_row = d_rope_ptr + (key * d_rope_stride_t + head * d_rope_stride_h)
        store_columns(d_k, ROPE, BLOCK.d_rope, scale, None, d_rope_row, d_rope_stride_t, item.rows)
