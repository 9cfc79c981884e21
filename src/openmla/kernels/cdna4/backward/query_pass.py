"""The query pass on CDNA4: statistics of query rows, and d_q. bf16.

A block has BM queries of one head and walks the keys that they see, from the first on, a step of
them at a time.

| waves | does |
|---|---|
| all 4 | 32 queries each: statistics, scores, dP, dS, d_q; together they copy K and V |

    S = Q K^T    dP = d_out V^T    dS = exp2(S - total) * (dP - delta)    d_q += dS K

Q, d_out and d_q stay in registers, of which a wave has 512, alone on its SIMD. There is no maximum
and nothing is rescaled, because lse is known.

| wait | in flight before | leaves | has arrived |
|---|---|---|---|
| before step j | step j | 0 | step j |
| after the last step | an empty one | 0 | everything |

The compiler puts a workgroup barrier behind each wait. A step is copied behind it, into the slot
that all waves had finished with when they came to the barrier.

| LDS | bytes (128 + 64 -> 128, steps of 64 keys) |
|---|---|
| K ring, nope and rope, 2 slots | 2 x 64 x (128 + 64) x 2 = 49152 |
| V ring, 2 slots | 2 x 64 x 128 x 2 = 32768 |
| deltas of the rows, from the layout of d_out to that of scores | 128 x 4 = 512 |

Rows of K and V past a sequence are zeros: a dS of 0 times a NaN would be a NaN. Keys that not every
row of the block sees are in the last steps, which have a mask.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna4 import async_copy

from openmla.kernels.cdna4.backward.records import (
    Columns,
    How,
    Own,
    Saved,
    Statistics,
    Walked,
)
from openmla.kernels.cdna4.backward.statistics import PLUS_INF, row_of, row_statistics
from openmla.kernels.cdna4.backward.walk import (
    PIECE,
    across,
    add_products,
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
from openmla.kernels.cdna4.records import Sequences, TokenRows
from openmla.kernels.cdna4.softmax import opaque_zero
from openmla.kernels.cdna4.tiles import key_blocks, work_item_of
from openmla.kernels.gluon.scores import MINUS_INF, signed


@gluon.jit
def hide(S, seen, keys, CAUSAL: gl.constexpr):
    """-inf where row r does not see a key: it sees those below min(seen + r, keys) if causal."""
    SL: gl.constexpr = S.type.layout
    row = gl.arange(0, S.shape[0], gl.SliceLayout(1, SL))
    key = gl.arange(0, S.shape[1], gl.SliceLayout(0, SL)) + opaque_zero()
    if CAUSAL:
        last = gl.minimum(row + seen, keys)
    else:
        last = row * 0 + keys
    return gl.where(key[None, :] < last[:, None], S, MINUS_INF)


@gluon.jit
def walk(  # noqa: PLR0913
    d_q,
    first,
    last,
    item,
    own,
    rows,
    rings,
    walked,
    factor,
    MASKED: gl.constexpr,
    HOW: gl.constexpr,
    BLOCK: gl.constexpr,
    LAYOUTS: gl.constexpr,
):
    """Steps first … last - 1; each starts the copies of the next. Takes and returns d_q, tiles of
    32 columns.

    item: WorkItem, own: Own, rows: RowStatistics, rings: Columns, walked: Walked.
    """
    MMA: gl.constexpr = LAYOUTS.matrices
    TILES: gl.constexpr = LAYOUTS.tiles
    BM: gl.constexpr = BLOCK.own_rows
    DTYPE: gl.constexpr = rings.nope.dtype
    STEP: gl.constexpr = BLOCK.step_rows
    for j in range(first, last):
        async_copy.wait_group(0)
        copy_step(rings, (j + 1) % BLOCK.slots, walked, (j + 1) * STEP, BLOCK, TILES)
        slots = slots_of(rings, j % BLOCK.slots)
        k = columns_across(slots, 0, BLOCK, LAYOUTS)
        for i in gl.static_range(STEP // EDGE):
            v = across(slots.v, i, TILES.v, MMA)
            S = signed(scores_of(own.columns, needed(k), BM, MMA), HOW.sign)
            k_along = columns_along(slots, i, BLOCK, LAYOUTS)
            dP = scores_of(own.v, needed(v), BM, MMA)
            if i + 1 < STEP // EDGE:
                k = columns_across(slots, i + 1, BLOCK, LAYOUTS)
            if MASKED:
                skip = j * STEP + i * EDGE
                S = hide(S, item.seen - skip, item.keys - skip, HOW.is_causal)
            P = gl.exp2(S * factor - rows.total[:, None])
            dS = left_operand(P * (dP - rows.delta[:, None]), DTYPE, MMA)
            d_q = add_products(d_q, dS, k_along)
    return d_q


COUNTS = ["batch", "total_q", "total_k", "heads", "tiles", "factor", "scale"]
# Vectors of 4-byte elements, read and written one by one: a slice of a tensor is as good as all.
VECTORS = ["lse_ptr", "d_lse_ptr", "sink_ptr", "cu_q_ptr", "cu_k_ptr"]


@gluon.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=VECTORS)
def query_pass_kernel(  # noqa: PLR0913
    q_ptr,
    k_ptr,
    rope_ptr,
    v_ptr,
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
    tiles,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    rope_stride_t,
    rope_stride_h,
    v_stride_t,
    v_stride_h,
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
    BLOCK: gl.constexpr,
    CAUSAL: gl.constexpr,
    SIGN: gl.constexpr,
    LAYOUTS: gl.constexpr,
):
    """One tile of queries of one head. BLOCK: BackwardBlock. LAYOUTS: BackwardLayouts. factor:
    |scale| in log2 units. part_sink_ptr: fp32 [tiles, heads], or None."""
    BM: gl.constexpr = BLOCK.own_rows
    STEP: gl.constexpr = BLOCK.step_rows
    MMA: gl.constexpr = LAYOUTS.matrices
    TILES: gl.constexpr = LAYOUTS.tiles
    HOW: gl.constexpr = How(is_causal=CAUSAL, sign=SIGN, holds_reads=True)
    sequences = Sequences(cu_q_ptr, cu_k_ptr, None, batch, total_q, total_k, heads)
    program = gl.program_id(0)
    tile = tiles - 1 - program // heads
    item = work_item_of(program, tiles, sequences, BM)
    part_ptr = part_sink_ptr
    if part_sink_ptr is not None:
        part_ptr = part_sink_ptr + (tile.to(gl.int64) * heads + item.head)
    if item.rows <= 0:
        if part_ptr is not None:
            gl.store(part_ptr, 0.0)
        return
    blocks, whole = key_blocks(item.rows, item.keys, item.seen, BM, STEP, CAUSAL)

    # Pointers to key 0 of the sequence, for this head.
    head = item.head.to(gl.int64)
    key = item.key.to(gl.int64)
    nope = HeadRows(k_ptr + (key * k_stride_t + head * k_stride_h) * PIECE, k_stride_t)
    values = HeadRows(v_ptr + (key * v_stride_t + head * v_stride_h) * PIECE, v_stride_t)
    rope = nope
    if BLOCK.d_rope > 0:
        at = rope_ptr + (key * rope_stride_t + head * rope_stride_h) * PIECE
        rope = HeadRows(at, rope_stride_t)
    limit = gl.minimum(item.keys, blocks * STEP)
    walked = Walked(columns=Columns(nope=nope, rope=rope, v=values), limit=limit)
    rings = rings_of(k_ptr.dtype.element_ty, BLOCK, TILES)
    start = item.head * 0
    copy_step(rings, 0, walked, start, BLOCK, TILES)

    saved = Saved(
        out=TokenRows(out_ptr, out_stride_t, out_stride_h),
        d_out=TokenRows(d_out_ptr, d_out_stride_t, d_out_stride_h),
        lse=TokenRows(lse_ptr, lse_stride_t, lse_stride_h),
        d_lse=TokenRows(d_lse_ptr, d_lse_stride_t, d_lse_stride_h),
        sink_ptr=sink_ptr,
    )
    stats = Statistics(ptr=statistics_ptr, rows=tiles * BM, heads=heads)
    rows = row_statistics(item, saved, stats, part_ptr, tile * BM, BLOCK, MMA.scores)
    q = TokenRows(q_ptr, q_stride_t, q_stride_h)
    q_row = q_ptr + row_of(q, item) * PIECE
    d_out_row = d_out_ptr + row_of(saved.d_out, item) * PIECE
    columns = fragments(q_row, q_stride_t, item.rows, BLOCK.d_qk // EDGE, BM, MMA)
    d_out = fragments(d_out_row, d_out_stride_t, item.rows, BLOCK.d_v // EDGE, BM, MMA)
    own = Own(columns=columns, v=d_out)

    d_q = no_sums(BLOCK.d_qk, BM, MMA)
    d_q = walk(
        d_q, start, whole, item, own, rows, rings, walked, factor, False, HOW, BLOCK, LAYOUTS
    )
    d_q = walk(
        d_q, whole, blocks, item, own, rows, rings, walked, factor, True, HOW, BLOCK, LAYOUTS
    )
    async_copy.wait_group(0)
    seeing = gl.convert_layout(rows.total, gl.SliceLayout(1, MMA.output)) != PLUS_INF
    d_q_row = d_q_ptr + row_of(TokenRows(d_q_ptr, d_q_stride_t, d_q_stride_h), item)
    store_columns(d_q, 0, BLOCK.d_qk, scale, seeing[:, None], d_q_row, d_q_stride_t, item.rows)
