# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Rows of an FP8 cache that token lists name, each widened to bf16 once.

| kernel | a program takes | reads | writes |
|---|---|---|---|
| mark_kernel | a token | its list | 1 in `map` for every row it names |
| count_kernel | MAP_ROWS rows of the pool | map | how many of them are named |
| place_kernel | the same rows | map, counts | in map, the place of a named row; places; total |
| widen_kernel | ROWS places at a time | places, cache | rows of the workspace |
| remap_kernel | a token | its list, map | its list in terms of places |

A row's place is the number of named rows before it, so places keep the order of rows and nothing
depends on who comes first. Rows past `capacity` have no place in the workspace: then `total` tells
the attention kernels that the workspace must not be used.

Lists [[7, 3], [3, -1]] over a pool of 9 rows: map 0 0 0 1 0 0 0 1 0 -> places 3 at 0, 7 at 1, total
2, lists [[1, 0], [0, -1]].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.hopper.fp8_rows import (
    CHUNK,
    key_layout,
    load_raw,
    load_scales,
    rope_start,
    widened,
)

NOWHERE = gl.constexpr(-1)
LIST_COLUMNS = gl.constexpr(512)
LIST_LAYOUT = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
MAP_ROWS = gl.constexpr(2048)
MAP_LAYOUT = gl.constexpr(gl.BlockedLayout([16], [32], [4], [0]))


@gluon.jit
def named_rows(lists, token, start):
    """(column, row, whether it counts) of LIST_COLUMNS entries of a token's list."""
    indices_ptr, lengths_ptr, topk, stride, rows = lists
    count = topk
    if lengths_ptr is not None:
        count = gl.minimum(gl.load(lengths_ptr + token), topk)
    column = gl.arange(0, LIST_COLUMNS, LIST_LAYOUT) + start
    row = gl.load(indices_ptr + token.to(gl.int64) * stride + column, mask=column < count, other=-1)
    ok = (row >= 0) & (row < rows)
    return column, gl.where(ok, row, 0), ok


LISTS = ["indices_ptr", "lengths_ptr"]
LIST_COUNTS = ["topk", "stride", "rows"]


@gluon.jit(do_not_specialize=LIST_COUNTS, do_not_specialize_on_alignment=LISTS)
def mark_kernel(indices_ptr, lengths_ptr, map_ptr, topk, stride, rows):
    """Most rows are named many times: a look is cheaper than another store."""
    token = gl.program_id(0)
    lists = (indices_ptr, lengths_ptr, topk, stride, rows)
    for start in range(0, topk, LIST_COLUMNS):
        _column, row, ok = named_rows(lists, token, start)
        known = gl.load(map_ptr + row, mask=ok, other=1)
        gl.store(map_ptr + row, 1, mask=ok & (known == 0))


@gluon.jit(do_not_specialize=LIST_COUNTS, do_not_specialize_on_alignment=LISTS)
def remap_kernel(indices_ptr, lengths_ptr, map_ptr, out_ptr, topk, stride, rows):
    """Entries that do not count become -1."""
    token = gl.program_id(0)
    lists = (indices_ptr, lengths_ptr, topk, stride, rows)
    out_row = out_ptr + token.to(gl.int64) * topk
    for start in range(0, topk, LIST_COLUMNS):
        column, row, ok = named_rows(lists, token, start)
        place = gl.load(map_ptr + row, mask=ok, other=NOWHERE)
        gl.store(out_row + column, place, mask=column < topk)


@gluon.jit
def named_here(map_ptr, rows):
    """(row, 1 where it is named) of the rows of this program."""
    row = gl.program_id(0) * MAP_ROWS + gl.arange(0, MAP_ROWS, MAP_LAYOUT)
    return row, gl.load(map_ptr + row, mask=row < rows, other=0)


@gluon.jit(do_not_specialize=["rows"])
def count_kernel(map_ptr, counts_ptr, rows):
    """One number per program."""
    _row, named = named_here(map_ptr, rows)
    gl.store(counts_ptr + gl.program_id(0), gl.sum(named, 0))


@gluon.jit
def add(a, b):
    """For running sums."""
    return a + b


@gluon.jit(do_not_specialize=["rows", "capacity"])
def place_kernel(map_ptr, counts_ptr, places_ptr, total_ptr, rows, capacity):
    """Where named rows go. Sums the counts of all programs before it: a few loads."""
    block = gl.program_id(0)
    before = block * 0
    for start in range(0, block, MAP_ROWS):
        at = start + gl.arange(0, MAP_ROWS, MAP_LAYOUT)
        before += gl.sum(gl.load(counts_ptr + at, mask=at < block, other=0), 0)
    row, named = named_here(map_ptr, rows)
    place = before + gl.associative_scan(named, 0, add) - named
    here = named > 0
    gl.store(map_ptr + row, place, mask=here)
    gl.store(places_ptr + place, row, mask=here & (place < capacity))
    if block == gl.num_programs(0) - 1:
        gl.store(total_ptr, before + gl.sum(named, 0))


@gluon.jit
def widen_chunk(
    rows, row, out, FIRST: gl.constexpr, WIDTH: gl.constexpr, CACHE: gl.constexpr,
    LANES: gl.constexpr,
):  # fmt: skip
    """Columns FIRST … FIRST + WIDTH - 1 of some rows."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    raw = load_raw(rows, row, FIRST, WIDTH, CACHE, LANES)
    value = widened(raw, load_scales(rows, row, FIRST, WIDTH, CACHE, LANES))
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
def widen_kernel(  # noqa: PLR0913
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
    ROWS: gl.constexpr,
):
    """DIMS: latent and rope columns. CACHE: see fp8_rows.py. A grid of any size."""
    KL: gl.constexpr = key_layout(CHUNK, CACHE[1], LANES)
    WIDTH: gl.constexpr = DIMS[0] + DIMS[1]
    rows = (data_ptr, stride_page, stride_row, scale_ptr, scale_page, scale_row, rope_ptr)
    count = gl.minimum(gl.load(total_ptr), capacity)
    for first in range(gl.program_id(0) * ROWS, count, gl.num_programs(0) * ROWS):
        place = first + gl.arange(0, ROWS, KL)
        row = gl.load(places_ptr + place, mask=place < count, other=-1)
        out = (out_ptr, place.to(gl.int64) * WIDTH)
        for c in gl.static_range(DIMS[0] // CHUNK):
            widen_chunk(rows, row, out, c * CHUNK, CHUNK, CACHE, LANES)
        if DIMS[1] > 0 and rope_ptr is None:
            widen_chunk(rows, row, out, DIMS[0], DIMS[1], CACHE, LANES)
        elif DIMS[1] > 0:
            L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
            here = gl.convert_layout(row, gl.SliceLayout(1, L))
            column = gl.arange(0, DIMS[1], gl.SliceLayout(0, L))
            start = rope_start(rows, here, CACHE)[:, None] + column[None, :]
            rope = gl.load(start, mask=(here >= 0)[:, None], other=0.0)
            store_columns(out, rope, row, DIMS[0])
