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
V slots are written and read through one map (layouts.py), v227 or the default.

Weights P are bf16, or FP8 as on the pages the op comes from; FP8 weights are 2^8 times larger than
they should be, which keeps small ones out of the denormals and cancels in the division.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna4 import async_copy

from openmla.kernels.cdna4.copies import COPY, READ, WRITE, copy_paged_rows, copy_rows, pages_of
from openmla.kernels.cdna4.mma_op import (
    EDGE,
    OUTPUT,
    Q_OPERAND,
    SCORES,
    load_K_frag,
    load_V_from_lane_base,
    mma_PV,
    mma_QK,
    pack_P,
    precompute_v_lane_base,
)
from openmla.kernels.cdna4.softmax import finish, opaque_zero, signed_tiles, softmax
from openmla.kernels.cdna4.tiles import key_blocks, work_item_of
from openmla.kernels.gluon.compat import reinterpret
from openmla.kernels.gluon.scores import MINUS_INF


@gluon.jit
def load_Q(q_slab, q, token, head, rows, BM: gl.constexpr, LAYOUT: gl.constexpr):
    """Start copying the tile's queries to the slab, 64 columns at a time, as one group."""
    q_ptr, stride_t, stride_h = q
    TILES: gl.constexpr = q_slab.shape[0]
    COLUMNS: gl.constexpr = q_slab.shape[2]
    PIECE: gl.constexpr = 128 // q_slab.dtype.primitive_bitwidth
    at = q_ptr + (token.to(gl.int64) * stride_t + head.to(gl.int64) * stride_h) * PIECE
    for c in gl.static_range(TILES):
        copy_rows(q_slab.index(c), at + c * COLUMNS, stride_t, 0, rows, LAYOUT[COPY], True)
    async_copy.commit_group()


@gluon.jit
def Q_frags_from_slab(q_slab, MMA: gl.constexpr, LAYOUT: gl.constexpr):
    """All fragments of Q; they stay in registers."""
    TILES: gl.constexpr = q_slab.shape[0]
    frags = ()
    for c in gl.static_range(TILES):
        tile = q_slab.index(c)
        view = reinterpret(tile, tile.dtype, tile.shape, LAYOUT[READ])
        frags = frags + (view.load(MMA[Q_OPERAND]),)  # noqa: RUF005
    return frags


@gluon.jit
def Q_frags_from_memory(
    q, token, head, rows, BM: gl.constexpr, COLUMNS: gl.constexpr, TILES: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """All fragments of Q, straight to registers; rows past the end are zeros."""
    q_ptr, stride_t, stride_h = q
    PIECE: gl.constexpr = 128 // q_ptr.dtype.element_ty.primitive_bitwidth
    at = q_ptr + (token.to(gl.int64) * stride_t + head.to(gl.int64) * stride_h) * PIECE
    row = gl.arange(0, BM, gl.SliceLayout(1, MMA[Q_OPERAND]))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, MMA[Q_OPERAND]))
    pointers = (at + row.to(gl.int64) * stride_t * PIECE)[:, None] + column[None, :]
    frags = ()
    for c in gl.static_range(TILES):
        frag = gl.load(pointers + c * COLUMNS, mask=(row < rows)[:, None], other=0.0)
        frags = frags + (frag,)  # noqa: RUF005
    return frags


@gluon.jit
def dma_K(slots, k, rope, pages, first, limit, K: gl.constexpr, PARTS: gl.constexpr,
          PAGE: gl.constexpr):  # fmt: skip
    """Start copying keys first, first + 1, … of the sequence to a K slot, as one group. Its first
    PARTS parts are without rope; one more is rope, if there is one."""
    k_ptr, k_stride = k
    rope_ptr, rope_stride, page_stride, last_page, _line = rope
    WIDTH: gl.constexpr = slots[0].shape[1]
    PIECE: gl.constexpr = 128 // slots[0].dtype.primitive_bitwidth
    at = k_ptr + first.to(gl.int64) * k_stride * PIECE
    for p in gl.static_range(PARTS):
        copy_rows(slots[p], at + p * WIDTH, k_stride, first, limit, K[p][COPY], True)
    if len(K) > PARTS:
        if PAGE > 0:
            copy_paged_rows(
                slots[PARTS], rope_ptr, page_stride, rope_stride, last_page, pages, first,
                K[PARTS][COPY], PAGE,
            )  # fmt: skip
        else:
            at = rope_ptr + first.to(gl.int64) * rope_stride * PIECE
            copy_rows(slots[PARTS], at, rope_stride, first, limit, K[PARTS][COPY], True)
    async_copy.commit_group()


@gluon.jit
def dma_V(v_slot, v, first, limit, LAYOUT: gl.constexpr):
    """Start copying values of keys first, first + 1, … to a V slot, as one group: the W of v227."""
    v_ptr, v_stride = v
    PIECE: gl.constexpr = 128 // v_slot.dtype.primitive_bitwidth
    at = v_ptr + first.to(gl.int64) * v_stride * PIECE
    copy_rows(v_slot, at, v_stride, first, limit, LAYOUT[COPY], False)
    async_copy.commit_group()


@gluon.jit
def slots_at(rings, slot, PARTS: gl.constexpr):
    """A slot of each ring."""
    slots = ()
    for p in gl.static_range(PARTS):
        slots = slots + (rings[p].index(slot),)  # noqa: RUF005
    return slots


@gluon.jit
def add_scores(att, q_frags, slot, I: gl.constexpr, FIRST: gl.constexpr, LAYOUT: gl.constexpr,
               MMA: gl.constexpr):  # fmt: skip
    """Scores of tile I plus what a part of K adds, which meets fragments FIRST … of Q."""
    TILE: gl.constexpr = att.shape[1]
    COLUMNS: gl.constexpr = q_frags[0].shape[1]
    FRAGS: gl.constexpr = slot.shape[1] // COLUMNS
    SUBS: gl.constexpr = slot.shape[0] // TILE * FRAGS
    subs = reinterpret(slot, slot.dtype, [SUBS, TILE, COLUMNS], LAYOUT[READ])
    for c in gl.static_range(FRAGS):
        att = mma_QK(att, load_K_frag(subs, I * FRAGS + c, MMA), q_frags[FIRST + c])
    return att


@gluon.jit
def scores(q_frags, slots, K: gl.constexpr, TILE: gl.constexpr, MMA: gl.constexpr):
    """Score tiles [BM, TILE keys] of a K slot: the parts' fragments in the order of Q's columns."""
    BM: gl.constexpr = q_frags[0].shape[0]
    TILES: gl.constexpr = slots[0].shape[0] // TILE
    # All parts but rope, the last, are as wide as the first.
    PER_PART: gl.constexpr = slots[0].shape[1] // q_frags[0].shape[1]
    tiles = ()
    for i in gl.static_range(TILES):
        att = gl.zeros([BM, TILE], gl.float32, MMA[SCORES])
        for p in gl.static_range(len(K)):
            att = add_scores(att, q_frags, slots[p], i, p * PER_PART, K[p], MMA)
        tiles = tiles + (att,)  # noqa: RUF005
    return tiles


@gluon.jit
def mask_tiles(tiles, seen, keys, TILES: gl.constexpr, CAUSAL: gl.constexpr):
    """-inf where row r does not see a key: it sees those below min(seen + r, keys) if causal."""
    SL: gl.constexpr = tiles[0].type.layout
    row = gl.arange(0, tiles[0].shape[0], gl.SliceLayout(1, SL))
    TILE: gl.constexpr = tiles[0].shape[1]
    key = gl.arange(0, TILE, gl.SliceLayout(0, SL)) + opaque_zero()
    if CAUSAL:
        last = gl.minimum(row + seen, keys)
    else:
        last = row * 0 + keys
    done = ()
    for i in gl.static_range(TILES):
        here = (key + TILE * i)[None, :] < last[:, None]
        done = done + (gl.where(here, tiles[i], MINUS_INF),)  # noqa: RUF005
    return done


@gluon.jit
def walk(
    blocks, whole, limit, q_frags, rings, sources, pages, view, factor, HOW: gl.constexpr,
    LAYOUTS: gl.constexpr,
):  # fmt: skip
    """All key tiles; the next tile's copies are started on the way. Returns O, shift, row_sum.

    `pages` are those of tile 1 if rope comes from pages.
    """
    k_rings, v_ring = rings
    k, rope, v = sources
    seen, keys = view
    MMA: gl.constexpr = LAYOUTS[0]
    K: gl.constexpr = LAYOUTS[2]
    V: gl.constexpr = LAYOUTS[3]
    CAUSAL: gl.constexpr = HOW[0]
    SIGN: gl.constexpr = HOW[1]
    P_DTYPE: gl.constexpr = HOW[2]
    PAGE: gl.constexpr = HOW[3]
    PARTS: gl.constexpr = HOW[4]
    TILE: gl.constexpr = HOW[5]
    FP8_P: gl.constexpr = gl.float8e4nv == P_DTYPE
    BIAS: gl.constexpr = 8.0 if FP8_P else 0.0
    BM: gl.constexpr = q_frags[0].shape[0]
    KV: gl.constexpr = v_ring.shape[1]
    K_RING: gl.constexpr = k_rings[0].shape[0]
    V_RING: gl.constexpr = v_ring.shape[0]
    TILES: gl.constexpr = KV // TILE
    STRIPS: gl.constexpr = TILES // 2 if FP8_P else TILES
    DEPTHS: gl.constexpr = v_ring.shape[2] // TILE
    O = ()
    for _d in gl.static_range(DEPTHS):
        O = O + (gl.zeros([BM, TILE], gl.float32, MMA[OUTPUT]),)  # noqa: RUF005
    shift = gl.full([BM], float("-inf"), gl.float32, gl.SliceLayout(1, MMA[SCORES]))
    row_sum = gl.zeros([BM], gl.float32, gl.SliceLayout(1, MMA[SCORES]))
    for j in range(0, blocks):
        ahead = (j + 1) * KV
        slot = (j + 1) % K_RING
        pages_ahead = pages
        if PAGE > 0:
            pages_ahead = pages_of(rope[4], ahead + KV, limit, K[PARTS][COPY], PAGE)
        later = slots_at(k_rings, slot, len(K))
        dma_K(later, k, rope, pages, ahead, limit, K, PARTS, PAGE)
        pages = pages_ahead
        async_copy.wait_group(2)
        slot = j % K_RING
        tiles = scores(q_frags, slots_at(k_rings, slot, len(K)), K, TILE, MMA)
        dma_V(v_ring.index((j + 1) % V_RING), v, ahead, limit, V)
        if SIGN != 1:
            tiles = signed_tiles(tiles, TILES, SIGN)
        if j >= whole:
            tiles = mask_tiles(tiles, seen - j * KV, keys - j * KV, TILES, CAUSAL)
        weights, shift, row_sum, rescale = softmax(tiles, shift, row_sum, factor, TILES, BIAS)
        rescales = gl.convert_layout(rescale, gl.SliceLayout(1, MMA[OUTPUT]))[:, None]
        sums = ()
        for d in gl.static_range(DEPTHS):
            sums = sums + (O[d] * rescales,)  # noqa: RUF005
        async_copy.wait_group(2)
        v_lane_base = precompute_v_lane_base(v_ring.index(j % V_RING), V[READ])
        for i in gl.static_range(STRIPS):
            p = pack_P(weights, i, P_DTYPE, MMA)
            frags = load_V_from_lane_base(v_lane_base, i, DEPTHS, TILE, P_DTYPE, MMA)
            added = ()
            for d in gl.static_range(DEPTHS):
                added = added + (mma_PV(sums[d], frags[d], p),)  # noqa: RUF005
            sums = added
        O = sums
    async_copy.wait_group(0)
    return O, shift, row_sum


COUNTS = ["batch", "total_q", "total_k", "heads", "tiles", "table_stride", "last_page", "factor"]
# Vectors of 4-byte elements, read one by one: a slice of a tensor is as good as all.
VECTORS = ["lse_ptr", "sink_ptr", "cu_q_ptr", "cu_k_ptr", "table_ptr"]


@gluon.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=VECTORS)
def dense_kernel(  # noqa: PLR0913
    q_ptr, k_ptr, rope_ptr, v_ptr, out_ptr, lse_ptr, sink_ptr, cu_q_ptr, cu_k_ptr, table_ptr,
    factor, batch, total_q, total_k, heads, tiles,
    table_stride, last_page, q_stride_t, q_stride_h, k_stride_t, k_stride_h,
    rope_stride_t, rope_stride_h, rope_stride_page, v_stride_t, v_stride_h,
    out_stride_t, out_stride_h, lse_stride_t, lse_stride_h,
    BLOCK: gl.constexpr, GROUPS: gl.constexpr, ROPE_AT: gl.constexpr, PAGE: gl.constexpr,
    CAUSAL: gl.constexpr, SIGN: gl.constexpr, P_DTYPE: gl.constexpr, Q_IN_LDS: gl.constexpr,
    LAYOUTS: gl.constexpr,
):  # fmt: skip
    """BLOCK: BM, KV, widths of the parts of K, how many are without rope, d_v, K slots, V slots,
    columns of a fragment of Q and K, waves side by side, fragments of Q. GROUPS: query heads per
    head of K and V, and of rope. ROPE_AT: first rope column of a cache row. PAGE: rows per page, 0
    for a tensor. LAYOUTS: products, Q, parts of K, V."""
    BM: gl.constexpr = BLOCK[0]
    KV: gl.constexpr = BLOCK[1]
    PARTS: gl.constexpr = BLOCK[3]
    DTYPE: gl.constexpr = k_ptr.dtype.element_ty
    PIECE: gl.constexpr = 128 // DTYPE.primitive_bitwidth
    COLUMNS: gl.constexpr = BLOCK[7]
    TILE: gl.constexpr = EDGE * BLOCK[8]
    MMA: gl.constexpr = LAYOUTS[0]
    K: gl.constexpr = LAYOUTS[2]
    HOW: gl.constexpr = (CAUSAL, SIGN, P_DTYPE, PAGE, PARTS, TILE)
    shape = (cu_q_ptr, cu_k_ptr, batch, total_q, total_k, heads)
    head, sequence, token, rows, key, keys, seen = work_item_of(gl.program_id(0), tiles, shape, BM)
    if rows <= 0:
        return
    blocks, whole = key_blocks(rows, keys, seen, BM, KV, CAUSAL)
    k_rings = ()
    for p in gl.static_range(len(K)):
        ring = gl.allocate_shared_memory(DTYPE, [BLOCK[5], KV, BLOCK[2][p]], K[p][WRITE])
        k_rings = k_rings + (ring,)  # noqa: RUF005
    v_ring = gl.allocate_shared_memory(DTYPE, [BLOCK[6], KV, BLOCK[4]], LAYOUTS[3][WRITE])
    rings = (k_rings, v_ring)

    # Pointers to key 0 of the sequence, for this head.
    kv_head = (head // GROUPS[0]).to(gl.int64)
    row = key.to(gl.int64)
    k = (k_ptr + (row * k_stride_t + kv_head * k_stride_h) * PIECE, k_stride_t)
    v = (v_ptr + (row * v_stride_t + kv_head * v_stride_h) * PIECE, v_stride_t)
    line = (table_ptr, table_stride)
    rope = (rope_ptr, rope_stride_t, rope_stride_page, last_page, line)
    if PAGE > 0:
        line = (table_ptr + sequence.to(gl.int64) * table_stride, table_stride)
        rope = (rope_ptr + ROPE_AT, rope_stride_t, rope_stride_page, last_page, line)
    elif len(K) > PARTS:
        rope_head = (head // GROUPS[1]).to(gl.int64)
        at = rope_ptr + (row * rope_stride_t + rope_head * rope_stride_h) * PIECE + ROPE_AT
        rope = (at, rope_stride_t, rope_stride_page, last_page, line)
    sources = (k, rope, v)

    q = (q_ptr, q_stride_t, q_stride_h)
    start = head * 0
    limit = gl.minimum(keys, blocks * KV)
    if Q_IN_LDS:
        q_slab = gl.allocate_shared_memory(DTYPE, [BLOCK[9], BM, COLUMNS], LAYOUTS[1][WRITE])
        load_Q(q_slab, q, token, head, rows, BM, LAYOUTS[1])
    else:
        q_frags = Q_frags_from_memory(q, token, head, rows, BM, COLUMNS, BLOCK[9], MMA)
    pages = start
    later_pages = start
    if PAGE > 0:
        pages = pages_of(rope[4], start, limit, K[PARTS][COPY], PAGE)
        later_pages = pages_of(rope[4], start + KV, limit, K[PARTS][COPY], PAGE)
    dma_K(slots_at(k_rings, 0, len(K)), k, rope, pages, start, limit, K, PARTS, PAGE)
    dma_V(v_ring.index(0), v, start, limit, LAYOUTS[3])
    if Q_IN_LDS:
        async_copy.wait_group(2)
        q_frags = Q_frags_from_slab(q_slab, MMA, LAYOUTS[1])

    view = (seen, keys)
    O, shift, row_sum = walk(
        blocks, whole, limit, q_frags, rings, sources, later_pages, view, factor, HOW, LAYOUTS
    )
    OUT_PIECE: gl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth
    out = (out_ptr + head.to(gl.int64) * out_stride_h * OUT_PIECE, (out_stride_t, 0))
    if lse_ptr is not None:
        lse_ptr = lse_ptr + head.to(gl.int64) * lse_stride_h
    lse = (lse_ptr, (lse_stride_t, 0))
    finish(O, shift, row_sum, out, lse, sink_ptr, head, rows, (token, 1), BLOCK[4] // TILE)
