"""Scores of few queries: a program takes 32 or 64 keys of one query's list and all of its heads.

This is the first of three launches (weights.py and values.py follow). Rows are read, and
dequantized, once for all heads. Products are summed in the order of the latent kernel, so scores
have the same bits:

| block of a step | columns, in order |
|---|---|
| 0 | left half of the latent, right half, rope |
| 1 | left half, rope, right half |

The kernel writes rows without rope, in 16 bits, [query, block, 64], zeros where there is no key;
scores [query, block, head, 64], -inf where there is no key; and the largest score of each row of a
program. Heads are padded to tiles of 64.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openmla.kernels.gluon.barriers import barriers, let_next_begin
from openmla.kernels.gluon.compat import reinterpret, thread_barrier, tma_load, tma_store
from openmla.kernels.gluon.dequantize.records import CacheFormat, CacheRows, RowPlaces
from openmla.kernels.gluon.dequantize.rows import dequantized
from openmla.kernels.gluon.dequantize.v4_rows import CHUNKS as V4_CHUNKS
from openmla.kernels.gluon.dequantize.v4_rows import (
    copy_tail,
    dequantized_chunk,
    load_chunk,
    places_of,
    scale_of,
)
from openmla.kernels.gluon.dequantize.v4_rows import key_layout as v4_key_layout
from openmla.kernels.gluon.dequantize.v4_rows import load_scales as load_v4_scales
from openmla.kernels.gluon.dequantize.v41_chunks import columns_of_chunk, load_half_scales
from openmla.kernels.gluon.pages import Pages
from openmla.kernels.gluon.scores import MINUS_INF, signed
from openmla.kernels.hopper.few.records import Chunks
from openmla.kernels.hopper.few.rows import (
    KEYS,
    WARPS,
    copied,
    copied_rope,
    key_layout,
    listed,
    places_of_query,
    scales,
    steps_of,
    words,
)
from openmla.kernels.hopper.latent.listing import in_pool, listing_of, look_up
from openmla.kernels.hopper.latent.records import (
    SECOND_COUNTS,
    SECOND_STRIDES,
    SECOND_VECTORS,
    ColumnTiles,
    ListedTile,
    RowDescriptors,
    Source,
)
from openmla.kernels.hopper.latent.rows_v4 import rows_of, words_ahead
from openmla.kernels.hopper.latent.source import list_of

CHUNK = gl.constexpr(64)  # columns that are dequantized at a time
LANES = gl.constexpr(8)  # that hold a chunk of one of DeepSeek-V4's rows


@gluon.jit
def load_queries(descs, tiles, barrier, query, DIMS: gl.constexpr):
    """Load Q of all heads into `ColumnTiles`; zeros past the last head. descs: its
    `RowDescriptors`."""
    HALF: gl.constexpr = DIMS.latent // 2
    left, right, rope = tiles
    HEADS: gl.constexpr = left.shape[0]
    BOX: gl.constexpr = descs.latent.block_shape
    LAYOUT: gl.constexpr = descs.latent.layout
    mbarrier.expect(barrier, HEADS * (DIMS.latent + DIMS.rope) * 2)
    tma_load(descs.latent, [query, 0, 0], barrier, reinterpret(left, left.dtype, BOX, LAYOUT))
    tma_load(descs.latent, [query, 0, HALF], barrier, reinterpret(right, left.dtype, BOX, LAYOUT))
    if DIMS.rope > 0:
        ROPE_BOX: gl.constexpr = descs.rope.block_shape
        ROPE_LAYOUT: gl.constexpr = descs.rope.layout
        tile = reinterpret(rope, left.dtype, ROPE_BOX, ROPE_LAYOUT)
        tma_load(descs.rope, [query, 0, DIMS.latent], barrier, tile)


@gluon.jit
def with_chunk(chunks, rows, keys, number, WIDTH: gl.constexpr, CACHE: gl.constexpr):
    """`Chunks` with one more: columns number * WIDTH … of `CacheRows`."""
    all_words, all_scales = chunks
    all_words += (words(rows, keys, number, WIDTH, CACHE),)
    all_scales += (scales(rows, keys, number, WIDTH, CACHE),)
    return Chunks(words=all_words, scales=all_scales)


@gluon.jit
def sources_of(source, query, first, NUMBER: gl.constexpr, LAYOUT: gl.constexpr):
    """(physical rows of places from `first` on of a query, -1 where there is no key; 1 if they are
    the second source's, else 0). See latent/listing.py."""
    own = list_of(source, query)
    listing = listing_of(source, own, ListedTile(token=query, first_head=0))
    if source.second_keys is None:
        listed, is_second = look_up(source, listing, own.skipped + first, NUMBER, LAYOUT)
        return in_pool(source, listed), is_second
    else:
        listed, is_second = look_up(source, listing, first, NUMBER, LAYOUT)
        rows = gl.where(is_second != 0, source.second.pool_rows, source.pool_rows)
        return gl.where((listed >= 0) & (listed < rows), listed, -1), is_second


@gluon.jit
def places_in(source, rows, keys, is_second):
    """`RowPlaces` of physical rows of one of the sources."""
    if source.second_keys is None:
        return places_of(rows, keys)
    else:
        if is_second != 0:
            places = places_of(rows.second, keys)
        else:
            places = places_of(rows, keys)
        return places


@gluon.jit
def begin_v4(tiles, places):
    """What `begin` does, with DeepSeek-V4's rows, of one source or two: their tails are copied."""
    scales = load_v4_scales(places)
    all_words = ()
    all_scales = ()
    for c in gl.static_range(V4_CHUNKS):
        all_words += (load_chunk(places, c, LANES, WARPS),)
        all_scales += (scale_of(scales, c),)
    copy_tail(places, tiles.right, LANES, WARPS)
    async_copy.commit_group()
    return Chunks(words=all_words, scales=all_scales)


@gluon.jit
def begin_v41(tiles, places, is_second, STORED: gl.constexpr):
    """What `begin` does, with rows of DeepSeek-V4.1, or of V4 beside these: `Chunks` of all their
    chunks and words of scales, as many as the longer rows have."""
    FIRST: gl.constexpr = rows_of(STORED, 0)
    SECOND: gl.constexpr = rows_of(STORED, 1)
    count, step, chunks = FIRST.scale_words, FIRST.scale_step, FIRST.chunks
    if FIRST != SECOND:
        count = gl.where(is_second != 0, SECOND.scale_words, FIRST.scale_words)
        step = gl.where(is_second != 0, SECOND.scale_step, FIRST.scale_step)
        chunks = gl.where(is_second != 0, SECOND.chunks, FIRST.chunks)
    all_words = ()
    all_scales = ()
    for i in gl.static_range(words_ahead(STORED)):
        all_scales += (load_half_scales(places, i, count, step, LANES, WARPS),)
    for c in gl.static_range(max(FIRST.chunks, SECOND.chunks)):
        there = RowPlaces(
            words=places.words,
            scales=places.scales,
            is_there=places.is_there,
            is_quantized=places.is_quantized & (c < chunks),
            start=places.start,
        )
        all_words += (load_chunk(there, c, LANES, WARPS),)
    if FIRST.has_tail and SECOND.has_tail:
        copy_tail(places, tiles.right, LANES, WARPS)
    elif FIRST.has_tail:
        if is_second == 0:
            copy_tail(places, tiles.right, LANES, WARPS)
    elif SECOND.has_tail:  # noqa: SIM102 - decided when compiled
        if is_second != 0:
            copy_tail(places, tiles.right, LANES, WARPS)
    async_copy.commit_group()
    return Chunks(words=all_words, scales=all_scales)


@gluon.jit
def begin(tiles, rows, keys, DIMS: gl.constexpr, CACHE: gl.constexpr):
    """Start reading `CacheRows` for `ColumnTiles`. All columns of an FP8 cache are loaded into
    registers, and returned as `Chunks`; plain rows are copied, the left half first. Rope is copied
    where it is not FP8."""
    chunks = Chunks(words=(), scales=())
    if CACHE.scale_block == 0:
        copied(tiles.left, rows, keys, 0, CACHE)
        async_copy.commit_group()
        copied(tiles.right, rows, keys, 1, CACHE)
        if DIMS.rope > 0:
            copied(tiles.rope, rows, keys, DIMS.latent // DIMS.rope, CACHE)
    else:
        for c in gl.static_range(DIMS.latent // CHUNK):
            chunks = with_chunk(chunks, rows, keys, c, CHUNK, CACHE)
        if DIMS.rope > 0:
            if rows.rope_ptr is None:
                AT: gl.constexpr = DIMS.latent // DIMS.rope
                chunks = with_chunk(chunks, rows, keys, AT, DIMS.rope, CACHE)
            else:
                copied_rope(tiles.rope, rows, keys, CACHE)
    async_copy.commit_group()
    return chunks


@gluon.jit
def store_chunk(tile, chunks, C: gl.constexpr):
    """Dequantize chunk C into a tile, if it is e4m3: the last of DeepSeek-V4's rows is not."""
    if len(chunks.words) > C:
        if len(chunks.words[C].shape) == 2:
            tile.store(dequantized_chunk(chunks.words[C], chunks.scales[C]))
        else:
            tile.store(dequantized(chunks.words[C], chunks.scales[C]))


@gluon.jit
def store_half(half, chunks, SIDE: gl.constexpr, ROWS: gl.constexpr):
    """Dequantize what `begin_v41` loaded of the left columns (SIDE 0) or the right ones. ROWS:
    `ChunkedRows`."""
    IN_HALF: gl.constexpr = half.shape[1] // ROWS.columns
    for c in gl.static_range(SIDE * IN_HALF, min((SIDE + 1) * IN_HALF, ROWS.chunks)):
        word = chunks.scales[c // ROWS.scale_chunks]
        columns = columns_of_chunk(chunks.words[c], word, c, ROWS, LANES, WARPS)
        half.slice(c % IN_HALF * ROWS.columns, ROWS.columns, dim=1).store(columns)


@gluon.jit
def store_rows(half, chunks, is_second, SIDE: gl.constexpr, STORED: gl.constexpr):
    """`store_half` of rows of the format that their source has."""
    FIRST: gl.constexpr = rows_of(STORED, 0)
    SECOND: gl.constexpr = rows_of(STORED, 1)
    if FIRST == SECOND:
        store_half(half, chunks, SIDE, FIRST)
    elif is_second != 0:
        store_half(half, chunks, SIDE, SECOND)
    else:
        store_half(half, chunks, SIDE, FIRST)


@gluon.jit
def finish(tiles, chunks, is_second, SIDE: gl.constexpr, STORED: gl.constexpr):
    """Wait until the left half of the rows (SIDE 0), or the rest of them (1), is in its
    `ColumnTiles`. chunks: what `begin`, `begin_v4` or `begin_v41` returned."""
    COUNT: gl.constexpr = tiles.left.shape[1] // CHUNK
    NUMBER: gl.constexpr = len(chunks.words)
    if NUMBER == 0 or SIDE == 1:
        async_copy.wait_group(1 - SIDE)
    if words_ahead(STORED) > 0:
        store_rows(tiles.left if SIDE == 0 else tiles.right, chunks, is_second, SIDE, STORED)
    elif NUMBER > 0:
        half = tiles.left if SIDE == 0 else tiles.right
        for c in gl.static_range(COUNT):
            tile = half.slice(c * CHUNK, CHUNK, dim=1)
            store_chunk(tile, chunks, SIDE * COUNT + c)
        if SIDE == 1 and NUMBER > 2 * COUNT:
            tiles.rope.store(dequantized(chunks.words[2 * COUNT], chunks.scales[2 * COUNT]))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def multiply(S, q, k):
    """Scores with the products of more tiles of columns, in the order in which q and k list
    them."""
    for i in gl.static_range(len(q)):
        columns = k[i].permute((1, 0))
        S = warpgroup_mma(q[i], columns, S, is_async=True)
    return warpgroup_mma_wait(0, deps=(S,))


@gluon.jit
def put_scores(S, scores_ptr, maxima_ptr, part):
    """Store the scores of a part of a block, and the largest of each row."""
    HEADS: gl.constexpr = S.shape[0]
    PARTS: gl.constexpr = KEYS // S.shape[1]
    head = gl.arange(0, HEADS, gl.SliceLayout(1, S.type.layout))
    column = gl.arange(0, S.shape[1], gl.SliceLayout(0, S.type.layout)) + part % PARTS * S.shape[1]
    row = part // PARTS * HEADS + head
    gl.store(scores_ptr + (row * KEYS)[:, None] + column[None, :], S)
    gl.store(maxima_ptr + part * HEADS + head, gl.max(S, 1))


COUNTS = ["topk", "rows", "steps", "page_size", "page_inverse", "page_rows", "requests"]
COUNTS += SECOND_COUNTS
STRIDES = ["indices_stride", "stride_page", "stride_row", "scale_page", "scale_row"]
STRIDES += SECOND_STRIDES
VECTORS = ["indices_ptr", "lengths_ptr", "scale_ptr", "request_ptr", "begin_ptr", *SECOND_VECTORS]


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def scores_kernel(  # noqa: PLR0913
    q_half_desc,
    q_rope_desc,
    v_half_desc,
    data_ptr,
    scale_ptr,
    rope_ptr,
    indices_ptr,
    lengths_ptr,
    scores_ptr,
    maxima_ptr,
    topk,
    rows,
    steps,
    indices_stride,
    stride_page,
    stride_row,
    scale_page,
    scale_row,
    page_size,
    page_inverse,
    page_rows,
    request_ptr,
    begin_ptr,
    requests,
    second_data_ptr,
    second_scale_ptr,
    second_indices_ptr,
    second_lengths_ptr,
    second_request_ptr,
    second_begin_ptr,
    second_requests,
    second_topk,
    second_rows,
    second_page_rows,
    second_indices_stride,
    second_stride_page,
    second_stride_row,
    second_scale_page,
    second_scale_row,
    HEADS: gl.constexpr,
    SPAN: gl.constexpr,
    DIMS: gl.constexpr,
    SIGN: gl.constexpr,
    SCALED: gl.constexpr,
    STORED: gl.constexpr,
    LAYOUTS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Keys from SPAN * (`program % N`) on, query `program // N`. SPAN: 32 or 64. HEADS: 64 or 128.
    DIMS: `RowColumns`. LAYOUTS: `TileLayouts`. page_size, page_inverse, SCALED,
    STORED: see latent/kernel.py."""
    DTYPE: gl.constexpr = q_half_desc.dtype
    CACHE: gl.constexpr = CacheFormat(scale_block=SCALED)
    GROUPS: gl.constexpr = HEADS // 64  # warp-groups side by side in the rows, else in the keys
    SL: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4 * GROUPS, 2 // GROUPS], [16, SPAN // 2 * GROUPS, 16]
    )
    KL: gl.constexpr = (
        key_layout(CHUNK, SCALED) if page_rows is None else v4_key_layout(LANES, WARPS)
    )
    PARTS: gl.constexpr = KEYS // SPAN
    HALF: gl.constexpr = DIMS.latent // 2
    if OVERLAP:
        let_next_begin()
    query = gl.program_id(0) // (2 * PARTS * steps)
    part = gl.program_id(0) % (2 * PARTS * steps)
    second = None
    second_data = None
    if second_topk is not None:
        second = Source(
            table=second_indices_ptr,
            lengths=second_lengths_ptr,
            most_keys=second_topk,
            table_stride=second_indices_stride,
            pool_rows=second_rows,
            begin=second_begin_ptr,
            request=second_request_ptr,
            requests=second_requests,
            page_rows=second_page_rows,
        )
        second_data = CacheRows(
            data_ptr=second_data_ptr,
            page_stride=second_stride_page,
            row_stride=second_stride_row,
            scale_ptr=second_scale_ptr,
            scale_page_stride=second_scale_page,
            scale_row_stride=second_scale_row,
            rope_ptr=None,
            page_rows=second_page_rows,
        )
    source = Source(
        table=indices_ptr,
        lengths=lengths_ptr,
        most_keys=topk,
        table_stride=indices_stride,
        pool_rows=rows,
        begin=begin_ptr,
        request=request_ptr,
        requests=requests,
        page_rows=page_rows,
        second_keys=second_topk,
        second=second,
    )
    count = places_of_query(source, query)
    if part < 2 * PARTS * steps_of(count):
        if page_rows is None:
            keys = listed(source, query, count, part * SPAN, SPAN, KL)
            is_second = 0
        else:
            keys, is_second = sources_of(source, query, part * SPAN, SPAN, KL)
        q_left = gl.allocate_shared_memory(DTYPE, [HEADS, HALF], LAYOUTS.latent)
        q_right = gl.allocate_shared_memory(DTYPE, [HEADS, HALF], LAYOUTS.latent)
        k_left = gl.allocate_shared_memory(DTYPE, [SPAN, HALF], LAYOUTS.latent)
        k_right = gl.allocate_shared_memory(DTYPE, [SPAN, HALF], LAYOUTS.latent)
        q_rope = q_left
        k_rope = k_left
        if DIMS.rope > 0:
            q_rope = gl.allocate_shared_memory(DTYPE, [HEADS, DIMS.rope], LAYOUTS.rope)
            k_rope = gl.allocate_shared_memory(DTYPE, [SPAN, DIMS.rope], LAYOUTS.rope)
        q = ColumnTiles(left=q_left, right=q_right, rope=q_rope)
        k = ColumnTiles(left=k_left, right=k_right, rope=k_rope)
        q_ready = barriers(1, 1)
        fence_async_shared()
        q_descs = RowDescriptors(latent=q_half_desc, rope=q_rope_desc)
        load_queries(q_descs, q, q_ready.index(0), query, DIMS)
        data = CacheRows(
            data_ptr=data_ptr,
            page_stride=stride_page,
            row_stride=stride_row,
            scale_ptr=scale_ptr,
            scale_page_stride=scale_page,
            scale_row_stride=scale_row,
            rope_ptr=rope_ptr,
            pages=Pages(size=page_size, inverse=page_inverse),
            page_rows=page_rows,
            second=second_data,
        )
        if STORED is None:
            chunks = begin(k, data, keys, DIMS, CACHE)
        elif words_ahead(STORED) == 0:
            chunks = begin_v4(k, places_in(source, data, keys, is_second))
        else:
            chunks = begin_v41(k, places_in(source, data, keys, is_second), is_second, STORED)
        seen = gl.convert_layout(keys >= 0, gl.SliceLayout(0, SL))
        finish(k, chunks, is_second, 0, STORED)
        tma_store(v_half_desc, [gl.program_id(0) * SPAN, 0], k_left)
        mbarrier.wait(q_ready.index(0), 0)
        S = gl.zeros([HEADS, SPAN], gl.float32, SL)
        S = warpgroup_mma(q_left, k_left.permute((1, 0)), S, use_acc=False, is_async=True)
        finish(k, chunks, is_second, 1, STORED)
        tma_store(v_half_desc, [gl.program_id(0) * SPAN, HALF], k_right)
        S, _, _ = warpgroup_mma_wait(0, deps=(S, q_left, k_left))  # tiles keep their place so long
        if DIMS.rope == 0:
            S = multiply(S, (q_right,), (k_right,))
        elif part // PARTS % 2 == 0:
            S = multiply(S, (q_right, q_rope), (k_right, k_rope))
        else:
            S = multiply(S, (q_rope, q_right), (k_rope, k_right))
        tma.store_wait(0)
        thread_barrier()  # what follows may use the memory of the tiles
        S = gl.where(seen[None, :], signed(S, SIGN), MINUS_INF)
        put_scores(S, scores_ptr, maxima_ptr, gl.program_id(0))
