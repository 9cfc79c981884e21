"""Rows of an FP8 cache, each dequantized to bf16 once: all of a pool, or those that lists name.

A list is a token's rows (topk_lengths of them), or a sequence's pages (those of its cache_lengths);
what it names, a row or a page, is called a unit.

| kernel | a program takes | reads | writes |
|---|---|---|---|
| claim_kernel | LIST_COLUMNS entries of a list | them | unit and number of each, in `map` |
| place_kernel | the same | them, map | the place of each unit, at its owner; places; total |
| dequantize_kernel | ROWS rows at a time | places, cache | rows of the workspace |
| | then LIST_COLUMNS entries | them, map | the lists in terms of places |

The owner of a unit is the entry whose claim is left in the map, the last writer: nothing needs to
be cleared, since only units that are named are looked up. Where the pool is larger than the map,
units share slots, and entries whose unit lost its slot own a copy each. Owners are compacted by a
prefix sum within a block and an atomic counter among blocks, so places come in any order, on which
no result depends. If there are more than `capacity`, nothing is dequantized, and `total` tells the
attention kernels that the workspace must not be used.

Lists [[7, 3], [3, -1]] over a pool of 9 rows: entries 0 to 3; map 3: entry 1 or 2, 7: entry 0 ->
row 7 at place 0, 3 at 1, total 2, lists [[0, 1], [1, -1]].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.barriers import let_next_begin, wait_for_kernel_before
from openmla.kernels.gluon.dequantize.records import (
    CacheRows,
    Entries,
    UnitLists,
    WorkspaceRows,
)
from openmla.kernels.gluon.dequantize.rows import (
    CHUNK,
    dequantized,
    key_layout,
    load_raw,
    load_scales,
    rope_start,
)
from openmla.kernels.gluon.dequantize.v4_rows import CHUNKS as V4_CHUNKS
from openmla.kernels.gluon.dequantize.v4_rows import (
    dequantized_chunk,
    load_chunk,
    load_tail,
    places_of,
    scale_of,
)
from openmla.kernels.gluon.dequantize.v4_rows import key_layout as v4_key_layout
from openmla.kernels.gluon.dequantize.v4_rows import load_scales as load_v4_scales
from openmla.kernels.gluon.dequantize.v41_rows import load_columns, row_bytes
from openmla.kernels.gluon.dequantize.v41_rows import load_tail as load_e4m3_tail
from openmla.kernels.gluon.pages import Pages, divided

LIST_COLUMNS = gl.constexpr(512)
IN_LINE = gl.constexpr(16)  # claims in a line of the L2 cache; the map is whole lines
WARPS = gl.constexpr(4)
LIST_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # lists begin at any address


@gluon.jit
def named_units(lists, block):
    """Entries of block number `block`, LIST_COLUMNS entries of one of the UnitLists."""
    blocks = (lists.columns + LIST_COLUMNS - 1) // LIST_COLUMNS
    number = block // blocks
    count = lists.columns
    if lists.lengths_ptr is not None:
        rows = gl.load(lists.lengths_ptr + number)
        named, _row = divided(rows + (lists.rows.size - 1), lists.rows)
        count = gl.minimum(named, lists.columns)
    column = block % blocks * LIST_COLUMNS + gl.arange(0, LIST_COLUMNS, LIST_LAYOUT)
    line = lists.ptr + number.to(gl.int64) * lists.stride
    unit = gl.load(line + column, mask=column < count, other=-1)
    valid = (unit >= 0) & (unit < lists.units)
    return Entries(
        number=number * lists.columns + column,
        unit=gl.where(valid, unit, 0),
        valid=valid,
        exists=column < lists.columns,
    )


@gluon.jit
def slot_of(unit, lines):
    """The slot of a unit in the map; neighbors are 128 bytes apart. Lists name neighbors, many
    times, and stores to one line of the L2 cache wait for one another (14 ns on an H200)."""
    return unit % lines * IN_LINE + unit // lines % IN_LINE


@gluon.jit
def owner_of(map_ptr, entries, lines):
    """The number of the entry that owns the unit of each of the Entries; its own where another unit
    has the slot."""
    claim = gl.load(map_ptr + slot_of(entries.unit, lines), mask=entries.valid, other=0)
    return gl.where((claim >> 32).to(gl.int32) == entries.unit, claim.to(gl.int32), entries.number)


LISTS = ["lists_ptr", "lengths_ptr"]
LIST_COUNTS = ["columns", "stride", "units", "lines", "unit_rows", "unit_inverse"]


@gluon.jit(do_not_specialize=LIST_COUNTS, do_not_specialize_on_alignment=LISTS)
def claim_kernel(
    lists_ptr,
    lengths_ptr,
    map_ptr,
    total_ptr,
    columns,
    stride,
    units,
    lines,
    unit_rows,
    unit_inverse,
):
    """Entries that name a unit write their number into the map; the last writer owns the unit."""
    let_next_begin()
    block = gl.program_id(0)
    each = Pages(size=unit_rows, inverse=unit_inverse)
    lists = UnitLists(lists_ptr, lengths_ptr, columns, stride, units, each)
    entries = named_units(lists, block)
    claim = (entries.unit.to(gl.int64) << 32) | entries.number.to(gl.int64)
    gl.store(map_ptr + slot_of(entries.unit, lines), claim, mask=entries.valid)
    if block == 0:
        gl.store(total_ptr, 0)


# Entries that name the same unit overwrite one another's claims: any of them may own it.
claim_kernel.contended = ("map_ptr",)


@gluon.jit
def add(a, b):
    """The operator of prefix sums."""
    return a + b


@gluon.jit(do_not_specialize=[*LIST_COUNTS, "capacity"], do_not_specialize_on_alignment=LISTS)
def place_kernel(  # noqa: PLR0913
    lists_ptr,
    lengths_ptr,
    map_ptr,
    places_ptr,
    total_ptr,
    placed_ptr,
    columns,
    stride,
    units,
    lines,
    capacity,
    unit_rows,
    unit_inverse,
):
    """Compact the owners: a prefix sum gives neighboring places to the owners of a block."""
    let_next_begin()
    each = Pages(size=unit_rows, inverse=unit_inverse)
    lists = UnitLists(lists_ptr, lengths_ptr, columns, stride, units, each)
    entries = named_units(lists, gl.program_id(0))
    wait_for_kernel_before()
    mine = entries.valid & (owner_of(map_ptr, entries, lines) == entries.number)
    one = mine.to(gl.int32)
    before = gl.atomic_add(total_ptr, gl.sum(one, 0), sem="relaxed")
    place = before + gl.associative_scan(one, 0, add) - one
    known = (mine | ~entries.valid) & entries.exists
    gl.store(placed_ptr + entries.number, gl.where(entries.valid, place, -1), mask=known)
    gl.store(places_ptr + place, entries.unit, mask=mine & (place < capacity))


@gluon.jit
def take_places(lists, map_ptr, placed_ptr, lines, block):
    """Entries of the UnitLists get the places of the owners of their units."""
    entries = named_units(lists, block)
    owner = owner_of(map_ptr, entries, lines)
    others = entries.valid & (owner != entries.number)
    place = gl.load(placed_ptr + owner, mask=others, other=0)
    gl.store(placed_ptr + entries.number, place, mask=others)


@gluon.jit
def dequantize_columns(
    rows, row, out, DIMS: gl.constexpr, CACHE: gl.constexpr, LANES: gl.constexpr
):
    """Dequantize all columns (DIMS: RowColumns) of CacheRows number `row` to WorkspaceRows `out`.

    Everything is loaded before anything is stored: the compiler would not move a load before a
    store, and rows would wait for memory once for each chunk.
    """
    LATENT: gl.constexpr = DIMS.latent
    ROPE: gl.constexpr = DIMS.rope
    ROPE_IS_E4M3: gl.constexpr = ROPE > 0 and rows.rope_ptr is None
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    raw = load_raw(rows, row, 0, LATENT, CACHE, LANES)
    scales = load_scales(rows, row, 0, LATENT, CACHE, LANES)
    if ROPE_IS_E4M3:
        rope_raw = load_raw(rows, row, LATENT, ROPE, CACHE, LANES)
        rope_scales = load_scales(rows, row, LATENT, ROPE, CACHE, LANES)
    elif ROPE > 0:
        here = gl.convert_layout(row, gl.SliceLayout(1, L))
        column = gl.arange(0, ROPE, gl.SliceLayout(0, L))
        start = rope_start(rows, here, CACHE)[:, None] + column[None, :]
        rope = gl.load(start, mask=(here >= 0)[:, None], other=0.0)
    store_columns(out, gl.convert_layout(dequantized(raw, scales), L), row, 0)
    if ROPE_IS_E4M3:
        rope = gl.convert_layout(dequantized(rope_raw, rope_scales), L)
    if ROPE > 0:
        store_columns(out, rope, row, LATENT)


@gluon.jit
def dequantize_v4_columns(rows, row, out, LANES: gl.constexpr):
    """What `dequantize_columns` does, to DeepSeek-V4's rows."""
    places = places_of(rows, row)
    scales = load_v4_scales(places)
    words = ()
    for c in gl.static_range(V4_CHUNKS):
        words += (load_chunk(places, c, LANES, WARPS),)
    tail = load_tail(rows, places, LANES, WARPS)
    L: gl.constexpr = tail.type.layout
    for c in gl.static_range(V4_CHUNKS):
        columns = dequantized_chunk(words[c], scale_of(scales, c))
        store_columns(out, gl.convert_layout(columns, L), row, c * CHUNK)
    store_columns(out, tail, row, V4_CHUNKS * CHUNK)


@gluon.jit
def dequantize_v41_columns(
    rows,
    row,
    out,
    DIMS: gl.constexpr,
    CACHE: gl.constexpr,
    SCALES: gl.constexpr,
    LANES: gl.constexpr,
):
    """What `dequantize_columns` does, to rows whose scales have one byte."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    LATENT: gl.constexpr = DIMS.latent
    columns = load_columns(rows, row, LATENT, CACHE, SCALES, LANES)
    if DIMS.rope > 0:
        tail = load_e4m3_tail(rows, row, row_bytes(LATENT, SCALES), DIMS.rope, CACHE, LANES)
        store_columns(out, gl.convert_layout(tail, L), row, LATENT)
    store_columns(out, gl.convert_layout(columns, L), row, 0)


@gluon.jit
def store_columns(out, value, row, FIRST: gl.constexpr):
    """Store columns FIRST … of WorkspaceRows `out`; not those whose `row` is -1."""
    L: gl.constexpr = value.type.layout
    RL: gl.constexpr = gl.SliceLayout(1, L)
    column = gl.arange(0, value.shape[1], gl.SliceLayout(0, L)) + FIRST
    pointers = out.ptr + gl.convert_layout(out.start, RL)[:, None] + column[None, :]
    gl.store(pointers, value, mask=(gl.convert_layout(row, RL) >= 0)[:, None])


STRIDES = ["stride_page", "stride_row", "scale_page", "scale_row"]
PAGE_COUNTS = ["page_size", "page_inverse", "page_rows"]


@gluon.jit(
    do_not_specialize=[*LIST_COUNTS, *STRIDES, "blocks", "capacity", *PAGE_COUNTS],
    do_not_specialize_on_alignment=[*LISTS, "scale_ptr"],
)
def dequantize_kernel(  # noqa: PLR0913
    lists_ptr,
    lengths_ptr,
    map_ptr,
    places_ptr,
    total_ptr,
    placed_ptr,
    data_ptr,
    scale_ptr,
    rope_ptr,
    out_ptr,
    columns,
    stride,
    units,
    lines,
    blocks,
    capacity,
    unit_rows,
    unit_inverse,
    stride_page,
    stride_row,
    scale_page,
    scale_row,
    page_size,
    page_inverse,
    page_rows,
    DIMS: gl.constexpr,
    CACHE: gl.constexpr,
    SCALES: gl.constexpr,
    LANES: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Dequantize the units at `places`, or all of the pool where places_ptr is None; then rewrite
    `blocks` blocks of the lists. DIMS: RowColumns. CACHE: CacheFormat. page_rows: see CacheRows.
    SCALES: type of the scales of DeepSeek-V4.1's rows (v41_rows.py); None for others. The grid may
    have any size.
    """
    KL: gl.constexpr = (
        key_layout(CHUNK, CACHE.scale_block, LANES)
        if page_rows is None
        else v4_key_layout(LANES, WARPS)
    )
    WIDTH: gl.constexpr = DIMS.latent + DIMS.rope
    let_next_begin()
    rows = CacheRows(
        data_ptr=data_ptr,
        page_stride=stride_page,
        row_stride=stride_row,
        scale_ptr=scale_ptr,
        scale_page_stride=scale_page,
        scale_row_stride=scale_row,
        rope_ptr=rope_ptr,
        pages=Pages(size=page_size, inverse=page_inverse),
        page_rows=page_rows,
    )
    each = Pages(size=unit_rows, inverse=unit_inverse)
    count = units * unit_rows
    if places_ptr is not None:
        wait_for_kernel_before()
        total = gl.load(total_ptr)
        count = gl.where(total <= capacity, total * unit_rows, 0)
    for first in range(gl.program_id(0) * ROWS, count, gl.num_programs(0) * ROWS):
        place = first + gl.arange(0, ROWS, KL)
        row = gl.where(place < count, place, -1)
        if places_ptr is not None:
            number, within = divided(place, each)
            unit = gl.load(places_ptr + number, mask=place < count, other=-1)
            row = gl.where(place < count, unit * unit_rows + within, -1)
        out = WorkspaceRows(ptr=out_ptr, start=place.to(gl.int64) * WIDTH)
        if SCALES is not None:
            dequantize_v41_columns(rows, row, out, DIMS, CACHE, SCALES, LANES)
        elif page_rows is None:
            dequantize_columns(rows, row, out, DIMS, CACHE, LANES)
        else:
            dequantize_v4_columns(rows, row, out, LANES)
    if places_ptr is not None:
        lists = UnitLists(lists_ptr, lengths_ptr, columns, stride, units, each)
        last = gl.where(count > 0, blocks, 0)
        for block in range(gl.program_id(0), last, gl.num_programs(0)):
            take_places(lists, map_ptr, placed_ptr, lines, block)
