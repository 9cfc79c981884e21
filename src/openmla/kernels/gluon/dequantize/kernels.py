"""Rows of an FP8 cache that lists name, each dequantized to bf16 once.

A list is a token's rows (topk_lengths of them), or a sequence's pages (those of its cache_lengths);
what it names, a row or a page of SIZE rows, is called a unit.

| kernel | a program takes | reads | writes |
|---|---|---|---|
| mark_kernel | a list | it | 1 in `map` for every unit it names |
| count_kernel | MAP_UNITS units of the pool | map | how many of them are named |
| place_kernel | the same units | map, counts | in map, the place of a named unit; places; total |
| dequantize_kernel | ROWS rows at a time | places, cache | rows of the workspace |
| remap_kernel | a list | it, map | the list in terms of places |

A unit's place is the number of named units before it, so places keep the order of the pool and
nothing depends on who comes first. If there are more than `capacity`, nothing is dequantized, and
`total` tells the attention kernels that the workspace must not be used.

Lists [[7, 3], [3, -1]] over a pool of 9 rows: map 0 0 0 1 0 0 0 1 0 -> places 3 at 0, 7 at 1, total
2, lists [[1, 0], [0, -1]].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.dequantize.rows import (
    CHUNK,
    dequantized,
    key_layout,
    load_raw,
    load_scales,
    rope_start,
)

NOWHERE = gl.constexpr(-1)
LIST_COLUMNS = gl.constexpr(512)
LIST_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # lists begin at any address
MAP_UNITS = gl.constexpr(2048)
MAP_LAYOUT = gl.constexpr(gl.BlockedLayout([16], [32], [4], [0]))


@gluon.jit
def named_units(lists, number, start, SIZE: gl.constexpr):
    """(column, unit, whether it counts) of LIST_COLUMNS entries of a list."""
    lists_ptr, lengths_ptr, columns, stride, units = lists
    count = columns
    if lengths_ptr is not None:
        count = gl.minimum((gl.load(lengths_ptr + number) + (SIZE - 1)) // SIZE, columns)
    column = gl.arange(0, LIST_COLUMNS, LIST_LAYOUT) + start
    line = lists_ptr + number.to(gl.int64) * stride
    unit = gl.load(line + column, mask=column < count, other=-1)
    ok = (unit >= 0) & (unit < units)
    return column, gl.where(ok, unit, 0), ok


LISTS = ["lists_ptr", "lengths_ptr"]
LIST_COUNTS = ["columns", "stride", "units"]


@gluon.jit(do_not_specialize=LIST_COUNTS, do_not_specialize_on_alignment=LISTS)
def mark_kernel(lists_ptr, lengths_ptr, map_ptr, columns, stride, units, SIZE: gl.constexpr):
    """Most units are named many times: a look is cheaper than another store."""
    number = gl.program_id(0)
    lists = (lists_ptr, lengths_ptr, columns, stride, units)
    for start in range(0, columns, LIST_COLUMNS):
        _column, unit, ok = named_units(lists, number, start, SIZE)
        known = gl.load(map_ptr + unit, mask=ok, other=1)
        gl.store(map_ptr + unit, 1, mask=ok & (known == 0))


@gluon.jit(do_not_specialize=LIST_COUNTS, do_not_specialize_on_alignment=LISTS)
def remap_kernel(
    lists_ptr, lengths_ptr, map_ptr, out_ptr, columns, stride, units, SIZE: gl.constexpr
):
    """Entries that do not count become -1."""
    number = gl.program_id(0)
    lists = (lists_ptr, lengths_ptr, columns, stride, units)
    line = out_ptr + number.to(gl.int64) * columns
    for start in range(0, columns, LIST_COLUMNS):
        column, unit, ok = named_units(lists, number, start, SIZE)
        place = gl.load(map_ptr + unit, mask=ok, other=NOWHERE)
        gl.store(line + column, place, mask=column < columns)


@gluon.jit
def named_here(map_ptr, units):
    """(unit, 1 where it is named) of the units of this program."""
    unit = gl.program_id(0) * MAP_UNITS + gl.arange(0, MAP_UNITS, MAP_LAYOUT)
    return unit, gl.load(map_ptr + unit, mask=unit < units, other=0)


@gluon.jit(do_not_specialize=["units"])
def count_kernel(map_ptr, counts_ptr, units):
    """One number per program."""
    _unit, named = named_here(map_ptr, units)
    gl.store(counts_ptr + gl.program_id(0), gl.sum(named, 0))


@gluon.jit
def add(a, b):
    """For running sums."""
    return a + b


@gluon.jit(do_not_specialize=["units", "capacity"])
def place_kernel(map_ptr, counts_ptr, places_ptr, total_ptr, units, capacity):
    """Where named units go. Sums the counts of all programs before it: a few loads."""
    block = gl.program_id(0)
    before = block * 0
    for start in range(0, block, MAP_UNITS):
        at = start + gl.arange(0, MAP_UNITS, MAP_LAYOUT)
        before += gl.sum(gl.load(counts_ptr + at, mask=at < block, other=0), 0)
    unit, named = named_here(map_ptr, units)
    place = before + gl.associative_scan(named, 0, add) - named
    here = named > 0
    gl.store(map_ptr + unit, place, mask=here)
    gl.store(places_ptr + place, unit, mask=here & (place < capacity))
    if block == gl.num_programs(0) - 1:
        gl.store(total_ptr, before + gl.sum(named, 0))


@gluon.jit
def dequantize_chunk(
    rows, row, out, FIRST: gl.constexpr, WIDTH: gl.constexpr, CACHE: gl.constexpr,
    LANES: gl.constexpr,
):  # fmt: skip
    """Columns FIRST … FIRST + WIDTH - 1 of some rows."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    raw = load_raw(rows, row, FIRST, WIDTH, CACHE, LANES)
    value = dequantized(raw, load_scales(rows, row, FIRST, WIDTH, CACHE, LANES))
    store_columns(out, gl.convert_layout(value, L), row, FIRST)


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


@gluon.jit(do_not_specialize=["capacity", *STRIDES], do_not_specialize_on_alignment=["scale_ptr"])
def dequantize_kernel(  # noqa: PLR0913
    places_ptr,
    total_ptr,
    data_ptr,
    scale_ptr,
    rope_ptr,
    out_ptr,
    capacity,
    stride_page,
    stride_row,
    scale_page,
    scale_row,
    DIMS: gl.constexpr,
    CACHE: gl.constexpr,
    LANES: gl.constexpr,
    SIZE: gl.constexpr,
    ROWS: gl.constexpr,
):
    """DIMS: latent and rope columns. CACHE: see rows.py. A grid of any size."""
    KL: gl.constexpr = key_layout(CHUNK, CACHE[1], LANES)
    WIDTH: gl.constexpr = DIMS[0] + DIMS[1]
    rows = (data_ptr, stride_page, stride_row, scale_ptr, scale_page, scale_row, rope_ptr)
    total = gl.load(total_ptr)
    count = gl.where(total <= capacity, total * SIZE, 0)
    for first in range(gl.program_id(0) * ROWS, count, gl.num_programs(0) * ROWS):
        place = first + gl.arange(0, ROWS, KL)
        unit = gl.load(places_ptr + place // SIZE, mask=place < count, other=-1)
        row = gl.where(place < count, unit * SIZE + place % SIZE, -1)
        out = (out_ptr, place.to(gl.int64) * WIDTH)
        for c in gl.static_range(DIMS[0] // CHUNK):
            dequantize_chunk(rows, row, out, c * CHUNK, CHUNK, CACHE, LANES)
        if DIMS[1] > 0 and rope_ptr is None:
            dequantize_chunk(rows, row, out, DIMS[0], DIMS[1], CACHE, LANES)
        elif DIMS[1] > 0:
            L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
            here = gl.convert_layout(row, gl.SliceLayout(1, L))
            column = gl.arange(0, DIMS[1], gl.SliceLayout(0, L))
            start = rope_start(rows, here, CACHE)[:, None] + column[None, :]
            rope = gl.load(start, mask=(here >= 0)[:, None], other=0.0)
            store_columns(out, rope, row, DIMS[0])
