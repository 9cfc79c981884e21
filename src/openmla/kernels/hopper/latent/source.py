"""Where the rows of a tile's keys lie: a list of indices per token, or the pages of a sequence.

A source answers three questions, in the producer's layout:

| function | gives |
|---|---|
| `work_item` | what a program works on next: its rows, its queries, its steps of 128 keys |
| `entries` | for 64 places of a work item, the physical rows; -1: none (loaded a step ahead) |
| `locate` | from entries: (page, place in the page, whether there is a key) |

A source is a tuple. Elements of both kinds: 0 indices or block table; 1 lengths; 2 topk or most
keys; 3 stride of a list or of a line of the table; 4 rows of the pool; 5 offsets of the sequences'
tokens, None for lists; 13 the counter of work items, or None. Of sequences alone: 6 batch; 7
tokens; 8 heads; 9 rows of a page; 10 MASK (see kernel.py); 11 a workspace for ranges of keys, or
None; 12 tokens up to which rows are written; 14 rows of a request in the workspace.

A row's address is then page * page stride + place * row stride, 64 bits wide.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.hopper.latent.pages import (
    draw,
    finish_drawing,
    first_cursor,
    page_entries,
    paged_work_item,
)

KEYS = gl.constexpr(64)  # of a block
STEP = gl.constexpr(128)  # keys of a step
ROWS = gl.constexpr(64)  # of a tile
LAST = gl.constexpr(64)  # tokens that are taken in the order of their lengths
WARPS = gl.constexpr(4)  # of the producer


@gluon.jit
def begin(source):
    """The cursor of a program: what `work_item` needs to find its first."""
    if source[5] is not None:
        return first_cursor(source)
    else:
        return gl.program_id(0)


@gluon.jit
def work_item(cursor, source, shape, NEXT: gl.constexpr):
    """(cursor, tile, box, first entry, entries skipped, entries, steps) of the work item at the
    cursor, or (NEXT) of the one after it.

    tile: (token, first head), or what `paged_work_item` says; box: where Q begins, in the
    descriptor's first two dimensions. At least one step, 0 past the last work item.
    """
    if source[5] is not None:
        return paged_work_item(cursor, source, NEXT)
    else:
        tiles, head_blocks = shape
        lengths_ptr, topk, stride = source[1], source[2], source[3]
        if NEXT:
            cursor = draw(cursor, source)
        # The halves of a token are neighbors, so that they find each other's rows in L2.
        token = gl.minimum(cursor, tiles - 1) // head_blocks
        if source[13] is not None and lengths_ptr is not None:
            token = longest_first(token, tiles // head_blocks, lengths_ptr)
        tile = (token, cursor % head_blocks * ROWS)
        count = topk
        if lengths_ptr is not None:
            count = gl.minimum(gl.load(lengths_ptr + token), topk)
        steps = gl.where(cursor < tiles, gl.maximum((count + (STEP - 1)) // STEP, 1), 0)
        finish_drawing(cursor, tiles, source)
        return cursor, tile, tile, token.to(gl.int64) * stride, cursor * 0, count, steps


@gluon.jit
def longest_first(token, tokens, lengths_ptr):
    """The token whose turn it is: they come in order, but of the last 64 the longest list first.

    Whoever draws a long list last keeps the others waiting: 2 % of the time of 4096 lists of 1 to
    2048 keys (H200). All lists in order would gain hardly more.
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
def entries(source, first, count, start, LAYOUT: gl.constexpr):
    """Physical rows of places start … start + 63 of a work item; -1 past its end."""
    at = gl.arange(0, KEYS, LAYOUT) + start
    if source[5] is not None:
        return page_entries(source, first, at, count)
    else:
        return gl.load(source[0] + first + at, mask=at < count, other=-1)


@gluon.jit
def locate(source, index, PAGE: gl.constexpr):
    """Physical rows; PAGE 0: pages lie end to end, and a row's number is enough."""
    ok = (index >= 0) & (index < source[4])
    row = gl.where(ok, index, 0)
    page = row
    if PAGE > 0:
        page = row // PAGE
        row = row % PAGE
    return page, row, ok
