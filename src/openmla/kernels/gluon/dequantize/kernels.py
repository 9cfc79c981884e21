"""Rows of an FP8 cache, each dequantized to bf16 once: all of a pool, or those that lists name.

A list is a token's rows (topk_lengths of them), or a sequence's pages (those of its cache_lengths);
what it names, a row or a page of SIZE rows, is called a unit.

| kernel | a program takes | reads | writes |
|---|---|---|---|
| claim_kernel | LIST_COLUMNS entries of a list | them | unit and number of each, in `map` |
| place_kernel | the same | them, map | the place of each unit, at its owner; places; total |
| dequantize_kernel | ROWS rows at a time | places, cache | rows of the workspace |
| | then LIST_COLUMNS entries | them, map | the lists in terms of places |

The owner of a unit is the entry whose claim is left in the map: nothing needs to be cleared, since
only units that are named are looked up. Where the pool is larger than the map, units share slots,
and entries whose unit lost its slot own a copy each. Places follow one another in any order, on
which no result depends. If there are more than `capacity`, nothing is dequantized, and `total`
tells the attention kernels that the workspace must not be used.

Lists [[7, 3], [3, -1]] over a pool of 9 rows: entries 0 to 3; map 3: entry 1 or 2, 7: entry 0 ->
row 7 at place 0, 3 at 1, total 2, lists [[0, 1], [1, -1]].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.dependent import let_next_begin, wait_for_kernel_before
from openmla.kernels.gluon.dequantize.rows import (
    CHUNK,
    dequantized,
    key_layout,
    load_raw,
    load_scales,
    rope_start,
)

LIST_COLUMNS = gl.constexpr(512)
IN_LINE = gl.constexpr(16)  # claims in a line of the L2 cache; the map is whole lines
LIST_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # lists begin at any address


@gluon.jit
def named_units(lists, block, SIZE: gl.constexpr):
    """(number among the entries of all lists, unit, whether it counts, whether there is such an
    entry) of LIST_COLUMNS entries of a list."""
    lists_ptr, lengths_ptr, columns, stride, units = lists
    blocks = (columns + LIST_COLUMNS - 1) // LIST_COLUMNS
    number = block // blocks
    count = columns
    if lengths_ptr is not None:
        count = gl.minimum((gl.load(lengths_ptr + number) + (SIZE - 1)) // SIZE, columns)
    column = block % blocks * LIST_COLUMNS + gl.arange(0, LIST_COLUMNS, LIST_LAYOUT)
    line = lists_ptr + number.to(gl.int64) * stride
    unit = gl.load(line + column, mask=column < count, other=-1)
    ok = (unit >= 0) & (unit < units)
    return number * columns + column, gl.where(ok, unit, 0), ok, column < columns


@gluon.jit
def slot_of(unit, lines):
    """Where the map has a unit: neighbors 128 bytes apart. Lists name neighbors, many times, and
    stores to one line of the L2 cache wait for one another (14 ns on an H200)."""
    return unit % lines * IN_LINE + unit // lines % IN_LINE


@gluon.jit
def owner_of(map_ptr, entry, unit, ok, lines):
    """The entry that owns the unit of each entry; itself where another unit has the slot."""
    claim = gl.load(map_ptr + slot_of(unit, lines), mask=ok, other=0)
    return gl.where((claim >> 32).to(gl.int32) == unit, claim.to(gl.int32), entry)


LISTS = ["lists_ptr", "lengths_ptr"]
LIST_COUNTS = ["columns", "stride", "units", "lines"]


@gluon.jit(do_not_specialize=LIST_COUNTS, do_not_specialize_on_alignment=LISTS)
def claim_kernel(
    lists_ptr, lengths_ptr, map_ptr, total_ptr, columns, stride, units, lines, SIZE: gl.constexpr
):
    """Entries that name a unit write themselves into the map; who comes last owns it."""
    let_next_begin()
    block = gl.program_id(0)
    lists = (lists_ptr, lengths_ptr, columns, stride, units)
    entry, unit, ok, _there = named_units(lists, block, SIZE)
    claim = (unit.to(gl.int64) << 32) | entry.to(gl.int64)
    gl.store(map_ptr + slot_of(unit, lines), claim, mask=ok)
    if block == 0:
        gl.store(total_ptr, 0)


# Entries that name the same unit overwrite one another's claims: any of them may own it.
claim_kernel.contended = ("map_ptr",)


@gluon.jit
def add(a, b):
    """For running sums."""
    return a + b


@gluon.jit(do_not_specialize=[*LIST_COUNTS, "capacity"], do_not_specialize_on_alignment=LISTS)
def place_kernel(
    lists_ptr, lengths_ptr, map_ptr, places_ptr, total_ptr, placed_ptr, columns, stride, units,
    lines, capacity, SIZE: gl.constexpr,
):  # fmt: skip
    """Owners get places, next to one another for those of a block."""
    let_next_begin()
    lists = (lists_ptr, lengths_ptr, columns, stride, units)
    entry, unit, ok, there = named_units(lists, gl.program_id(0), SIZE)
    wait_for_kernel_before()
    mine = ok & (owner_of(map_ptr, entry, unit, ok, lines) == entry)
    one = mine.to(gl.int32)
    before = gl.atomic_add(total_ptr, gl.sum(one, 0), sem="relaxed")
    place = before + gl.associative_scan(one, 0, add) - one
    gl.store(placed_ptr + entry, gl.where(ok, place, -1), mask=(mine | ~ok) & there)
    gl.store(places_ptr + place, unit, mask=mine & (place < capacity))


@gluon.jit
def take_places(lists, map_ptr, placed_ptr, lines, block, SIZE: gl.constexpr):
    """Entries get the places of the owners of their units."""
    entry, unit, ok, _there = named_units(lists, block, SIZE)
    owner = owner_of(map_ptr, entry, unit, ok, lines)
    others = ok & (owner != entry)
    place = gl.load(placed_ptr + owner, mask=others, other=0)
    gl.store(placed_ptr + entry, place, mask=others)


@gluon.jit
def dequantize_columns(
    rows, row, out, DIMS: gl.constexpr, CACHE: gl.constexpr, LANES: gl.constexpr
):
    """All columns of some rows. Everything is loaded before anything is stored: the compiler would
    not move a load before a store, and rows would wait for memory once for each chunk."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    raw = load_raw(rows, row, 0, DIMS[0], CACHE, LANES)
    scales = load_scales(rows, row, 0, DIMS[0], CACHE, LANES)
    if DIMS[1] > 0 and rows[6] is None:
        rope_raw = load_raw(rows, row, DIMS[0], DIMS[1], CACHE, LANES)
        rope_scales = load_scales(rows, row, DIMS[0], DIMS[1], CACHE, LANES)
    elif DIMS[1] > 0:
        here = gl.convert_layout(row, gl.SliceLayout(1, L))
        column = gl.arange(0, DIMS[1], gl.SliceLayout(0, L))
        start = rope_start(rows, here, CACHE)[:, None] + column[None, :]
        rope = gl.load(start, mask=(here >= 0)[:, None], other=0.0)
    store_columns(out, gl.convert_layout(dequantized(raw, scales), L), row, 0)
    if DIMS[1] > 0 and rows[6] is None:
        rope = gl.convert_layout(dequantized(rope_raw, rope_scales), L)
    if DIMS[1] > 0:
        store_columns(out, rope, row, DIMS[0])


@gluon.jit
def store_columns(out, value, row, FIRST: gl.constexpr):
    """Columns FIRST … of rows of the workspace."""
    L: gl.constexpr = value.type.layout
    RL: gl.constexpr = gl.SliceLayout(1, L)
    out_ptr, start = out
    column = gl.arange(0, value.shape[1], gl.SliceLayout(0, L)) + FIRST
    pointers = out_ptr + gl.convert_layout(start, RL)[:, None] + column[None, :]
    gl.store(pointers, value, mask=(gl.convert_layout(row, RL) >= 0)[:, None])


STRIDES = ["stride_page", "stride_row", "scale_page", "scale_row"]


@gluon.jit(
    do_not_specialize=[*LIST_COUNTS, *STRIDES, "blocks", "capacity"],
    do_not_specialize_on_alignment=[*LISTS, "scale_ptr"],
)
def dequantize_kernel(  # noqa: PLR0913
    lists_ptr, lengths_ptr, map_ptr, places_ptr, total_ptr, placed_ptr, data_ptr, scale_ptr,
    rope_ptr, out_ptr, columns, stride, units, lines, blocks, capacity, stride_page, stride_row,
    scale_page, scale_row, DIMS: gl.constexpr, CACHE: gl.constexpr, LANES: gl.constexpr,
    SIZE: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Rows at `places`, or all of the pool where there are none. DIMS: latent and rope columns.
    CACHE: see rows.py. blocks: of the lists. A grid of any size."""
    KL: gl.constexpr = key_layout(CHUNK, CACHE[1], LANES)
    WIDTH: gl.constexpr = DIMS[0] + DIMS[1]
    let_next_begin()
    rows = (data_ptr, stride_page, stride_row, scale_ptr, scale_page, scale_row, rope_ptr)
    count = units * SIZE
    if places_ptr is not None:
        wait_for_kernel_before()
        total = gl.load(total_ptr)
        count = gl.where(total <= capacity, total * SIZE, 0)
    for first in range(gl.program_id(0) * ROWS, count, gl.num_programs(0) * ROWS):
        place = first + gl.arange(0, ROWS, KL)
        row = gl.where(place < count, place, -1)
        if places_ptr is not None:
            unit = gl.load(places_ptr + place // SIZE, mask=place < count, other=-1)
            row = gl.where(place < count, unit * SIZE + place % SIZE, -1)
        out = (out_ptr, place.to(gl.int64) * WIDTH)
        dequantize_columns(rows, row, out, DIMS, CACHE, LANES)
    if places_ptr is not None:
        lists = (lists_ptr, lengths_ptr, columns, stride, units)
        last = gl.where(count > 0, blocks, 0)
        for block in range(gl.program_id(0), last, gl.num_programs(0)):
            take_places(lists, map_ptr, placed_ptr, lines, block, SIZE)
