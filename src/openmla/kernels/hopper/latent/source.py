"""Where the rows of a tile's keys lie: a list of indices per token, or the pages of a sequence.

A `Source` answers three questions, in the producer's layout:

| function | gives |
|---|---|
| `work_item` | what a program works on next: its rows, its queries, its steps of 128 keys |
| `entries` | for 64 places of a work item, the physical rows; -1: none (loaded a step ahead) |
| `locate` | from entries: (page, row of the page, whether there is a key) |

The address of a row is page * page stride + row of the page * row stride, 64 bits wide.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.hopper.latent.pages import (
    fetch_number,
    first_cursor,
    page_entries,
    paged_work_item,
    reset_counter,
)
from openmla.kernels.hopper.latent.records import BoxStart, ListedTile, WorkItem

KEYS = gl.constexpr(64)  # of a block
STEP = gl.constexpr(128)  # keys of a step
ROWS = gl.constexpr(64)  # of a tile
LAST = gl.constexpr(64)  # tokens that are taken in the order of their lengths
WARPS = gl.constexpr(4)  # of the producer


@gluon.jit
def begin(source):
    """The cursor of a program: what `work_item` needs to find its first."""
    if source.sequences is not None:
        return first_cursor(source)
    else:
        return gl.program_id(0)


@gluon.jit
def work_item(cursor, source, counts, NEXT: gl.constexpr):
    """(`WorkItem`, steps) of the work item at the cursor, or (NEXT) of the one after it.

    Every work item has at least one step; 0 steps: the cursor is past the last one. counts: the
    `TileCounts` of lists.
    """
    if source.sequences is not None:
        return paged_work_item(cursor, source, NEXT)
    else:
        if NEXT:
            cursor = fetch_number(cursor, source.counter)
        # The halves of a token are neighbors, so that they find each other's rows in L2.
        token = gl.minimum(cursor, counts.tiles - 1) // counts.head_blocks
        if source.counter is not None and source.lengths is not None:
            token = longest_first(token, counts.tiles // counts.head_blocks, source.lengths)
        first_head = cursor % counts.head_blocks * ROWS
        count = source.most_keys
        if source.lengths is not None:
            count = gl.minimum(gl.load(source.lengths + token), source.most_keys)
        steps = gl.where(cursor < counts.tiles, gl.maximum((count + (STEP - 1)) // STEP, 1), 0)
        reset_counter(cursor, counts.tiles, source.counter)
        item = WorkItem(
            cursor=cursor,
            tile=ListedTile(token=token, first_head=first_head),
            box=BoxStart(outer=token, row=first_head),
            first_entry=token.to(gl.int64) * source.table_stride,
            skipped=cursor * 0,
            stop=count,
        )
        return item, steps


@gluon.jit
def longest_first(token, tokens, lengths_ptr):
    """The token whose turn it is: they come in order, but of the last 64 the longest list first.

    A program that fetches a long list last keeps the others waiting: 2 % of the time of 4096 lists
    of 1 to 2048 keys (H200). All lists in the order of their lengths would gain hardly more.
    """
    first = gl.maximum(tokens - LAST, 0)
    if token >= first:
        LANES: gl.constexpr = gl.BlockedLayout([LAST // 32], [32], [WARPS], [0])
        here = gl.arange(0, LAST, LANES) + first
        own = gl.load(lengths_ptr + here, mask=here < tokens, other=0)
        before = here * 0
        for i in range(first, tokens):
            other = gl.load(lengths_ptr + i)
            before += gl.where((other > own) | ((other == own) & (i < here)), 1, 0)
        token = gl.max(gl.where((before == token - first) & (here < tokens), here, 0), 0)
    return token


@gluon.jit
def entries(source, first, stop, start, LAYOUT: gl.constexpr):
    """Physical rows of places start … start + 63 of a work item; -1 from place `stop` on.

    first: where its list, or its line of the block table, begins.
    """
    at = gl.arange(0, KEYS, LAYOUT) + start
    if source.sequences is not None:
        return page_entries(source, first, at, stop)
    else:
        return gl.load(source.table + first + at, mask=at < stop, other=-1)


@gluon.jit
def locate(source, index, PAGE: gl.constexpr):
    """(page, row of the page, whether there is a key) of physical rows.

    PAGE: rows of a page; 0 where pages lie end to end, and the physical row is enough.
    """
    ok = (index >= 0) & (index < source.pool_rows)
    row = gl.where(ok, index, 0)
    page = row
    if PAGE > 0:
        page = row // PAGE
        row = row % PAGE
    return page, row, ok
