# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""MLA prefill in latent form on CDNA4, over lists of rows or over pages: bf16, fp16 and FP8 rows.

A block works on BM rows of scores, each one head of one token, and walks the rows of K that they
see, KV at a time: those that the token's list names (BM heads of one token), or those of the
sequence's pages (heads fastest, so that 20 or 96 heads leave no row idle). K is the whole row, V
its first 512 columns, from the same LDS.

| waves | does |
|---|---|
| all 8 | gather the next rows; scores as 4 x 2 waves, softmax, output as 2 x 4 waves |

There are no barrier objects. Rows that are stored as they are multiplied are copied to LDS in
groups, one per block of rows; rows that must be dequantized pass through registers. Block j of the
loop, in this order (a number is the index of a row, or the page it is in):

| | copied rows | dequantized rows |
|---|---|---|
| 1 | load the numbers of block j + 2 | the same |
| 2 | start the copies of block j + 1 | start loading block j + 1 and its scales |
| 3 | wait until only those are in flight | |
| 4 | scores, softmax, output of block j | the same |
| 5 | | dequantize block j + 1, store it to the other slot |
| 6 | store the numbers of block j + 2 | the same |

Waits count what was issued, so a wait for anything issued after copies is one for the copies too:
numbers come before them, two blocks ahead, and nothing between is masked by a branch, which the
compiler could not count across. The compiler puts workgroup barriers between stores and loads of a
slot.

| LDS | bytes |
|---|---|
| latent ring, 2 slots, rows 1040 B apart | 2 x 64 x 1040 = 133120 |
| rope ring, 2 slots | 2 x 64 x 128 = 16384 |
| ring of numbers, 2 slots | 2 x 64 x 4 = 512 |
| P from the waves of the scores to those of the output, row sums | the compiler's, 4096 |

A row that does not count (its index is negative, past the rows or past topk_lengths; its key is
past the sequence) is some other row when copied, is cleared in LDS, and scores -inf.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna4 import async_copy

from openmla.kernels.cdna4.copies import READ, WRITE
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
from openmla.kernels.cdna4.softmax import finish, opaque_zero, row_place, signed_tiles, softmax
from openmla.kernels.cdna4.sparse.rows import (
    NUMBERS,
    all_count,
    clear_rows,
    copy_block,
    counting,
    dequantize_block,
    fetch_block,
    numbers_of,
)
from openmla.kernels.cdna4.tiles import first_row, sequence_of, span
from openmla.kernels.gluon.compat import reinterpret
from openmla.kernels.gluon.scores import LN_2, MINUS_INF

COLUMNS = gl.constexpr(64)  # of a fragment of Q and K
STRIP = gl.constexpr(32)  # rows whose scores are one tile
ROPE_WIDTH = gl.constexpr(64)


@gluon.jit
def listed_work(program, work, heads, BM: gl.constexpr):
    """What program `program` works on: the number of its first row of scores (all rows of all
    tokens are numbered, heads fastest), how many there are from there on, the (list, places) that
    they see, and how many keys each sees if causal, which does not apply."""
    indices_ptr, stride, lengths_ptr, topk, _cu_ptr, _batch, _total_q, blocks = work
    token = program // blocks
    first_head = program % blocks * BM
    count = topk
    if lengths_ptr is not None:
        count = gl.minimum(gl.load(lengths_ptr + token), topk)
    list_ = indices_ptr + token.to(gl.int64) * stride
    return token, first_head, heads - first_head, list_, gl.maximum(count, 0), 0


@gluon.jit
def paged_work(program, work, heads, BM: gl.constexpr):
    """The same of a sequence: the table of its pages, its keys, and how many of them the first
    token sees (may be negative). Longer causal tiles run first."""
    table_ptr, stride, lengths_ptr, most, cu_ptr, batch, total_q, tiles = work
    tile = tiles - 1 - program
    sequence = sequence_of(tile, cu_ptr, batch, total_q, heads, BM)
    start, tokens = span(sequence, cu_ptr, batch, total_q, total_q)
    first = first_row(tile, sequence, cu_ptr, total_q, heads, BM)
    keys = gl.load(lengths_ptr + gl.minimum(sequence, batch - 1), mask=sequence < batch, other=0)
    keys = gl.maximum(gl.minimum(keys, most), 0)
    table = table_ptr + sequence.to(gl.int64) * stride
    return start, first, tokens * heads - first, table, keys, keys - tokens + 1


@gluon.jit
def blocks_seen(first, here, keys, seen, heads, BM: gl.constexpr, KV: gl.constexpr,
                CAUSAL: gl.constexpr):  # fmt: skip
    """(blocks of KV rows that the tile visits, those of them that all its rows see whole)."""
    stop = keys
    whole = keys
    if CAUSAL:
        stop = gl.minimum(keys, seen + (first + gl.minimum(here, BM) - 1) // heads)
        whole = gl.minimum(keys, seen + first // heads)
    blocks = (gl.maximum(stop, 0) + KV - 1) // KV
    return blocks, gl.minimum(gl.maximum(whole, 0) // KV, blocks)


@gluon.jit
def Q_frags(q_ptr, strides, places, here, DTYPE: gl.constexpr, BM: gl.constexpr,
            FRAGS: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """All fragments of the tile's queries, in registers; rows past the last are zeros."""
    PIECE: gl.constexpr = 128 // q_ptr.dtype.element_ty.primitive_bitwidth
    row = gl.arange(0, BM, gl.SliceLayout(1, MMA[Q_OPERAND]))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, MMA[Q_OPERAND]))
    pointers = (q_ptr + row_place(row, places, strides) * PIECE)[:, None] + column[None, :]
    frags = ()
    for c in gl.static_range(FRAGS):
        frag = gl.load(pointers + c * COLUMNS, mask=(row < here)[:, None], other=0.0)
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
def mask_listed(tiles, numbers, first, source, TILES: gl.constexpr, HOW: gl.constexpr):
    """-inf where an index does not count."""
    SL: gl.constexpr = tiles[0].type.layout
    at = gl.arange(0, STRIP, gl.SliceLayout(0, SL)) + first
    done = ()
    for i in gl.static_range(TILES):
        number = numbers.slice(STRIP * i, STRIP, 0).load(at.type.layout)
        ok = counting(number, at + STRIP * i, source, HOW)
        done = done + (gl.where(ok[None, :], tiles[i], MINUS_INF),)  # noqa: RUF005
    return done


@gluon.jit
def mask_paged(tiles, first, keys, seen, row, heads, TILES: gl.constexpr, CAUSAL: gl.constexpr):
    """-inf where a row of scores, the tile's first being number `row` of its sequence, does not see
    a key."""
    SL: gl.constexpr = tiles[0].type.layout
    zero = opaque_zero()
    at = gl.arange(0, STRIP, gl.SliceLayout(0, SL)) + (first + zero)
    last = gl.arange(0, tiles[0].shape[0], gl.SliceLayout(1, SL)) + (row + zero)
    if CAUSAL:
        last = gl.minimum(last // heads + seen, keys)
    else:
        last = last * 0 + keys
    done = ()
    for i in gl.static_range(TILES):
        here = (at + STRIP * i)[None, :] < last[:, None]
        done = done + (gl.where(here, tiles[i], MINUS_INF),)  # noqa: RUF005
    return done


COUNTS = ["rows", "topk", "heads", "blocks", "batch", "total_q", "factor"]
# Vectors of 4-byte elements, read one by one: a slice of a tensor is as good as all.
VECTORS = ["lse_ptr", "logits_ptr", "sink_ptr", "indices_ptr", "lengths_ptr", "cu_ptr", "scale_ptr"]


@gluon.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=VECTORS)
def sparse_kernel(  # noqa: PLR0913
    q_ptr, latent_ptr, rope_ptr, scale_ptr, indices_ptr, lengths_ptr, cu_ptr, out_ptr, lse_ptr,
    logits_ptr, sink_ptr,
    factor, rows, topk, heads, blocks, batch, total_q,
    q_stride_t, q_stride_h, latent_stride_page, latent_stride_t, rope_stride_page, rope_stride_t,
    scale_stride_page, scale_stride_t, indices_stride, out_stride_t, out_stride_h,
    lse_stride_t, lse_stride_h, logits_stride_t, logits_stride_h,
    BLOCK: gl.constexpr, DTYPE: gl.constexpr, WIDENED: gl.constexpr, PAGED: gl.constexpr,
    CAUSAL: gl.constexpr, PAGE: gl.constexpr, SCALE_BLOCK: gl.constexpr, SIGN: gl.constexpr,
    LAYOUTS: gl.constexpr,
):  # fmt: skip
    """BLOCK: BM, KV, slots, rope columns. DTYPE: what is multiplied. PAGED: `indices` are a table
    of pages, `topk` the keys it has room for, `lengths` those of sequences, `blocks` all tiles; or
    else lists, their length, how much of it counts (or None), and blocks per token. PAGE: rows per
    page, 0 if pages lie end to end. SCALE_BLOCK: columns per scale, 0 without scales. LAYOUTS:
    products, latent rows, rope. Strides of rows, q and out count pieces of 16 bytes, those of
    scales elements."""
    BM: gl.constexpr = BLOCK[0]
    KV: gl.constexpr = BLOCK[1]
    SLOTS: gl.constexpr = BLOCK[2]
    TILES: gl.constexpr = KV // STRIP
    FRAGS: gl.constexpr = (512 + BLOCK[3]) // COLUMNS
    MMA: gl.constexpr = LAYOUTS[0]
    HOW: gl.constexpr = (PAGED, PAGE, BLOCK[3], SCALE_BLOCK)
    work = (indices_ptr, indices_stride, lengths_ptr, topk, cu_ptr, batch, total_q, blocks)
    if PAGED:
        token, first, here, list_, keys, seen = paged_work(gl.program_id(0), work, heads, BM)
        if here <= 0:
            return
    else:
        token, first, here, list_, keys, seen = listed_work(gl.program_id(0), work, heads, BM)
    visits, whole = blocks_seen(first, here, keys, seen, heads, BM, KV, CAUSAL)
    source = (list_, gl.minimum(keys, visits * KV), rows)
    latent_ring = gl.allocate_shared_memory(DTYPE, [SLOTS, KV, 512], LAYOUTS[1][WRITE])
    rope_ring = latent_ring
    if BLOCK[3] > 0:
        rope_ring = gl.allocate_shared_memory(DTYPE, [SLOTS, KV, ROPE_WIDTH], LAYOUTS[2][WRITE])
    number_ring = gl.allocate_shared_memory(gl.int32, [2, KV], NUMBERS)
    parts = (
        (latent_ptr, (latent_stride_page, latent_stride_t)),
        (rope_ptr, (rope_stride_page, rope_stride_t)),
        (scale_ptr, (scale_stride_page, scale_stride_t)),
    )
    slots = (latent_ring.index(0), rope_ring.index(0))
    number_ring.index(0).store(numbers_of(source, 0, KV, HOW))
    number_ring.index(1).store(numbers_of(source, KV, KV, HOW))
    if WIDENED:
        fetched = fetch_block(slots, parts, number_ring.index(0), 0, source, LAYOUTS, HOW)
        dequantize_block(slots, fetched, HOW)
    else:
        copy_block(slots, parts, number_ring.index(0), 0, source, LAYOUTS, HOW)
    places = (token * heads + first, heads)
    q_frags = Q_frags(q_ptr, (q_stride_t, q_stride_h), places, here, DTYPE, BM, FRAGS, MMA)

    O = gl.zeros([BM, 512], gl.float32, MMA[OUTPUT])
    shift = gl.full([BM], float("-inf"), gl.float32, gl.SliceLayout(1, MMA[SCORES]))
    row_sum = gl.zeros([BM], gl.float32, gl.SliceLayout(1, MMA[SCORES]))
    for j in range(0, visits):
        coming = numbers_of(source, (j + 2) * KV, KV, HOW)
        slot = (j + 1) % SLOTS
        later = (latent_ring.index(slot), rope_ring.index(slot))
        numbers = number_ring.index((j + 1) % 2)
        if WIDENED:
            fetched = fetch_block(later, parts, numbers, (j + 1) * KV, source, LAYOUTS, HOW)
        else:
            copy_block(later, parts, numbers, (j + 1) * KV, source, LAYOUTS, HOW)
            async_copy.wait_group(1)
        slots = (latent_ring.index(j % SLOTS), rope_ring.index(j % SLOTS))
        numbers = number_ring.index(j % 2)
        if not all_count(numbers, j * KV, source, KV, HOW):
            clear_rows(slots[0], numbers, j * KV, source, HOW)
        tiles = scores(q_frags, slots, LAYOUTS, HOW)
        if SIGN != 1:
            tiles = signed_tiles(tiles, TILES, SIGN)
        if PAGED:
            if j >= whole:
                tiles = mask_paged(tiles, j * KV, keys, seen, first, heads, TILES, CAUSAL)
        else:
            tiles = mask_listed(tiles, numbers, j * KV, source, TILES, HOW)
        weights, shift, row_sum, rescale = softmax(tiles, shift, row_sum, factor, TILES, 0.0)
        O = O * gl.convert_layout(rescale, gl.SliceLayout(1, MMA[OUTPUT]))[:, None]
        for i in gl.static_range(TILES):
            p = gl.convert_layout(weights[i].to(DTYPE), MMA[P_OPERAND])
            O = mma_PV(O, slots[0].slice(STRIP * i, STRIP, 0).load(MMA[V_OPERAND]), p)
        if WIDENED:
            dequantize_block(later, fetched, HOW)
        numbers.store(coming)
    if not WIDENED:
        async_copy.wait_group(0)

    # Counted anew, so that nothing of it is kept in registers during the loop.
    first = first + opaque_zero()
    places = (token * heads + first, heads)
    row = gl.arange(0, BM, shift.type.layout)
    out = (out_ptr, (out_stride_t, out_stride_h))
    lse = (lse_ptr, (lse_stride_t, lse_stride_h))
    finish((O,), shift, row_sum, out, lse, sink_ptr, (first + row) % heads, here, places, 1)
    if logits_ptr is not None:
        at = row_place(row, places, (logits_stride_t, logits_stride_h))
        gl.store(logits_ptr + at, shift * LN_2, mask=row < here)
