# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""Token-sparse MLA prefill in latent form on CDNA4: bf16, fp16 and FP8 rows.

A block works on one token and BM of its heads and gathers the rows that its indices name, B_TOPK at
a time. K is the whole row, V its first 512 columns, from the same LDS.

| waves | does |
|---|---|
| all 8 | gather the next rows; scores as 4 x 2 waves, softmax, output as 2 x 4 waves |

There are no barrier objects. Rows that are stored as they are multiplied are copied to LDS in
groups, one per block of rows; rows that must be dequantized pass through registers. Block j of the
loop, in this order:

| | copied rows | dequantized rows |
|---|---|---|
| 1 | load the indices of block j + 2 | the same |
| 2 | start the copies of block j + 1 | start loading block j + 1 and its scales |
| 3 | wait until only those are in flight | |
| 4 | scores, softmax, output of block j | the same |
| 5 | | dequantize block j + 1, store it to the other slot |
| 6 | store the indices of block j + 2 | the same |

Waits count what was issued, so a wait for anything issued after copies is one for the copies too:
indices come before them, two blocks ahead, and nothing between is masked by a branch, which the
compiler could not count across. The compiler puts workgroup barriers between stores and loads of a
slot.

| LDS | bytes |
|---|---|
| latent ring, 2 slots, rows 1040 B apart | 2 x 64 x 1040 = 133120 |
| rope ring, 2 slots | 2 x 64 x 128 = 16384 |
| index ring, 2 slots | 2 x 64 x 4 = 512 |
| P from the waves of the scores to those of the output, row sums | the compiler's, 4096 |

An index that does not count (negative, past the rows, past topk_lengths) copies some row, which is
cleared in LDS, and scores -inf.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4
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
from openmla.kernels.gluon.compat import reinterpret, thread_barrier
from openmla.kernels.gluon.scores import LN_2, MINUS_INF

COLUMNS = gl.constexpr(64)  # of a fragment of Q and K
STRIP = gl.constexpr(32)  # rows whose scores are one tile
ROPE_WIDTH = gl.constexpr(64)
GROUP = gl.constexpr(8)  # columns that one lane copies: 16 bytes of LDS
# Of the 64 indices of a block: one per lane, the same in all waves; in LDS, one after another.
LANES = gl.constexpr(gl.BlockedLayout([1], [64], [8], [0]))
INDICES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# Of 8 latent rows: a wave has one.
ROW_PER_WAVE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 64], [8, 1], [1, 0]))


@gluon.jit
def listed(block, first, KV: gl.constexpr):
    """Indices of places first, first + 1, … of the token's list, one per lane of a wave; 0 past its
    end, which is not read.

    Nothing is done with them before they are stored to LDS: the compiler would do it, and wait for
    them, at once.
    """
    list_, count, _rows = block
    at = gl.arange(0, KV, LANES) + first
    return cdna4.buffer_load(list_, at, mask=at < count)


@gluon.jit
def counting(index, at, block):
    """Whether the index at place `at` of the list counts."""
    _list, count, rows = block
    return (at < count) & (index >= 0) & (index < rows)


@gluon.jit
def row_offset(index, block, strides, PAGE: gl.constexpr):
    """Strides from the first row to row `index`, or to some row if there is none of that number; 64
    bits, a cache may be of any size."""
    stride_page, stride_t = strides
    safe = gl.minimum(gl.maximum(index, 0), block[2] - 1)
    if PAGE > 0:
        page = (safe // PAGE).to(gl.int64) * stride_page
        return page + (safe % PAGE).to(gl.int64) * stride_t
    else:
        return safe.to(gl.int64) * stride_t


@gluon.jit
def row_pointers(slot, ptr, strides, indices, block, PART: gl.constexpr, HOW: gl.constexpr):
    """Where the values of a slot come from, as PART (its layouts, whether it is swizzled) copies
    them. Strides count pieces of 16 bytes."""
    PIECE: gl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    LAYOUT: gl.constexpr = PART[0][COPY]
    index = indices.load(gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, slot.shape[1], gl.SliceLayout(0, LAYOUT))
    if PART[1]:
        place = gl.arange(0, slot.shape[0], gl.SliceLayout(1, LAYOUT))
        source = swizzled_source(place, column, GROUP)
    else:
        source = column[None, :]
    return (ptr + row_offset(index, block, strides, HOW[1]) * PIECE)[:, None] + source


@gluon.jit
def copy_block(slots, source, indices, block, LAYOUTS: gl.constexpr, HOW: gl.constexpr):
    """Start copying the rows of a block to a slot, as one group.

    No copy is masked: the compiler would branch around it, and where it cannot count the copies in
    flight it waits for all of them.
    """
    latent_ptr, rope_ptr, _scale_ptr, strides, rope_strides, _scale_strides = source
    LATENT: gl.constexpr = (LAYOUTS[1], False)
    rows = row_pointers(slots[0], latent_ptr, strides, indices, block, LATENT, HOW)
    async_copy.global_load_to_shared(slots[0], rows)
    if HOW[2] > 0:
        ROPE: gl.constexpr = (LAYOUTS[2], True)
        rows = row_pointers(slots[1], rope_ptr, rope_strides, indices, block, ROPE, HOW)
        async_copy.global_load_to_shared(slots[1], rows)
    async_copy.commit_group()


@gluon.jit
def fetch_scales(values, scales, indices, block, FIRST: gl.constexpr, SWIZZLE: gl.constexpr,
                 HOW: gl.constexpr):  # fmt: skip
    """Scales of fetched rows, columns FIRST … of them. A lane's 8 columns share one, so there is
    one per group of 8."""
    ROWS: gl.constexpr = values.shape[0]
    GROUPS: gl.constexpr = values.shape[1] // GROUP
    grouped = gl.reshape(values, [ROWS, GROUPS, GROUP])
    SCALES: gl.constexpr = gl.SliceLayout(2, grouped.type.layout)
    group = gl.arange(0, GROUPS, gl.SliceLayout(0, SCALES)) + opaque_zero()
    if SWIZZLE:
        source = swizzled_pieces(gl.arange(0, ROWS, gl.SliceLayout(1, SCALES)), group)
    else:
        source = group[None, :]
    index = indices.load(gl.SliceLayout(1, SCALES))
    row = (scales[0] + row_offset(index, block, scales[1], HOW[1]))[:, None]
    return gl.load(row + (source * GROUP + FIRST) // HOW[3])


@gluon.jit
def fetch_block(slots, source, indices, block, LAYOUTS: gl.constexpr, HOW: gl.constexpr):
    """Start loading the rows of a block, as stored, and their scales: to registers."""
    latent_ptr, rope_ptr, scale_ptr, strides, rope_strides, scale_strides = source
    LATENT: gl.constexpr = (LAYOUTS[1], False)
    latent = gl.load(row_pointers(slots[0], latent_ptr, strides, indices, block, LATENT, HOW))
    rope = latent
    if HOW[2] > 0:
        ROPE: gl.constexpr = (LAYOUTS[2], True)
        rope = gl.load(row_pointers(slots[1], rope_ptr, rope_strides, indices, block, ROPE, HOW))
    latent_scales = latent
    rope_scales = rope
    if scale_ptr is not None:
        latent_scales = fetch_scales(
            latent, scale_ptr, scale_strides, indices, block, 0, False, HOW
        )
        if HOW[2] > 0 and rope.dtype.primitive_bitwidth == 8:
            rope_scales = fetch_scales(
                rope, scale_ptr, scale_strides, indices, block, 512, True, HOW
            )
    return latent, rope, latent_scales, rope_scales


@gluon.jit
def dequantize_rows(slot, values, scales, SCALED: gl.constexpr):
    """Store fetched rows as bf16(fp32(value) * scale)."""
    if SCALED and values.dtype.primitive_bitwidth == 8:
        GROUPS: gl.constexpr = slot.shape[1] // GROUP
        grouped = gl.reshape(values, [slot.shape[0], GROUPS, GROUP])
        wide = gl.reshape(grouped.to(gl.float32) * scales[:, :, None], slot.shape)
    else:
        wide = values  # FP8 values without scales are 16-bit values, exactly
    slot.store(wide.to(slot.dtype))


@gluon.jit
def dequantize_block(slots, fetched, SCALED: gl.constexpr, HOW: gl.constexpr):
    """Both parts of fetched rows to a slot."""
    dequantize_rows(slots[0], fetched[0], fetched[2], SCALED)
    if HOW[2] > 0:
        dequantize_rows(slots[1], fetched[1], fetched[3], SCALED)


@gluon.jit
def clear_rows(slot, indices, first, block):
    """Zeros instead of rows that do not count: their weights are 0, but 0 times NaN is not."""
    at = gl.arange(0, 8, gl.SliceLayout(1, ROW_PER_WAVE)) + first
    for i in gl.static_range(slot.shape[0] // 8):
        part = slot.slice(8 * i, 8, 0)
        index = indices.slice(8 * i, 8, 0).load(at.type.layout)
        ok = counting(index, at + 8 * i, block)
        part.store(gl.where(ok[:, None], part.load(ROW_PER_WAVE), 0.0))
    thread_barrier()


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
def mask_tiles(tiles, indices, first, block, TILES: gl.constexpr):
    """-inf where an index does not count."""
    SL: gl.constexpr = tiles[0].type.layout
    at = gl.arange(0, STRIP, gl.SliceLayout(0, SL)) + first
    done = ()
    for i in gl.static_range(TILES):
        index = indices.slice(STRIP * i, STRIP, 0).load(at.type.layout)
        ok = counting(index, at + STRIP * i, block)
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
    SCALED: gl.constexpr = scale_ptr is not None
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
    block = (indices_ptr + token * indices_stride, count, rows)
    latent_ring = gl.allocate_shared_memory(DTYPE, [SLOTS, KV, 512], LAYOUTS[1][WRITE])
    rope_ring = latent_ring
    if BLOCK[3] > 0:
        rope_ring = gl.allocate_shared_memory(DTYPE, [SLOTS, KV, ROPE_WIDTH], LAYOUTS[2][WRITE])
    source = (
        latent_ptr, rope_ptr, scale_ptr, (latent_stride_page, latent_stride_t),
        (rope_stride_page, rope_stride_t), (scale_stride_page, scale_stride_t),
    )  # fmt: skip
    index_ring = gl.allocate_shared_memory(gl.int32, [2, KV], INDICES)
    slots = (latent_ring.index(0), rope_ring.index(0))
    index_ring.index(0).store(listed(block, 0, KV))
    index_ring.index(1).store(listed(block, KV, KV))
    if WIDENED:
        fetched = fetch_block(slots, source, index_ring.index(0), block, LAYOUTS, HOW)
        dequantize_block(slots, fetched, SCALED, HOW)
    else:
        copy_block(slots, source, index_ring.index(0), block, LAYOUTS, HOW)
    at = q_ptr + (token * q_stride_t + head64 * q_stride_h) * Q_PIECE
    q_frags = Q_frags(at, q_stride_h, here, DTYPE, BM, FRAGS, MMA)

    O = gl.zeros([BM, 512], gl.float32, MMA[OUTPUT])
    shift = gl.full([BM], float("-inf"), gl.float32, gl.SliceLayout(1, MMA[SCORES]))
    row_sum = gl.zeros([BM], gl.float32, gl.SliceLayout(1, MMA[SCORES]))
    for j in range(0, (gl.maximum(count, 0) + KV - 1) // KV):
        coming = listed(block, (j + 2) * KV, KV)
        slot = (j + 1) % SLOTS
        later = (latent_ring.index(slot), rope_ring.index(slot))
        indices = index_ring.index((j + 1) % 2)
        if WIDENED:
            fetched = fetch_block(later, source, indices, block, LAYOUTS, HOW)
        else:
            copy_block(later, source, indices, block, LAYOUTS, HOW)
            async_copy.wait_group(1)
        slots = (latent_ring.index(j % SLOTS), rope_ring.index(j % SLOTS))
        indices = index_ring.index(j % 2)
        all_count = counting(indices.load(LANES), gl.arange(0, KV, LANES) + j * KV, block)
        if gl.min(all_count.to(gl.int32), 0) == 0:
            clear_rows(slots[0], indices, j * KV, block)
        tiles = scores(q_frags, slots, LAYOUTS, HOW)
        if SIGN != 1:
            tiles = signed_tiles(tiles, TILES, SIGN)
        tiles = mask_tiles(tiles, indices, j * KV, block, TILES)
        weights, shift, row_sum, rescale = softmax(tiles, shift, row_sum, factor, TILES, 0.0)
        O = O * gl.convert_layout(rescale, gl.SliceLayout(1, MMA[OUTPUT]))[:, None]
        for i in gl.static_range(TILES):
            p = gl.convert_layout(weights[i].to(DTYPE), MMA[P_OPERAND])
            O = mma_PV(O, slots[0].slice(STRIP * i, STRIP, 0).load(MMA[V_OPERAND]), p)
        if WIDENED:
            dequantize_block(later, fetched, SCALED, HOW)
        indices.store(coming)
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
