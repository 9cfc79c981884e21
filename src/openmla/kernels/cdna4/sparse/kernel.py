# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""MLA prefill in latent form on CDNA4, over lists of rows or over pages: bf16, fp16 and FP8 rows.

A block works on BM rows of scores, each one head of one token, and walks the rows of K that they
see, KV at a time: those that the token's list names (BM heads of one token), or those of the
sequence's pages (heads fastest, so that 20 or 96 heads leave no row idle). K is the whole row, V
its columns without rope, from the same LDS.

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

| LDS, of rows of 512 columns | bytes |
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

from openmla.kernels.cdna4.mma_op import mma_PV, mma_QK
from openmla.kernels.cdna4.records import Places, TokenRows
from openmla.kernels.cdna4.softmax import (
    finish,
    opaque_zero,
    row_place,
    signed_tiles,
    softmax,
    write_sums,
)
from openmla.kernels.cdna4.sparse.records import (
    CacheParts,
    OnlineSoftmax,
    PagedRows,
    PageTables,
    RangePrograms,
    Rings,
    RowFormat,
    RowSource,
    RowsWork,
    Slot,
    TokenLists,
)
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
from openmla.kernels.cdna4.tiles import first_key, first_row, sequence_of, span
from openmla.kernels.gluon.compat import reinterpret
from openmla.kernels.gluon.ranges.records import Parts
from openmla.kernels.gluon.ranges.rule import ranges_of
from openmla.kernels.gluon.scores import LN_2, MINUS_INF

COLUMNS = gl.constexpr(64)  # of a fragment of Q and K
STRIP = gl.constexpr(32)  # rows whose scores are one tile
ROPE_WIDTH = gl.constexpr(64)


@gluon.jit
def listed_work(program, lists, heads, BM: gl.constexpr):
    """The RowsWork of program `program` over TokenLists: BM heads of a token."""
    token = program // lists.blocks
    first_head = program % lists.blocks * BM
    count = lists.topk
    if lists.lengths_ptr is not None:
        count = gl.minimum(gl.load(lists.lengths_ptr + token), lists.topk)
    list_ptr = lists.ptr + token.to(gl.int64) * lists.stride
    return RowsWork(
        token=token,
        first=first_head,
        here=heads - first_head,
        list_ptr=list_ptr,
        begin=0,
        keys=gl.maximum(count, 0),
        seen=None,
        window=None,
        origin=None,
        part_row=None,
    )


@gluon.jit
def paged_work(program, tables, heads, BM: gl.constexpr):
    """The RowsWork of program `program` over PageTables: BM rows of a sequence, with a range of its
    keys or with all of them. Longer causal tiles run first. With a window, keys are counted from
    the first that any row sees."""
    SPLIT: gl.constexpr = tables.ranges is not None
    cu_ptr = tables.cu_ptr
    batch = tables.batch
    total_q = tables.total_q
    if SPLIT:
        has_range = program < tables.ranges.programs
        tile = tables.tiles - 1 - (program - tables.ranges.programs)
        sequence = tables.ranges.first_sequence + program // tables.ranges.slots
        if not has_range:
            sequence = sequence_of(tile, cu_ptr, batch, total_q, heads, BM)
    else:
        tile = tables.tiles - 1 - program
        sequence = sequence_of(tile, cu_ptr, batch, total_q, heads, BM)
    start, tokens = span(sequence, cu_ptr, batch, total_q, total_q)
    first = first_row(tile, sequence, cu_ptr, total_q, heads, BM)
    length = tables.lengths_ptr + gl.minimum(sequence, batch - 1)
    keys = gl.load(length, mask=sequence < batch, other=0)
    keys = gl.maximum(gl.minimum(keys, tables.most_keys), 0)
    line = tables.ptr + sequence.to(gl.int64) * tables.stride
    rows = tokens * heads
    begin = 0
    stop = keys
    part_row = None
    here = rows - first
    if SPLIT:
        parts, bits = ranges_of(rows, keys, None, True)
        slot = program % tables.ranges.slots
        part = slot % parts
        first = gl.where(has_range, slot // parts * BM, first)
        begin = gl.where(has_range, part << bits, 0)
        stop = gl.where(has_range, begin + gl.minimum(keys - begin, 1 << bits), keys)
        place = (sequence - tables.ranges.first_sequence) * tables.ranges.part_rows
        part_row = gl.where(has_range, place + part * rows + first, -1)
        here = gl.where(has_range == (parts > 1), rows - first, 0)
    seen = keys - tokens + 1
    origin = None
    if tables.window is not None:
        origin = first_key(seen + first // heads, tables.window)
        stop = stop - origin
        seen = seen - origin
    return RowsWork(
        token=start,
        first=first,
        here=here,
        list_ptr=line,
        begin=begin,
        keys=stop,
        seen=seen,
        window=tables.window,
        origin=origin,
        part_row=part_row,
    )


@gluon.jit
def last_token(work, heads, BM: gl.constexpr):
    """The token of the last row of RowsWork, counted from the first of its sequence."""
    return (work.first + gl.minimum(work.here, BM) - 1) // heads


@gluon.jit
def blocks_seen(work, heads, BM: gl.constexpr, KV: gl.constexpr, CAUSAL: gl.constexpr):
    """(blocks of KV rows that RowsWork visits, those of them that all its rows see whole)."""
    stop = work.keys
    whole = work.keys
    if CAUSAL:
        stop = gl.minimum(work.keys, work.seen + last_token(work, heads, BM))
        whole = gl.minimum(work.keys, work.seen + work.first // heads)
    blocks = (gl.maximum(stop, 0) + KV - 1) // KV
    return blocks, gl.minimum(gl.maximum(whole, 0) // KV, blocks)


@gluon.jit
def blocks_entered(work, heads, BM: gl.constexpr, KV: gl.constexpr):
    """Blocks of KV keys in which the window of some row of RowsWork begins, and those before."""
    last = first_key(work.seen + last_token(work, heads, BM), work.window)
    return (last + KV - 1) // KV


@gluon.jit
def Q_frags(
    q,
    places,
    here,
    DTYPE: gl.constexpr,
    BM: gl.constexpr,
    FRAGS: gl.constexpr,
    MMA: gl.constexpr,
):
    """All fragments of the tile's queries (TokenRows, Places), in registers; rows from `here` on
    are zeros."""
    PIECE: gl.constexpr = 128 // q.ptr.dtype.element_ty.primitive_bitwidth
    row = gl.arange(0, BM, gl.SliceLayout(1, MMA.q))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, MMA.q))
    pointers = (q.ptr + row_place(row, places, q) * PIECE)[:, None] + column[None, :]
    frags = ()
    for c in gl.static_range(FRAGS):
        frag = gl.load(pointers + c * COLUMNS, mask=(row < here)[:, None], other=0.0)
        frags = frags + (frag.to(DTYPE),)  # noqa: RUF005
    return frags


@gluon.jit
def slot_at(rings, number):
    """Slot `number` of the Rings."""
    latent = rings.latent.index(number)
    rope = None
    if rings.rope is not None:
        rope = rings.rope.index(number)
    return Slot(latent=latent, rope=rope)


@gluon.jit
def scores(q_frags, slot, BLOCK: gl.constexpr, LAYOUTS: gl.constexpr):
    """Score tiles [queries, 32 rows] of a Slot."""
    MMA: gl.constexpr = LAYOUTS.matrices
    TILES: gl.constexpr = BLOCK.keys // STRIP
    FRAGS: gl.constexpr = slot.latent.shape[1] // COLUMNS
    if BLOCK.rope > 0:
        READ: gl.constexpr = LAYOUTS.rope.read
        rope = reinterpret(slot.rope, slot.rope.dtype, [TILES, STRIP, ROPE_WIDTH], READ)
    tiles = ()
    for i in gl.static_range(TILES):
        att = gl.zeros([BLOCK.queries, STRIP], gl.float32, MMA.scores)
        for c in gl.static_range(FRAGS):
            part = slot.latent.slice(STRIP * i, STRIP, 0).slice(COLUMNS * c, COLUMNS, 1)
            att = mma_QK(att, part.permute((1, 0)).load(MMA.k), q_frags[c])
        if BLOCK.rope > 0:
            part = rope.index(i).permute((1, 0)).load(MMA.k)
            att = mma_QK(att, part, q_frags[FRAGS])
        tiles = tiles + (att,)  # noqa: RUF005
    return tiles


@gluon.jit
def mask_listed(
    tiles,
    numbers,
    first,
    source,
    TILES: gl.constexpr,
    MMA: gl.constexpr,
    HOW: gl.constexpr,
):
    """-inf where an index does not count."""
    at = gl.arange(0, STRIP, gl.SliceLayout(0, MMA.scores)) + first
    done = ()
    for i in gl.static_range(TILES):
        number = numbers.slice(STRIP * i, STRIP, 0).load(at.type.layout)
        ok = counting(number, at + STRIP * i, source, HOW)
        done = done + (gl.where(ok[None, :], tiles[i], MINUS_INF),)  # noqa: RUF005
    return done


@gluon.jit
def mask_paged(
    tiles,
    first,
    work,
    heads,
    CAUSAL: gl.constexpr,
    BLOCK: gl.constexpr,
    MMA: gl.constexpr,
):
    """-inf where a row of RowsWork does not see a key; `first`: the block's first key."""
    SL: gl.constexpr = MMA.scores
    TILES: gl.constexpr = BLOCK.keys // STRIP
    zero = opaque_zero()
    at = gl.arange(0, STRIP, gl.SliceLayout(0, SL)) + (first + zero)
    last = gl.arange(0, BLOCK.queries, gl.SliceLayout(1, SL)) + (work.first + zero)
    if CAUSAL:
        last = gl.minimum(last // heads + work.seen, work.keys)
    else:
        last = last * 0 + work.keys
    if work.window is not None:
        since = last - work.window
    done = ()
    for i in gl.static_range(TILES):
        here = (at + STRIP * i)[None, :] < last[:, None]
        if work.window is not None:
            here = here & ((at + STRIP * i)[None, :] >= since[:, None])
        done = done + (gl.where(here, tiles[i], MINUS_INF),)  # noqa: RUF005
    return done


COUNTS = ["rows", "topk", "heads", "blocks", "batch", "total_q", "factor"]
COUNTS += ["range_programs", "slots", "first_sequence", "part_rows", "window"]
# Vectors of 4-byte elements, read one by one: a slice of a tensor is as good as all.
VECTORS = ["lse_ptr", "logits_ptr", "sink_ptr", "indices_ptr", "lengths_ptr", "cu_ptr", "scale_ptr"]
VECTORS += ["part_state_ptr"]


@gluon.jit
def load_first_blocks(
    rings,
    number_ring,
    parts,
    source,
    first,
    WIDENED: gl.constexpr,
    LAYOUTS: gl.constexpr,
    HOW: gl.constexpr,
):
    """Numbers of the first two blocks of a RowSource, from place `first` on, and rows of the first.

    Rows that are WIDENED are then in their slot; copies of others are in flight.
    """
    KV: gl.constexpr = rings.latent.shape[1]
    slot = slot_at(rings, 0)
    number_ring.index(0).store(numbers_of(source, first, KV, HOW))
    number_ring.index(1).store(numbers_of(source, first + KV, KV, HOW))
    if WIDENED:
        fetched = fetch_block(slot, parts, number_ring.index(0), first, source, LAYOUTS, HOW)
        dequantize_block(slot, fetched, HOW)
    else:
        copy_block(slot, parts, number_ring.index(0), first, source, LAYOUTS, HOW)


@gluon.jit
def add_block(state, tiles, latent, factor, TILES: gl.constexpr, MMA: gl.constexpr):
    """The OnlineSoftmax `state` and one block more: its scores, and its latent columns in LDS."""
    O, shift, row_sum = state
    weights, shift, row_sum, rescale = softmax(tiles, shift, row_sum, factor, TILES, 0.0)
    O = O * gl.convert_layout(rescale, gl.SliceLayout(1, MMA.output))[:, None]
    for i in gl.static_range(TILES):
        p = gl.convert_layout(weights[i].to(latent.dtype), MMA.p)
        O = mma_PV(O, latent.slice(STRIP * i, STRIP, 0).load(MMA.v), p)
    return OnlineSoftmax(O, shift, row_sum)


@gluon.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=VECTORS)
def sparse_kernel(  # noqa: PLR0913
    q_ptr,
    latent_ptr,
    rope_ptr,
    scale_ptr,
    indices_ptr,
    lengths_ptr,
    cu_ptr,
    out_ptr,
    lse_ptr,
    logits_ptr,
    sink_ptr,
    part_sums_ptr,
    part_state_ptr,
    factor,
    rows,
    topk,
    heads,
    blocks,
    batch,
    total_q,
    range_programs,
    slots,
    first_sequence,
    part_rows,
    window,
    q_stride_t,
    q_stride_h,
    latent_stride_page,
    latent_stride_t,
    rope_stride_page,
    rope_stride_t,
    scale_stride_page,
    scale_stride_t,
    indices_stride,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    logits_stride_t,
    logits_stride_h,
    BLOCK: gl.constexpr,
    DTYPE: gl.constexpr,
    WIDENED: gl.constexpr,
    PAGED: gl.constexpr,
    CAUSAL: gl.constexpr,
    PAGE: gl.constexpr,
    SCALE_BLOCK: gl.constexpr,
    SIGN: gl.constexpr,
    LAYOUTS: gl.constexpr,
):
    """One tile of rows of scores. BLOCK: RowsBlock. DTYPE: what is multiplied. WIDENED: rows pass
    through registers. PAGED: `indices` are a block table, `topk` the keys that a line of it has
    room for, `lengths` the keys of sequences, `blocks` all tiles; else `indices` are lists, `topk`
    their length, `lengths` how much of each counts (or None), `blocks` the blocks per token. With
    `window` a token sees the last so many keys up to its own, and keys are not split. With a
    workspace of partial results, the first `range_programs` have ranges of the keys of sequences,
    `slots` of each (RangePrograms). PAGE: rows per page, 0 if pages lie end to end. SCALE_BLOCK:
    columns per scale, 0 without scales. LAYOUTS: RowsLayouts. Strides of rows, q and out count
    pieces of 16 bytes, those of scales elements."""
    BM: gl.constexpr = BLOCK.queries
    KV: gl.constexpr = BLOCK.keys
    SLOTS: gl.constexpr = BLOCK.slots
    TILES: gl.constexpr = KV // STRIP
    D_V: gl.constexpr = BLOCK.latent
    FRAGS: gl.constexpr = (D_V + BLOCK.rope) // COLUMNS
    MMA: gl.constexpr = LAYOUTS.matrices
    HOW: gl.constexpr = RowFormat(
        is_paged=PAGED,
        page_size=PAGE,
        rope=BLOCK.rope,
        scale_block=SCALE_BLOCK,
        has_tail=BLOCK.rope == 0 and rope_ptr is not None,
    )
    SPLIT: gl.constexpr = part_sums_ptr is not None
    if PAGED:
        ranges = None
        if SPLIT:
            ranges = RangePrograms(
                programs=range_programs,
                slots=slots,
                first_sequence=first_sequence,
                part_rows=part_rows,
            )
        tables = PageTables(
            ptr=indices_ptr,
            stride=indices_stride,
            lengths_ptr=lengths_ptr,
            most_keys=topk,
            cu_ptr=cu_ptr,
            batch=batch,
            total_q=total_q,
            tiles=blocks,
            window=window,
            ranges=ranges,
        )
        work = paged_work(gl.program_id(0), tables, heads, BM)
        if work.here <= 0:
            return
    else:
        lists = TokenLists(
            ptr=indices_ptr,
            stride=indices_stride,
            lengths_ptr=lengths_ptr,
            topk=topk,
            blocks=blocks,
        )
        work = listed_work(gl.program_id(0), lists, heads, BM)
    visits, whole = blocks_seen(work, heads, BM, KV, CAUSAL)
    if window is not None:
        entered = blocks_entered(work, heads, BM, KV)
    source = RowSource(
        ptr=work.list_ptr,
        places=gl.minimum(work.keys, visits * KV),
        rows=rows,
        origin=work.origin,
    )
    latent_ring = gl.allocate_shared_memory(DTYPE, [SLOTS, KV, D_V], LAYOUTS.latent.write)
    rope_ring = None
    if BLOCK.rope > 0:
        rope_ring = gl.allocate_shared_memory(DTYPE, [SLOTS, KV, ROPE_WIDTH], LAYOUTS.rope.write)
    rings = Rings(latent=latent_ring, rope=rope_ring)
    number_ring = gl.allocate_shared_memory(gl.int32, [2, KV], NUMBERS)
    parts = CacheParts(
        latent=PagedRows(latent_ptr, latent_stride_page, latent_stride_t),
        rope=PagedRows(rope_ptr, rope_stride_page, rope_stride_t),
        scales=PagedRows(scale_ptr, scale_stride_page, scale_stride_t),
    )
    begin = work.begin
    load_first_blocks(rings, number_ring, parts, source, begin, WIDENED, LAYOUTS, HOW)
    places = Places(first=work.token * heads + work.first, per_token=heads)
    q = TokenRows(q_ptr, q_stride_t, q_stride_h)
    q_frags = Q_frags(q, places, work.here, DTYPE, BM, FRAGS, MMA)

    O = gl.zeros([BM, D_V], gl.float32, MMA.output)
    shift = gl.full([BM], float("-inf"), gl.float32, gl.SliceLayout(1, MMA.scores))
    row_sum = gl.zeros([BM], gl.float32, gl.SliceLayout(1, MMA.scores))
    state = OnlineSoftmax(O, shift, row_sum)
    # A range begins at a multiple of 512 keys: its first block takes slot 0, as the first of all.
    for j in range(begin // KV, visits):
        coming = numbers_of(source, (j + 2) * KV, KV, HOW)
        later = slot_at(rings, (j + 1) % SLOTS)
        numbers = number_ring.index((j + 1) % 2)
        if WIDENED:
            fetched = fetch_block(later, parts, numbers, (j + 1) * KV, source, LAYOUTS, HOW)
        else:
            copy_block(later, parts, numbers, (j + 1) * KV, source, LAYOUTS, HOW)
            async_copy.wait_group(1)
        slot = slot_at(rings, j % SLOTS)
        numbers = number_ring.index(j % 2)
        if not all_count(numbers, j * KV, source, KV, HOW):
            clear_rows(slot.latent, numbers, j * KV, source, HOW)
        tiles = scores(q_frags, slot, BLOCK, LAYOUTS)
        if SIGN != 1:
            tiles = signed_tiles(tiles, TILES, SIGN)
        if PAGED:
            partly = j >= whole
            if window is not None:
                partly = partly | (j < entered)
            if partly:
                tiles = mask_paged(tiles, j * KV, work, heads, CAUSAL, BLOCK, MMA)
        else:
            tiles = mask_listed(tiles, numbers, j * KV, source, TILES, MMA, HOW)
        state = add_block(state, tiles, slot.latent, factor, TILES, MMA)
        if WIDENED:
            dequantize_block(later, fetched, HOW)
        numbers.store(coming)
    if not WIDENED:
        async_copy.wait_group(0)
    O, shift, row_sum = state

    # Computed again, so that nothing of it is kept in registers during the loop.
    first = work.first + opaque_zero()
    places = Places(first=work.token * heads + first, per_token=heads)
    row = gl.arange(0, BM, shift.type.layout)
    head = (first + row) % heads
    out = TokenRows(out_ptr, out_stride_t, out_stride_h)
    lse = TokenRows(lse_ptr, lse_stride_t, lse_stride_h)
    if SPLIT:
        if work.part_row >= 0:
            partial = Parts(sums=part_sums_ptr, state=part_state_ptr)
            write_sums(O, shift, row_sum, partial, work.part_row, work.here, MMA)
        else:
            finish((O,), shift, row_sum, out, lse, sink_ptr, head, work.here, places, D_V, 1, MMA)
    else:
        finish((O,), shift, row_sum, out, lse, sink_ptr, head, work.here, places, D_V, 1, MMA)
    if logits_ptr is not None:
        logits = TokenRows(logits_ptr, logits_stride_t, logits_stride_h)
        at = logits.ptr + row_place(row, places, logits)
        gl.store(at, shift * LN_2, mask=row < work.here)
