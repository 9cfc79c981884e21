# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""Dense MLA prefill on CDNA4: per-head K and V, one rope row for all heads. FP8, bf16 or fp16.

A block works on BM queries of one head and walks their keys KV at a time.

| waves | does |
|---|---|
| all 8 | 32 queries each: QK, softmax, PV, store; together they copy K and V one tile ahead |

There are no barrier objects. Copies to LDS are committed in groups, in the order Q, K(0), V(0),
then per tile K(j + 1), V(j + 1), so what a wait leaves in flight tells what has arrived:

| wait | in flight before | leaves | has arrived |
|---|---|---|---|
| before Q is read (FP8) | Q, K(0), V(0) | 2 | Q |
| before QK of tile j | K(j), V(j), K(j + 1) | 2 | K(j) |
| before PV of tile j | V(j), K(j + 1), V(j + 1) | 2 | V(j) |
| after the last tile | K(n), V(n), both empty | 0 | everything |

The compiler puts a workgroup barrier behind each wait. The one before PV of tile j - 1 also lies
between the last read of a K slot and its next copy, the one before QK of tile j does so for V.
Waves run in step: a wait covers a wave's own copies only, so if half of the waves ran a stage ahead
(warp_pipeline_stage), they would read what the others have not waited for.

| LDS | FP8 128 + 64 -> 128, v227 | bf16 |
|---|---|---|
| Q slab, [d_qk / 64, BM, 64] | 256 x 192 = 49152 | none: Q goes to registers |
| K ring, nope and rope, 2 slots | 2 x 128 x (128 + 64) = 49152 | 2 x 64 x (128 + 64) x 2 = 49152 |
| V ring, 3 slots (4 without v227) | 3 x 16640 = 49920 | 3 x 64 x 128 x 2 = 49152 |

K slots are swizzled: the copies permute their source, the fragments are read through the swizzle.
V slots are written and read through one map (cdna4/layouts.py), v227 or the default.

With a key mask a query has one word for 32 keys. A tile's words come straight to registers, one
tile ahead of their use, and no tile is without a mask.

Weights P are bf16, or FP8 as on the pages the op comes from; FP8 weights are 2^8 times larger than
they should be, which keeps small ones out of the denormals and cancels in the division.

Queries and keys in FP8 may have a scale each. Scores are multiplied by both. A query's is in
registers, those of a tile's keys pass through LDS: they are loaded before the copies of their tile
and stored behind its products.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4
from triton.experimental.gluon.language.amd.cdna4 import async_copy

from openmla.kernels.cdna4.copies import copy_paged_rows, copy_rows, pages_of
from openmla.kernels.cdna4.dense.records import (
    HeadRows,
    How,
    MaskRows,
    Rings,
    RopeRows,
    Scales,
    Sources,
)
from openmla.kernels.cdna4.mma_op import (
    EDGE,
    load_K_frag,
    load_V_from_lane_base,
    mma_PV,
    mma_QK,
    pack_P,
    precompute_v_lane_base,
)
from openmla.kernels.cdna4.records import Places, Queries, Sequences, TableLine, TokenRows
from openmla.kernels.cdna4.softmax import finish, opaque_zero, signed_tiles, softmax
from openmla.kernels.cdna4.tiles import (
    blocks_entered,
    key_blocks,
    with_bits,
    with_window,
    work_item_of,
)
from openmla.kernels.gluon.compat import reinterpret
from openmla.kernels.gluon.scores import MINUS_INF

# Scales of a tile's keys: in registers one or two per lane, the same in all waves; in LDS one after
# the other.
LANES = gl.constexpr(gl.BlockedLayout([1], [64], [8], [0]))
IN_ORDER = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def width_of(block, part):
    """Columns of a part of K."""
    return block.part_width if part < block.nope_parts else block.d_rope


@gluon.jit
def load_Q(q_slab, q, item, LAYOUT: gl.constexpr):
    """Start copying Queries `q` of a WorkItem to the slab, 64 columns at a time, as one group."""
    TILES: gl.constexpr = q_slab.shape[0]
    COLUMNS: gl.constexpr = q_slab.shape[2]
    PIECE: gl.constexpr = 128 // q_slab.dtype.primitive_bitwidth
    row = item.token.to(gl.int64) * q.token_stride + item.head.to(gl.int64) * q.head_stride
    at = q.ptr + row * PIECE
    for c in gl.static_range(TILES):
        copy_rows(
            q_slab.index(c), at + c * COLUMNS, q.token_stride, 0, item.rows, LAYOUT.copy, True
        )
    async_copy.commit_group()


@gluon.jit
def Q_frags_from_slab(q_slab, MMA: gl.constexpr, LAYOUT: gl.constexpr):
    """All fragments of Q; they stay in registers."""
    TILES: gl.constexpr = q_slab.shape[0]
    frags = ()
    for c in gl.static_range(TILES):
        tile = q_slab.index(c)
        view = reinterpret(tile, tile.dtype, tile.shape, LAYOUT.read)
        frags = frags + (view.load(MMA.q),)  # noqa: RUF005
    return frags


@gluon.jit
def Q_frags_from_memory(q, item, BLOCK: gl.constexpr, MMA: gl.constexpr):
    """All fragments of Queries `q` of a WorkItem, straight to registers; rows past the end are
    zeros."""
    COLUMNS: gl.constexpr = BLOCK.frag_columns
    FRAGS: gl.constexpr = BLOCK.q_frags
    PIECE: gl.constexpr = 128 // q.ptr.dtype.element_ty.primitive_bitwidth
    start = item.token.to(gl.int64) * q.token_stride + item.head.to(gl.int64) * q.head_stride
    at = q.ptr + start * PIECE
    row = gl.arange(0, BLOCK.queries, gl.SliceLayout(1, MMA.q))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, MMA.q))
    pointers = (at + row.to(gl.int64) * q.token_stride * PIECE)[:, None] + column[None, :]
    frags = ()
    for c in gl.static_range(FRAGS):
        frag = gl.load(pointers + c * COLUMNS, mask=(row < item.rows)[:, None], other=0.0)
        frags = frags + (frag,)  # noqa: RUF005
    return frags


@gluon.jit
def dma_K(
    slots,
    sources,
    pages,
    first,
    limit,
    BLOCK: gl.constexpr,
    K: gl.constexpr,
    PAGE: gl.constexpr,
):
    """Start copying keys first, first + 1, … of the sequence to a slot of each part of K, as one
    group. sources: Sources; K: TileLayouts of the parts. The parts without rope come first, then
    rope, if there is one."""
    k = sources.k
    rope = sources.rope
    PARTS: gl.constexpr = BLOCK.nope_parts
    PIECE: gl.constexpr = 128 // k.ptr.dtype.element_ty.primitive_bitwidth
    at = k.ptr + first.to(gl.int64) * k.row_stride * PIECE
    for p in gl.static_range(PARTS):
        columns = at + p * BLOCK.part_width
        copy_rows(slots[p], columns, k.row_stride, first, limit, K[p].copy, True)
    if len(K) > PARTS:
        if PAGE > 0:
            copy_paged_rows(slots[PARTS], rope, pages, first, K[PARTS].copy, PAGE)
        else:
            at = rope.ptr + first.to(gl.int64) * rope.row_stride * PIECE
            copy_rows(slots[PARTS], at, rope.row_stride, first, limit, K[PARTS].copy, True)
    async_copy.commit_group()


@gluon.jit
def dma_V(v_slot, v, first, limit, LAYOUT: gl.constexpr):
    """Start copying values (HeadRows) of keys first, first + 1, … to a V slot, as one group: the W
    of v227."""
    PIECE: gl.constexpr = 128 // v_slot.dtype.primitive_bitwidth
    at = v.ptr + first.to(gl.int64) * v.row_stride * PIECE
    copy_rows(v_slot, at, v.row_stride, first, limit, LAYOUT.copy, False)
    async_copy.commit_group()


@gluon.jit
def slots_at(rings, slot, PARTS: gl.constexpr):
    """A slot of each ring."""
    slots = ()
    for p in gl.static_range(PARTS):
        slots = slots + (rings[p].index(slot),)  # noqa: RUF005
    return slots


@gluon.jit
def add_scores(
    att,
    q_frags,
    slot,
    I: gl.constexpr,
    FIRST: gl.constexpr,
    COLUMNS: gl.constexpr,
    LAYOUT: gl.constexpr,
    MMA: gl.constexpr,
):
    """Scores of tile I plus what a part of K adds, which meets fragments FIRST … of Q, COLUMNS
    columns each."""
    TILE: gl.constexpr = att.shape[1]
    FRAGS: gl.constexpr = slot.shape[1] // COLUMNS
    SUBS: gl.constexpr = slot.shape[0] // TILE * FRAGS
    subs = reinterpret(slot, slot.dtype, [SUBS, TILE, COLUMNS], LAYOUT.read)
    for c in gl.static_range(FRAGS):
        att = mma_QK(att, load_K_frag(subs, I * FRAGS + c, MMA), q_frags[FIRST + c])
    return att


@gluon.jit
def scaled(att, row_scales, key_slot, I: gl.constexpr, MMA: gl.constexpr):
    """Scores of tile I times the scale of their query, if queries have one, and of their key,
    likewise."""
    TILE: gl.constexpr = att.shape[1]
    if key_slot is not None:
        scale = key_slot.slice(TILE * I, TILE, 0).load(gl.SliceLayout(0, MMA.scores))
        att = att * scale[None, :]
    if row_scales is not None:
        att = att * row_scales[:, None]
    return att


@gluon.jit
def scores(q_frags, slots, row_scales, key_slot, BLOCK: gl.constexpr, LAYOUTS: gl.constexpr):
    """Score tiles [queries, TILE keys] of a K slot: the parts' fragments in the order of Q's
    columns. key_slot: the scales of the slot's keys, or None."""
    MMA: gl.constexpr = LAYOUTS.matrices
    K: gl.constexpr = LAYOUTS.k
    TILE: gl.constexpr = EDGE * BLOCK.across
    TILES: gl.constexpr = BLOCK.keys // TILE
    COLUMNS: gl.constexpr = BLOCK.frag_columns
    PER_PART: gl.constexpr = BLOCK.part_width // COLUMNS
    tiles = ()
    for i in gl.static_range(TILES):
        att = gl.zeros([BLOCK.queries, TILE], gl.float32, MMA.scores)
        for p in gl.static_range(len(K)):
            att = add_scores(att, q_frags, slots[p], i, p * PER_PART, COLUMNS, K[p], MMA)
        att = scaled(att, row_scales, key_slot, i, MMA)
        tiles = tiles + (att,)  # noqa: RUF005
    return tiles


@gluon.jit
def mask_tiles(
    tiles,
    seen,
    keys,
    window,
    CAUSAL: gl.constexpr,
    BLOCK: gl.constexpr,
    MMA: gl.constexpr,
):
    """-inf where row r does not see a key: it sees those below min(seen + r, keys) if causal, with
    a window the last so many below seen + r."""
    SL: gl.constexpr = MMA.scores
    TILE: gl.constexpr = EDGE * BLOCK.across
    TILES: gl.constexpr = BLOCK.keys // TILE
    row = gl.arange(0, BLOCK.queries, gl.SliceLayout(1, SL))
    key = gl.arange(0, TILE, gl.SliceLayout(0, SL)) + opaque_zero()
    if CAUSAL:
        last = gl.minimum(row + seen, keys)
    else:
        last = row * 0 + keys
    if window is not None:
        since = gl.maximum(row + seen, 0) - window
    done = ()
    for i in gl.static_range(TILES):
        here = (key + TILE * i)[None, :] < last[:, None]
        if window is not None:
            here = here & ((key + TILE * i)[None, :] >= since[:, None])
        done = done + (gl.where(here, tiles[i], MINUS_INF),)  # noqa: RUF005
    return done


@gluon.jit
def key_scales(ptr, first, limit, KV: gl.constexpr):
    """Scales of keys first, first + 1, …, the same in all waves; 0 at or past `limit`. They are
    loaded before the copies of their tile, as pages are."""
    key = gl.arange(0, KV, LANES)
    return cdna4.buffer_load(ptr + first.to(gl.int64), key, mask=key + first < limit)


@gluon.jit
def words_of(mask, first, BLOCK: gl.constexpr, MMA: gl.constexpr):
    """The bits of keys first, first + 1, … of a tile's queries: a word [queries] for 32 keys each.
    mask: MaskRows.

    They are loaded a tile before they are used, as pages are: waiting for them is then no wait for
    copies that were started later. Queries and words that do not exist are others that do.
    """
    row = gl.minimum(gl.arange(0, BLOCK.queries, gl.SliceLayout(1, MMA.scores)), mask.last_row)
    line = mask.ptr + row.to(gl.int64) * mask.row_stride
    words = ()
    for i in gl.static_range(BLOCK.keys // EDGE + (0 if mask.shift is None else 1)):
        number = gl.minimum(first // EDGE + i, mask.words - 1)
        words = words + (gl.load(line + number),)  # noqa: RUF005
    return words


@gluon.jit
def mask_bits(tiles, words, shift, BLOCK: gl.constexpr, MMA: gl.constexpr):
    """-inf where a query's bit of a key is not set; words: see words_of, shift: see MaskRows."""
    TILE: gl.constexpr = EDGE * BLOCK.across
    MEETS: gl.constexpr = BLOCK.across + (0 if shift is None else 1)
    key = gl.arange(0, TILE, gl.SliceLayout(0, MMA.scores)) + opaque_zero()
    if shift is not None:
        key = key + shift
    done = ()
    for i in gl.static_range(BLOCK.keys // TILE):
        bits = words[i * BLOCK.across][:, None] >> (key % EDGE)[None, :]
        for n in gl.static_range(1, MEETS):
            after = words[i * BLOCK.across + n][:, None] >> (key % EDGE)[None, :]
            bits = gl.where((key < n * EDGE)[None, :], bits, after)
        done = done + (gl.where((bits & 1) == 1, tiles[i], MINUS_INF),)  # noqa: RUF005
    return done


@gluon.jit
def walk(
    item,
    blocks,
    whole,
    limit,
    q_frags,
    rings,
    sources,
    pages,
    factor,
    HOW: gl.constexpr,
    BLOCK: gl.constexpr,
    LAYOUTS: gl.constexpr,
):
    """Visit all key tiles of a WorkItem; the next tile's copies are started on the way. Returns O,
    shift, row_sum.

    rings: Rings; sources: Sources; `pages` are those of tile 1 if rope comes from pages. HOW: How;
    BLOCK: DenseBlock; LAYOUTS: DenseLayouts.
    """
    MMA: gl.constexpr = LAYOUTS.matrices
    K: gl.constexpr = LAYOUTS.k
    V: gl.constexpr = LAYOUTS.v
    P_DTYPE: gl.constexpr = HOW.p_dtype
    PAGE: gl.constexpr = HOW.page_size
    ROPE_PART: gl.constexpr = BLOCK.nope_parts
    FP8_P: gl.constexpr = gl.float8e4nv == P_DTYPE
    BIAS: gl.constexpr = 8.0 if FP8_P else 0.0
    BM: gl.constexpr = BLOCK.queries
    KV: gl.constexpr = BLOCK.keys
    K_RING: gl.constexpr = BLOCK.k_slots
    V_RING: gl.constexpr = BLOCK.v_slots
    TILE: gl.constexpr = EDGE * BLOCK.across
    TILES: gl.constexpr = KV // TILE
    STRIPS: gl.constexpr = TILES // 2 if FP8_P else TILES
    DEPTHS: gl.constexpr = BLOCK.d_v // TILE
    O = ()
    for _d in gl.static_range(DEPTHS):
        O = O + (gl.zeros([BM, TILE], gl.float32, MMA.output),)  # noqa: RUF005
    shift = gl.full([BM], float("-inf"), gl.float32, gl.SliceLayout(1, MMA.scores))
    row_sum = gl.zeros([BM], gl.float32, gl.SliceLayout(1, MMA.scores))
    scales = sources.scales
    SCALED_KEYS: gl.constexpr = rings.scales is not None
    if item.window is not None:
        entered = blocks_entered(item.rows, item.seen, item.window, BM, KV)
    words = ()
    mask = sources.mask
    if mask.ptr is not None:
        words = words_of(mask, blocks * 0, BLOCK, MMA)
    for j in range(0, blocks):
        ahead = (j + 1) * KV
        words_ahead = words
        if mask.ptr is not None:
            words_ahead = words_of(mask, ahead, BLOCK, MMA)
        slot = (j + 1) % K_RING
        pages_ahead = pages
        if PAGE > 0:
            pages_ahead = pages_of(sources.rope.line, ahead + KV, limit, K[ROPE_PART].copy, PAGE)
        later = slots_at(rings.k, slot, len(K))
        if SCALED_KEYS:
            scales_ahead = key_scales(scales.keys_ptr, ahead, limit, KV)
        dma_K(later, sources, pages, ahead, limit, BLOCK, K, PAGE)
        pages = pages_ahead
        async_copy.wait_group(2)
        slot = j % K_RING
        key_slot = rings.scales
        if SCALED_KEYS:
            key_slot = rings.scales.index(j % 2)
        keys = slots_at(rings.k, slot, len(K))
        tiles = scores(q_frags, keys, scales.rows, key_slot, BLOCK, LAYOUTS)
        dma_V(rings.v.index((j + 1) % V_RING), sources.v, ahead, limit, V)
        if HOW.sign != 1:
            tiles = signed_tiles(tiles, TILES, HOW.sign)
        partly = j >= whole
        if item.window is not None:
            partly = partly | (j < entered)
        if partly:
            seen, left = item.seen - j * KV, item.keys - j * KV
            tiles = mask_tiles(tiles, seen, left, item.window, HOW.is_causal, BLOCK, MMA)
        if mask.ptr is not None:
            tiles = mask_bits(tiles, words, mask.shift, BLOCK, MMA)
        words = words_ahead
        weights, shift, row_sum, rescale = softmax(tiles, shift, row_sum, factor, TILES, BIAS)
        rescales = gl.convert_layout(rescale, gl.SliceLayout(1, MMA.output))[:, None]
        sums = ()
        for d in gl.static_range(DEPTHS):
            sums = sums + (O[d] * rescales,)  # noqa: RUF005
        async_copy.wait_group(2)
        v_lane_base = precompute_v_lane_base(rings.v.index(j % V_RING), V.read)
        for i in gl.static_range(STRIPS):
            p = pack_P(weights, i, P_DTYPE, MMA)
            frags = load_V_from_lane_base(v_lane_base, i, DEPTHS, TILE, P_DTYPE, MMA)
            added = ()
            for d in gl.static_range(DEPTHS):
                added = added + (mma_PV(sums[d], frags[d], p),)  # noqa: RUF005
            sums = added
        O = sums
        if SCALED_KEYS:
            rings.scales.index((j + 1) % 2).store(scales_ahead)
    async_copy.wait_group(0)
    return O, shift, row_sum


COUNTS = ["batch", "total_q", "total_k", "heads", "tiles", "table_stride", "last_page", "factor"]
COUNTS += ["mask_stride", "words", "window"]
# Vectors of 4-byte elements, read one by one: a slice of a tensor is as good as all.
VECTORS = ["lse_ptr", "sink_ptr", "cu_q_ptr", "cu_k_ptr", "starts_ptr", "table_ptr", "mask_ptr"]
VECTORS += ["q_scale_ptr", "k_scale_ptr"]


@gluon.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=VECTORS)
def dense_kernel(  # noqa: PLR0913
    q_ptr,
    k_ptr,
    rope_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    sink_ptr,
    cu_q_ptr,
    cu_k_ptr,
    starts_ptr,
    table_ptr,
    q_scale_ptr,
    k_scale_ptr,
    mask_ptr,
    factor,
    batch,
    total_q,
    total_k,
    heads,
    tiles,
    table_stride,
    last_page,
    mask_stride,
    words,
    window,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    rope_stride_t,
    rope_stride_h,
    rope_stride_page,
    v_stride_t,
    v_stride_h,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    BLOCK: gl.constexpr,
    GROUPS: gl.constexpr,
    ROPE_AT: gl.constexpr,
    PAGE: gl.constexpr,
    CAUSAL: gl.constexpr,
    SIGN: gl.constexpr,
    P_DTYPE: gl.constexpr,
    Q_IN_LDS: gl.constexpr,
    LAYOUTS: gl.constexpr,
):
    """One tile of queries of one head. BLOCK: DenseBlock. GROUPS: HeadGroups. ROPE_AT: first rope
    column of a cache row. PAGE: rows per page, 0 for a tensor. LAYOUTS: DenseLayouts."""
    BM: gl.constexpr = BLOCK.queries
    KV: gl.constexpr = BLOCK.keys
    DTYPE: gl.constexpr = k_ptr.dtype.element_ty
    PIECE: gl.constexpr = 128 // DTYPE.primitive_bitwidth
    TILE: gl.constexpr = EDGE * BLOCK.across
    MMA: gl.constexpr = LAYOUTS.matrices
    K: gl.constexpr = LAYOUTS.k
    V: gl.constexpr = LAYOUTS.v
    ROPE_PART: gl.constexpr = BLOCK.nope_parts
    HOW: gl.constexpr = How(is_causal=CAUSAL, sign=SIGN, p_dtype=P_DTYPE, page_size=PAGE)
    sequences = Sequences(cu_q_ptr, cu_k_ptr, starts_ptr, batch, total_q, total_k, heads)
    item = work_item_of(gl.program_id(0), tiles, sequences, BM)
    if mask_ptr is not None:
        item = with_bits(item, words)
    if window is not None:
        item = with_window(item, window)
    if item.rows <= 0:
        return
    blocks, whole = key_blocks(item.rows, item.keys, item.seen, BM, KV, CAUSAL)
    k_rings = ()
    for p in gl.static_range(len(K)):
        ring = gl.allocate_shared_memory(DTYPE, [BLOCK.k_slots, KV, width_of(BLOCK, p)], K[p].write)
        k_rings = k_rings + (ring,)  # noqa: RUF005
    V_TYPE: gl.constexpr = v_ptr.dtype.element_ty
    V_PIECE: gl.constexpr = 128 // V_TYPE.primitive_bitwidth
    v_ring = gl.allocate_shared_memory(V_TYPE, [BLOCK.v_slots, KV, BLOCK.d_v], V.write)
    scale_ring = None
    if k_scale_ptr is not None:
        scale_ring = gl.allocate_shared_memory(gl.float32, [2, KV], IN_ORDER)
    rings = Rings(k=k_rings, v=v_ring, scales=scale_ring)

    # Pointers to key 0 of the sequence, for this head.
    kv_head = (item.head // GROUPS.kv).to(gl.int64)
    row = item.key.to(gl.int64)
    k = HeadRows(k_ptr + (row * k_stride_t + kv_head * k_stride_h) * PIECE, k_stride_t)
    v = HeadRows(v_ptr + (row * v_stride_t + kv_head * v_stride_h) * V_PIECE, v_stride_t)
    rope = None
    if PAGE > 0:
        line = table_ptr + item.sequence.to(gl.int64) * table_stride
        rope = RopeRows(
            ptr=rope_ptr + ROPE_AT,
            row_stride=rope_stride_t,
            page_stride=rope_stride_page,
            last_page=last_page,
            line=TableLine(ptr=line, entries=table_stride, origin=item.origin),
        )
    elif len(K) > ROPE_PART:
        rope_head = (item.head // GROUPS.rope).to(gl.int64)
        at = rope_ptr + (row * rope_stride_t + rope_head * rope_stride_h) * PIECE + ROPE_AT
        rope = HeadRows(at, rope_stride_t)
    if mask_ptr is not None:
        mask_ptr = mask_ptr + item.token.to(gl.int64) * mask_stride
    shift = None
    if window is not None and mask_ptr is not None:
        mask_ptr = mask_ptr + item.origin // EDGE
        words = words - item.origin // EDGE
        shift = item.origin % EDGE
    mask = MaskRows(
        ptr=mask_ptr,
        row_stride=mask_stride,
        last_row=item.rows - 1,
        words=words,
        shift=shift,
    )
    row_scales = None
    if q_scale_ptr is not None:
        place = gl.arange(0, BM, gl.SliceLayout(1, MMA.scores))
        row_scales = gl.load(q_scale_ptr + item.token + place, mask=place < item.rows, other=0.0)
    if k_scale_ptr is not None:
        k_scale_ptr = k_scale_ptr + row
    scales = Scales(rows=row_scales, keys_ptr=k_scale_ptr)
    sources = Sources(k=k, rope=rope, v=v, mask=mask, scales=scales)

    q = Queries(q_ptr, q_stride_t, q_stride_h)
    start = item.head * 0
    limit = gl.minimum(item.keys, blocks * KV)
    if k_scale_ptr is not None:
        scale_ring.index(0).store(key_scales(k_scale_ptr, start, limit, KV))  # type: ignore[union-attr]
    if Q_IN_LDS:
        Q_SLAB: gl.constexpr = [BLOCK.q_frags, BM, BLOCK.frag_columns]
        q_slab = gl.allocate_shared_memory(DTYPE, Q_SLAB, LAYOUTS.q.write)
        load_Q(q_slab, q, item, LAYOUTS.q)
    else:
        q_frags = Q_frags_from_memory(q, item, BLOCK, MMA)
    pages = start
    later_pages = start
    if PAGE > 0:
        pages = pages_of(sources.rope.line, start, limit, K[ROPE_PART].copy, PAGE)
        later_pages = pages_of(sources.rope.line, start + KV, limit, K[ROPE_PART].copy, PAGE)
    dma_K(slots_at(k_rings, 0, len(K)), sources, pages, start, limit, BLOCK, K, PAGE)
    dma_V(v_ring.index(0), v, start, limit, V)
    if Q_IN_LDS:
        async_copy.wait_group(2)
        q_frags = Q_frags_from_slab(q_slab, MMA, LAYOUTS.q)

    O, shift, row_sum = walk(
        item,
        blocks,
        whole,
        limit,
        q_frags,
        rings,
        sources,
        later_pages,
        factor,
        HOW,
        BLOCK,
        LAYOUTS,
    )
    # Rows of the tile are tokens of one head.
    OUT_PIECE: gl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth
    out_ptr = out_ptr + item.head.to(gl.int64) * out_stride_h * OUT_PIECE
    out = TokenRows(ptr=out_ptr, token_stride=out_stride_t, row_stride=0)
    if lse_ptr is not None:
        lse_ptr = lse_ptr + item.head.to(gl.int64) * lse_stride_h
    lse = TokenRows(ptr=lse_ptr, token_stride=lse_stride_t, row_stride=0)
    places = Places(first=item.token, per_token=1)
    finish(
        O,
        shift,
        row_sum,
        out,
        lse,
        sink_ptr,
        item.head,
        item.rows,
        places,
        TILE,
        BLOCK.d_v // TILE,
        MMA,
    )
