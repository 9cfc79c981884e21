# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Where the rows of a tile's keys lie: a list of indices per token.

A source answers three questions, in the producer's layout:

| function | gives |
|---|---|
| `piece` | what tile number x is: its rows and its steps of 128 keys |
| `entries` | for 64 places of a piece, what memory holds about them (loaded a step ahead) |
| `locate` | from entries: (page, place in the page, whether there is a key) |

A row's address is then page * page stride + place * row stride, 64 bits wide.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

KEYS = gl.constexpr(64)  # of a block
STEP = gl.constexpr(128)  # keys of a step
ROWS = gl.constexpr(64)  # of a tile


@gluon.jit
def piece(x, source, shape):
    """(token, first head, first entry, entries, steps) of tile x; the halves of a token are
    neighbors, so that they find each other's rows in L2. At least one step, 0 past the last tile.
    """
    _indices_ptr, lengths_ptr, topk, stride, _rows = source
    tiles, head_blocks = shape
    token = gl.minimum(x, tiles - 1) // head_blocks
    head = x % head_blocks * ROWS
    count = topk
    if lengths_ptr is not None:
        count = gl.minimum(gl.load(lengths_ptr + token), topk)
    steps = gl.maximum((count + (STEP - 1)) // STEP, 1)
    return token, head, token.to(gl.int64) * stride, count, gl.where(x < tiles, steps, 0)


@gluon.jit
def entries(source, first, count, start, LAYOUT: gl.constexpr):
    """Indices start … start + 63 of a list; -1 past its end."""
    at = gl.arange(0, KEYS, LAYOUT) + start
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
