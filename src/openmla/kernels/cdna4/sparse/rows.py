"""Latent rows on their way to LDS: those that a list names, or those of a sequence's pages, all of
them or the span that a token sees.

| | list | pages | span |
|---|---|---|---|
| place | of the token's list | of a key in its sequence | from the first position on |
| number of a place | index of a row | the page that the key is in | the same |
| counts | number >= 0 and < rows, place < places | place < places | both, number of pages |

`source` is a RowSource, `HOW` a RowFormat, LAYOUTS a RowsLayouts, `slot` a Slot, `parts` are
CacheParts; `numbers` are the numbers of a block's places in LDS, `first` is its first place.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4
from triton.experimental.gluon.language.amd.cdna4 import async_copy

from openmla.kernels.cdna4.copies import swizzled_pieces, swizzled_source
from openmla.kernels.cdna4.softmax import opaque_zero
from openmla.kernels.cdna4.sparse.records import FetchedRows, FetchedV4Rows
from openmla.kernels.gluon.compat import thread_barrier
from openmla.kernels.gluon.requests import cut

GROUP = gl.constexpr(8)  # columns that one lane copies: 16 bytes of LDS
# The 64 numbers of a block: in registers one per lane, the same in all waves; in LDS one after
# another.
LANES = gl.constexpr(gl.BlockedLayout([1], [64], [8], [0]))
NUMBERS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
WAVES = gl.constexpr(8)
V4_CHUNK = gl.constexpr(64)  # columns that share a scale; as many are the tail
V4_CHUNKS = gl.constexpr(7)
SMALLEST_POWER = gl.constexpr(0x00400000)  # 2^-127, which has no exponent in fp32
QUIET_NAN = gl.constexpr(0x7FC00000)


@gluon.constexpr_function
def whole_rows(columns):
    """Latent rows that a wave has whole: one of 512 columns, two of 256, eight of 64."""
    lanes = columns // GROUP
    return gl.BlockedLayout([1, GROUP], [64 // lanes, lanes], [WAVES, 1], [1, 0])


@gluon.jit
def position(at, source):
    """The position of place `at` in a sequence, or in the request of a span."""
    if source.origin is None:
        return at
    else:
        return at + source.origin


@gluon.jit
def numbers_of(source, first, KV: gl.constexpr, HOW: gl.constexpr):
    """Numbers of places first, first + 1, …, one per lane of a wave; 0 past the last, which are not
    read.

    Nothing is done with them before they are stored to LDS: the compiler would do it, and wait for
    them, at once.
    """
    at = gl.arange(0, KV, LANES) + first
    if HOW.is_paged or HOW.is_span:
        entry = position(at, source) // HOW.page_size
        return cdna4.buffer_load(source.ptr, entry, mask=at < source.places)
    else:
        return cdna4.buffer_load(source.ptr, at, mask=at < source.places)


@gluon.jit
def counting(number, at, source, HOW: gl.constexpr):
    """Whether the row at place `at` counts."""
    if HOW.is_span:
        pages = source.rows // HOW.page_size
        return (at < source.places) & (number >= 0) & (number < pages)
    elif HOW.is_paged:
        return at < source.places
    else:
        return (at < source.places) & (number >= 0) & (number < source.rows)


@gluon.jit
def all_count(numbers, first, source, KV: gl.constexpr, HOW: gl.constexpr):
    """Whether all rows of a block count."""
    if HOW.is_paged:
        return first + KV <= source.places
    else:
        at = gl.arange(0, KV, LANES) + first
        return gl.min(counting(numbers.load(LANES), at, source, HOW).to(gl.int32), 0) == 1


@gluon.jit
def row_offset(number, at, source, rows, HOW: gl.constexpr):
    """Strides of PagedRows `rows` from the first row to the one at place `at`, or to some row if
    that does not count; 64 bits, a cache may be of any size."""
    PAGE: gl.constexpr = HOW.page_size
    if HOW.is_paged or HOW.is_span:
        page = cut(number, source.rows // PAGE - 1).to(gl.int64)
        start = page * rows.page_stride
        return start + (position(at, source) % PAGE).to(gl.int64) * rows.row_stride
    else:
        safe = cut(number, source.rows - 1)
        if PAGE > 0:
            page = (safe // PAGE).to(gl.int64) * rows.page_stride
            return page + (safe % PAGE).to(gl.int64) * rows.row_stride
        else:
            return safe.to(gl.int64) * rows.row_stride


@gluon.jit
def row_pointers(
    tile,
    rows,
    numbers,
    first,
    source,
    LAYOUT: gl.constexpr,
    SWIZZLE: gl.constexpr,
    HOW: gl.constexpr,
):
    """Where the values of a tile in LDS come from, as LAYOUT copies them; rows: PagedRows. Their
    strides count pieces of 16 bytes."""
    PIECE: gl.constexpr = 128 // rows.ptr.dtype.element_ty.primitive_bitwidth
    place = gl.arange(0, tile.shape[0], gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT))
    if SWIZZLE:
        columns = swizzled_source(place, column, GROUP)
    else:
        columns = column[None, :]
    offset = row_offset(numbers.load(place.type.layout), place + first, source, rows, HOW)
    return (rows.ptr + offset * PIECE)[:, None] + columns


@gluon.jit
def latent_pointers(slot, parts, numbers, first, source, LAYOUTS: gl.constexpr, HOW: gl.constexpr):
    """Pointers to the latent columns of a block's rows."""
    return row_pointers(
        slot.latent, parts.latent, numbers, first, source, LAYOUTS.latent.copy, False, HOW
    )


@gluon.jit
def rope_pointers(slot, parts, numbers, first, source, LAYOUTS: gl.constexpr, HOW: gl.constexpr):
    """Pointers to the rope columns of a block's rows, which are swizzled in LDS."""
    return row_pointers(slot.rope, parts.rope, numbers, first, source, LAYOUTS.rope.copy, True, HOW)


@gluon.jit
def copy_block(slot, parts, numbers, first, source, LAYOUTS: gl.constexpr, HOW: gl.constexpr):
    """Start copying the rows of a block to a slot, as one group.

    No copy is masked: the compiler would branch around it, and where it cannot count the copies in
    flight it waits for all of them.
    """
    rows = latent_pointers(slot, parts, numbers, first, source, LAYOUTS, HOW)
    async_copy.global_load_to_shared(slot.latent, rows)
    if HOW.rope > 0:
        rows = rope_pointers(slot, parts, numbers, first, source, LAYOUTS, HOW)
        async_copy.global_load_to_shared(slot.rope, rows)
    async_copy.commit_group()


@gluon.jit
def fetch_scales(
    values,
    scales,
    numbers,
    first,
    source,
    FIRST: gl.constexpr,
    SWIZZLE: gl.constexpr,
    HOW: gl.constexpr,
):
    """Load the scales (PagedRows) of fetched rows, columns FIRST … of them. A lane's 8 columns
    share one, so there is one per group of 8."""
    ROWS: gl.constexpr = values.shape[0]
    GROUPS: gl.constexpr = values.shape[1] // GROUP
    grouped = gl.reshape(values, [ROWS, GROUPS, GROUP])
    SCALES: gl.constexpr = gl.SliceLayout(2, grouped.type.layout)
    place = gl.arange(0, ROWS, gl.SliceLayout(1, SCALES))
    group = gl.arange(0, GROUPS, gl.SliceLayout(0, SCALES)) + opaque_zero()
    if SWIZZLE:
        groups = swizzled_pieces(place, group)
    else:
        groups = group[None, :]
    offset = row_offset(numbers.load(place.type.layout), place + first, source, scales, HOW)
    row = (scales.ptr + offset)[:, None]
    return gl.load(row + (groups * GROUP + FIRST) // HOW.scale_block)


@gluon.jit
def fetch_parts(slot, parts, numbers, first, source, LAYOUTS: gl.constexpr, HOW: gl.constexpr):
    """Start loading both parts of the rows of a block and their scales to registers:
    FetchedRows."""
    latent = gl.load(latent_pointers(slot, parts, numbers, first, source, LAYOUTS, HOW))
    rope = None
    if HOW.rope > 0:
        rope = gl.load(rope_pointers(slot, parts, numbers, first, source, LAYOUTS, HOW))
    latent_scales = None
    rope_scales = None
    if HOW.scale_block > 0:
        latent_scales = fetch_scales(latent, parts.scales, numbers, first, source, 0, False, HOW)
        if HOW.rope > 0 and parts.rope.ptr.dtype.element_ty.primitive_bitwidth == 8:
            rope_scales = fetch_scales(
                rope, parts.scales, numbers, first, source, slot.latent.shape[1], True, HOW
            )
    return FetchedRows(latent, rope, latent_scales, rope_scales)


@gluon.jit
def dequantize_rows(tile, values, scales):
    """Store fetched rows to LDS as bf16(fp32(value) * scale); scales None: as they are, since FP8
    values without scales are 16-bit values, exactly."""
    wide = values
    if scales is not None:
        GROUPS: gl.constexpr = tile.shape[1] // GROUP
        grouped = gl.reshape(values, [tile.shape[0], GROUPS, GROUP])
        wide = gl.reshape(grouped.to(gl.float32) * scales[:, :, None], tile.shape)
    tile.store(wide.to(tile.dtype))


@gluon.jit
def fetch_v4_block(slot, parts, numbers, first, source, HOW: gl.constexpr):
    """Start loading a block of DeepSeek-V4's rows: FetchedV4Rows."""
    L: gl.constexpr = whole_rows(V4_CHUNK)
    E4M3S: gl.constexpr = 16  # in 16 bytes, the unit of strides
    BF16S: gl.constexpr = 8
    place = gl.arange(0, slot.latent.shape[0], gl.SliceLayout(1, L))
    column = gl.arange(0, V4_CHUNK, gl.SliceLayout(0, L))
    number = numbers.load(place.type.layout)
    at = place + first
    row = parts.latent.ptr + row_offset(number, at, source, parts.latent, HOW) * E4M3S
    chunks = ()
    for c in gl.static_range(V4_CHUNKS):
        chunks = chunks + (gl.load(row[:, None] + (column + c * V4_CHUNK)[None, :]),)  # noqa: RUF005
    tail = parts.rope.ptr + row_offset(number, at, source, parts.rope, HOW) * BF16S
    scales = parts.scales.ptr + row_offset(number, at, source, parts.scales, HOW)
    return FetchedV4Rows(
        chunks=chunks,
        tail=gl.load(tail[:, None] + column[None, :]),
        low=gl.load(scales),
        high=gl.load(scales + 1),
    )


@gluon.jit
def power_of_two(exponent):
    """fp32 of an ue8m0 number: 2^(exponent - 127), NaN for 255."""
    bits = gl.where(exponent == 0, SMALLEST_POWER, exponent << 23)
    return gl.where(exponent == 255, QUIET_NAN, bits).to(gl.float32, bitcast=True)


@gluon.jit
def dequantize_v4_block(slot, fetched):
    """Store FetchedV4Rows to LDS: bf16(fp32(e4m3) * scale), and the tail as it is."""
    latent = slot.latent
    for c in gl.static_range(V4_CHUNKS):
        word = fetched.low if c < 4 else fetched.high
        scale = power_of_two((word >> (c % 4 * 8)) & 255)
        wide = fetched.chunks[c].to(gl.float32) * scale[:, None]
        latent.slice(c * V4_CHUNK, V4_CHUNK, 1).store(wide.to(latent.dtype))
    latent.slice(V4_CHUNKS * V4_CHUNK, V4_CHUNK, 1).store(fetched.tail)


@gluon.jit
def fetch_block(slot, parts, numbers, first, source, LAYOUTS: gl.constexpr, HOW: gl.constexpr):
    """Start loading the rows of a block: FetchedRows, or FetchedV4Rows."""
    if HOW.has_tail:
        return fetch_v4_block(slot, parts, numbers, first, source, HOW)
    else:
        return fetch_parts(slot, parts, numbers, first, source, LAYOUTS, HOW)


@gluon.jit
def dequantize_block(slot, fetched, HOW: gl.constexpr):
    """Dequantize what `fetch_block` loaded to a slot."""
    if HOW.has_tail:
        dequantize_v4_block(slot, fetched)
    else:
        dequantize_rows(slot.latent, fetched.latent, fetched.latent_scales)
        if HOW.rope > 0:
            dequantize_rows(slot.rope, fetched.rope, fetched.rope_scales)


@gluon.jit
def clear_rows(tile, numbers, first, source, HOW: gl.constexpr):
    """Store zeros instead of rows that do not count: their weights are 0, but 0 times NaN is not
    0."""
    ROWS: gl.constexpr = whole_rows(tile.shape[1])
    TOGETHER: gl.constexpr = WAVES * ROWS.threads_per_warp[0]
    at = gl.arange(0, TOGETHER, gl.SliceLayout(1, ROWS)) + first
    for i in gl.static_range(tile.shape[0] // TOGETHER):
        part = tile.slice(TOGETHER * i, TOGETHER, 0)
        number = numbers.slice(TOGETHER * i, TOGETHER, 0).load(at.type.layout)
        ok = counting(number, at + TOGETHER * i, source, HOW)
        part.store(gl.where(ok[:, None], part.load(ROWS), 0.0))
    thread_barrier()
