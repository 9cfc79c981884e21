# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""Token-sparse MLA prefill in latent form on CDNA4: bf16, fp16 and FP8 rows.

A block works on one token and BM of its heads and gathers the rows that its indices name, B_TOPK at
a time. K is the whole row, V its first 512 columns, from the same LDS.

| waves | does |
|---|---|
| all 8 | gather the next rows; scores as 4 x 2 waves, softmax, output as 2 x 4 waves |

There are no barrier objects. Rows that are stored as they are multiplied are copied to LDS in
groups, one per block of rows; rows that must be dequantized pass through registers, which are only
free after the products:

| rows | before the products of block j | after them |
|---|---|---|
| copied | start block j + 1, wait until only it is in flight | |
| dequantized | | load block j + 1, dequantize it, store it to the other slot |

The compiler puts workgroup barriers between stores and loads of a slot.

| LDS | bytes |
|---|---|
| latent ring, 2 slots, rows 1040 B apart | 2 x 64 x 1040 = 133120 |
| rope ring, 2 slots | 2 x 64 x 128 = 16384 |
| P from the waves of the scores to those of the output, row sums | the compiler's, about 9 KB |

An index that does not count (negative, past the rows, past topk_lengths) gathers zeros and scores
-inf.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna4 import async_copy

from openmla.kernels.cdna4.copies import COPY, READ, WRITE, swizzled_pieces, swizzled_source
from openmla.kernels.cdna4.mma_op import (
    K_OPERAND,
    OUTPUT,
    P_OPERAND,
    Q_OPERAND,
    SCORES,
    V_OPERAND,
    mma_PV,
    mma_QK,
)
from openmla.kernels.cdna4.softmax import finish, opaque_zero, signed_tiles, softmax
from openmla.kernels.gluon.compat import reinterpret
from openmla.kernels.gluon.scores import LN_2, MINUS_INF

COLUMNS = gl.constexpr(64)  # of a fragment of Q and K
STRIP = gl.constexpr(32)  # rows whose scores are one tile
ROPE_WIDTH = gl.constexpr(64)
GROUP = gl.constexpr(8)  # columns that one lane copies: 16 bytes of LDS


@gluon.jit
def listed(list_, at, count, rows):
    """(index, whether it counts) of places `at` of the token's list."""
    index = gl.load(list_ + at, mask=at < count, other=-1)
    return index, (index >= 0) & (index < rows)


@gluon.jit
def row_offset(index, ok, strides, PAGE: gl.constexpr):
    """Strides from the first row to row `index`; 64 bits, a cache may be of any size."""
    stride_page, stride_t = strides
    safe = gl.where(ok, index, 0)
    if PAGE > 0:
        page = (safe // PAGE).to(gl.int64) * stride_page
        return page + (safe % PAGE).to(gl.int64) * stride_t
    else:
        return safe.to(gl.int64) * stride_t


@gluon.jit
def row_pointers(ptr, index, ok, strides, PAGE: gl.constexpr):
    """Where rows begin; strides count pieces of 16 bytes."""
    PIECE: gl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    return ptr + row_offset(index, ok, strides, PAGE) * PIECE


@gluon.jit
def copy_block(slots, source, list_, first, count, rows, LAYOUTS: gl.constexpr, HOW: gl.constexpr):
    """Start copying the rows of places first, first + 1, … to a slot, as one group."""
    latent_slot, rope_slot = slots
    latent_ptr, rope_ptr, _scale_ptr, strides, rope_strides, _scale_strides = source
    LATENT: gl.constexpr = LAYOUTS[1][COPY]
    at = gl.arange(0, latent_slot.shape[0], gl.SliceLayout(1, LATENT)) + first
    column = gl.arange(0, latent_slot.shape[1], gl.SliceLayout(0, LATENT))
    index, ok = listed(list_, at, count, rows)
    pointers = row_pointers(latent_ptr, index, ok, strides, HOW[1])[:, None] + column[None, :]
    async_copy.global_load_to_shared(latent_slot, pointers, mask=ok[:, None], other=0.0)
    if HOW[2] > 0:
        ROPE: gl.constexpr = LAYOUTS[2][COPY]
        place = gl.arange(0, rope_slot.shape[0], gl.SliceLayout(1, ROPE))
        column = gl.arange(0, ROPE_WIDTH, gl.SliceLayout(0, ROPE))
        index, ok = listed(list_, place + first, count, rows)
        pointers = row_pointers(rope_ptr, index, ok, rope_strides, HOW[1])[:, None]
        pointers = pointers + swizzled_source(place, column, GROUP)
        async_copy.global_load_to_shared(rope_slot, pointers, mask=ok[:, None], other=0.0)
    async_copy.commit_group()


@gluon.jit
def fetch_rows(
    slot, ptr, strides, list_, first, count, rows, LAYOUT: gl.constexpr, SWIZZLE: gl.constexpr,
    PAGE: gl.constexpr,
):  # fmt: skip
    """The rows of places first, first + 1, … as stored, in registers, as the slot wants them."""
    place = gl.arange(0, slot.shape[0], gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, slot.shape[1], gl.SliceLayout(0, LAYOUT))
    if SWIZZLE:
        source = swizzled_source(place, column, GROUP)
    else:
        source = column[None, :]
    index, ok = listed(list_, place + first, count, rows)
    row = row_pointers(ptr, index, ok, strides, PAGE)[:, None]
    return gl.load(row + source, mask=ok[:, None], other=0.0)


@gluon.jit
def dequantize_rows(
    slot, values, scale_ptr, strides, list_, first, count, rows, FIRST: gl.constexpr,
    SWIZZLE: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Store fetched rows, columns FIRST … of them, as bf16(fp32(value) * scale).

    A lane's 8 columns share a scale, so scales are loaded one per group of 8.
    """
    ROWS: gl.constexpr = slot.shape[0]
    GROUPS: gl.constexpr = slot.shape[1] // GROUP
    if scale_ptr is not None and values.dtype.primitive_bitwidth == 8:
        grouped = gl.reshape(values, [ROWS, GROUPS, GROUP])
        SCALES: gl.constexpr = gl.SliceLayout(2, grouped.type.layout)
        place = gl.arange(0, ROWS, gl.SliceLayout(1, SCALES))
        group = gl.arange(0, GROUPS, gl.SliceLayout(0, SCALES)) + opaque_zero()
        if SWIZZLE:
            source = swizzled_pieces(place, group)
        else:
            source = group[None, :]
        index, ok = listed(list_, place + first, count, rows)
        row = (scale_ptr + row_offset(index, ok, strides, HOW[1]))[:, None]
        block = (source * GROUP + FIRST) // HOW[3]
        scales = gl.load(row + block, mask=ok[:, None], other=0.0)
        wide = gl.reshape(grouped.to(gl.float32) * scales[:, :, None], [ROWS, GROUPS * GROUP])
    else:
        wide = values  # FP8 values without scales are 16-bit values, exactly
    slot.store(wide.to(slot.dtype))


@gluon.jit
def fetch_block(slots, source, list_, first, count, rows, LAYOUTS: gl.constexpr, HOW: gl.constexpr):
    """Both parts of the rows that must be dequantized."""
    latent_ptr, rope_ptr, _scale_ptr, strides, rope_strides, _scale_strides = source
    latent = fetch_rows(
        slots[0], latent_ptr, strides, list_, first, count, rows, LAYOUTS[1][COPY], False, HOW[1]
    )
    rope = latent
    if HOW[2] > 0:
        rope = fetch_rows(
            slots[1], rope_ptr, rope_strides, list_, first, count, rows, LAYOUTS[2][COPY], True,
            HOW[1],
        )  # fmt: skip
    return latent, rope


@gluon.jit
def dequantize_block(slots, fetched, source, list_, first, count, rows, HOW: gl.constexpr):
    """Both parts of fetched rows to a slot."""
    scale_ptr = source[2]
    strides = source[5]
    dequantize_rows(
        slots[0], fetched[0], scale_ptr, strides, list_, first, count, rows, 0, False, HOW,
    )  # fmt: skip
    if HOW[2] > 0:
        dequantize_rows(
            slots[1], fetched[1], scale_ptr, strides, list_, first, count, rows, 512, True,
            HOW,
        )  # fmt: skip


@gluon.jit
def Q_frags(q_ptr, stride, heads, DTYPE: gl.constexpr, BM: gl.constexpr, FRAGS: gl.constexpr,
            MMA: gl.constexpr):  # fmt: skip
    """All fragments of the token's queries, in registers; heads past the last are zeros."""
    PIECE: gl.constexpr = 128 // q_ptr.dtype.element_ty.primitive_bitwidth
    row = gl.arange(0, BM, gl.SliceLayout(1, MMA[Q_OPERAND]))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, MMA[Q_OPERAND]))
    pointers = (q_ptr + row.to(gl.int64) * stride * PIECE)[:, None] + column[None, :]
    frags = ()
    for c in gl.static_range(FRAGS):
        frag = gl.load(pointers + c * COLUMNS, mask=(row < heads)[:, None], other=0.0)
        frags = frags + (frag.to(DTYPE),)  # noqa: RUF005
    return frags


@gluon.jit
def scores(q_frags, slots, LAYOUTS: gl.constexpr, HOW: gl.constexpr):
    """Score tiles [BM, 32 rows] of a slot."""
    latent_slot, rope_slot = slots
    MMA: gl.constexpr = LAYOUTS[0]
    BM: gl.constexpr = q_frags[0].shape[0]
    TILES: gl.constexpr = latent_slot.shape[0] // STRIP
    FRAGS: gl.constexpr = latent_slot.shape[1] // COLUMNS
    rope = rope_slot
    if HOW[2] > 0:
        rope = reinterpret(rope_slot, rope_slot.dtype, [TILES, STRIP, ROPE_WIDTH], LAYOUTS[2][READ])
    tiles = ()
    for i in gl.static_range(TILES):
        att = gl.zeros([BM, STRIP], gl.float32, MMA[SCORES])
        for c in gl.static_range(FRAGS):
            part = latent_slot.slice(STRIP * i, STRIP, 0).slice(COLUMNS * c, COLUMNS, 1)
            att = mma_QK(att, part.permute((1, 0)).load(MMA[K_OPERAND]), q_frags[c])
        if HOW[2] > 0:
            part = rope.index(i).permute((1, 0)).load(MMA[K_OPERAND])
            att = mma_QK(att, part, q_frags[FRAGS])
        tiles = tiles + (att,)  # noqa: RUF005
    return tiles


@gluon.jit
def mask_tiles(tiles, list_, first, count, rows, TILES: gl.constexpr):
    """-inf where an index does not count."""
    SL: gl.constexpr = tiles[0].type.layout
    at = gl.arange(0, STRIP, gl.SliceLayout(0, SL)) + first
    done = ()
    for i in gl.static_range(TILES):
        _index, ok = listed(list_, at + STRIP * i, count, rows)
        done = done + (gl.where(ok[None, :], tiles[i], MINUS_INF),)  # noqa: RUF005
    return done


COUNTS = ["rows", "topk", "heads", "head_blocks", "factor"]
# Vectors of 4-byte elements, read one by one: a slice of a tensor is as good as all.
VECTORS = ["lse_ptr", "logits_ptr", "sink_ptr", "indices_ptr", "lengths_ptr", "scale_ptr"]


@gluon.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=VECTORS)
def sparse_kernel(  # noqa: PLR0913
    q_ptr, latent_ptr, rope_ptr, scale_ptr, indices_ptr, lengths_ptr, out_ptr, lse_ptr, logits_ptr,
    sink_ptr,
    factor, rows, topk, heads, head_blocks,
    q_stride_t, q_stride_h, latent_stride_page, latent_stride_t, rope_stride_page, rope_stride_t,
    scale_stride_page, scale_stride_t, indices_stride, out_stride_t, out_stride_h,
    lse_stride_t, lse_stride_h, logits_stride_t, logits_stride_h,
    BLOCK: gl.constexpr, DTYPE: gl.constexpr, WIDENED: gl.constexpr, PAGE: gl.constexpr,
    SCALE_BLOCK: gl.constexpr, SIGN: gl.constexpr, LAYOUTS: gl.constexpr,
):  # fmt: skip
    """BLOCK: BM, B_TOPK, slots, rope columns. DTYPE: what is multiplied. PAGE: rows per page, 0 if
    pages lie end to end. SCALE_BLOCK: columns per scale. LAYOUTS: products, latent rows, rope.
    Strides of rows, q and out count pieces of 16 bytes, those of scales elements."""
    BM: gl.constexpr = BLOCK[0]
    KV: gl.constexpr = BLOCK[1]
    SLOTS: gl.constexpr = BLOCK[2]
    TILES: gl.constexpr = KV // STRIP
    FRAGS: gl.constexpr = (512 + BLOCK[3]) // COLUMNS
    MMA: gl.constexpr = LAYOUTS[0]
    HOW: gl.constexpr = (WIDENED, PAGE, BLOCK[3], SCALE_BLOCK)
    Q_PIECE: gl.constexpr = 128 // q_ptr.dtype.element_ty.primitive_bitwidth
    OUT_PIECE: gl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth
    program = gl.program_id(0)
    token = (program // head_blocks).to(gl.int64)
    first_head = program % head_blocks * BM
    head64 = first_head.to(gl.int64)
    here = heads - first_head
    count = topk
    if lengths_ptr is not None:
        count = gl.minimum(gl.load(lengths_ptr + token), topk)
    list_ = indices_ptr + token * indices_stride
    latent_ring = gl.allocate_shared_memory(DTYPE, [SLOTS, KV, 512], LAYOUTS[1][WRITE])
    rope_ring = latent_ring
    if BLOCK[3] > 0:
        rope_ring = gl.allocate_shared_memory(DTYPE, [SLOTS, KV, ROPE_WIDTH], LAYOUTS[2][WRITE])
    source = (
        latent_ptr, rope_ptr, scale_ptr, (latent_stride_page, latent_stride_t),
        (rope_stride_page, rope_stride_t), (scale_stride_page, scale_stride_t),
    )  # fmt: skip
    slots = (latent_ring.index(0), rope_ring.index(0))
    start = first_head * 0
    if WIDENED:
        fetched = fetch_block(slots, source, list_, start, count, rows, LAYOUTS, HOW)
        dequantize_block(slots, fetched, source, list_, start, count, rows, HOW)
    else:
        copy_block(slots, source, list_, start, count, rows, LAYOUTS, HOW)
    at = q_ptr + (token * q_stride_t + head64 * q_stride_h) * Q_PIECE
    q_frags = Q_frags(at, q_stride_h, here, DTYPE, BM, FRAGS, MMA)

    O = gl.zeros([BM, 512], gl.float32, MMA[OUTPUT])
    shift = gl.full([BM], float("-inf"), gl.float32, gl.SliceLayout(1, MMA[SCORES]))
    row_sum = gl.zeros([BM], gl.float32, gl.SliceLayout(1, MMA[SCORES]))
    for j in range(0, (gl.maximum(count, 0) + KV - 1) // KV):
        ahead = (j + 1) * KV
        slot = (j + 1) % SLOTS
        later = (latent_ring.index(slot), rope_ring.index(slot))
        if not WIDENED:
            copy_block(later, source, list_, ahead, count, rows, LAYOUTS, HOW)
            async_copy.wait_group(1)
        slots = (latent_ring.index(j % SLOTS), rope_ring.index(j % SLOTS))
        tiles = scores(q_frags, slots, LAYOUTS, HOW)
        if SIGN != 1:
            tiles = signed_tiles(tiles, TILES, SIGN)
        tiles = mask_tiles(tiles, list_, j * KV, count, rows, TILES)
        weights, shift, row_sum, rescale = softmax(tiles, shift, row_sum, factor, TILES, 0.0)
        O = O * gl.convert_layout(rescale, gl.SliceLayout(1, MMA[OUTPUT]))[:, None]
        for i in gl.static_range(TILES):
            p = gl.convert_layout(weights[i].to(DTYPE), MMA[P_OPERAND])
            O = mma_PV(O, slots[0].slice(STRIP * i, STRIP, 0).load(MMA[V_OPERAND]), p)
        if WIDENED:
            fetched = fetch_block(later, source, list_, ahead, count, rows, LAYOUTS, HOW)
            dequantize_block(later, fetched, source, list_, ahead, count, rows, HOW)
    if not WIDENED:
        async_copy.wait_group(0)

    head = gl.minimum(first_head + gl.arange(0, BM, shift.type.layout), heads - 1)
    at = out_ptr + (token * out_stride_t + head64 * out_stride_h) * OUT_PIECE
    lse = (lse_ptr, token * lse_stride_t + head64 * lse_stride_h, lse_stride_h)
    finish((O,), shift, row_sum, (at, out_stride_h), lse, sink_ptr, head, here, 1)
    if logits_ptr is not None:
        row = gl.arange(0, BM, shift.type.layout)
        at = logits_ptr + (token * logits_stride_t + head64 * logits_stride_h)
        gl.store(at + row.to(gl.int64) * logits_stride_h, shift * LN_2, mask=row < here)
