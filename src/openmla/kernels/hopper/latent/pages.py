"""Tiles of whole sequences: dense prefill in latent form, over the pages of a cache.

A row of scores is one head of one token, heads fastest, so 20 or 96 heads leave no row idle.
Sequence b owns the tile numbers from first_tile(b) to first_tile(b + 1) - 1: enough for its rows,
at least one, found without knowing the lengths on the host. Tokens after the last sequence belong
to one more, number `batch`, that has no keys, so every row of the outputs is written. 20 heads,
cu_seqlens_q [0, 5, 7], 8 tokens:

| tile | 0 | 1 | 2 | 3 |
|---|---|---|---|---|
| sequence | 0 | 0 | 1 | 2 (no keys) |
| rows of it | 0-63 | 64-99 | 0-39 | 0-19 |

Programs walk from the last tile to the first: of a causal sequence the longest come first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(64)  # of a tile
STEP = gl.constexpr(128)  # keys of a step


@gluon.jit
def first_tile(sequence, cu_ptr, heads):
    """Number of a sequence's first tile."""
    return (gl.load(cu_ptr + sequence).to(gl.int64) * heads // ROWS).to(gl.int32) + sequence


@gluon.jit
def sequence_of(tile, cu_ptr, batch, heads):
    """The last sequence whose first tile is not after `tile`, by bisection."""
    low = tile * 0
    high = low + batch
    while low < high:
        middle = (low + high + 1) // 2
        before = first_tile(middle, cu_ptr, heads) <= tile
        low = gl.where(before, middle, low)
        high = gl.where(before, high, middle - 1)
    return low


@gluon.jit
def rows_of_tile(tile, source):
    """(sequence, its first token, its tokens, its keys, the tile's first row)."""
    lengths_ptr, most_keys = source[1], source[2]
    cu_ptr, batch, total_q, heads = source[5], source[6], source[7], source[8]
    sequence = sequence_of(tile, cu_ptr, batch, heads)
    start = gl.load(cu_ptr + sequence)
    stop = gl.load(cu_ptr + gl.minimum(sequence + 1, batch))
    stop = gl.minimum(gl.where(sequence < batch, stop, total_q), total_q)
    keys = gl.load(lengths_ptr + sequence, mask=sequence < batch, other=0)
    keys = gl.maximum(gl.minimum(keys, most_keys), 0)
    row = (tile - first_tile(sequence, cu_ptr, heads)) * ROWS
    return sequence, start, gl.maximum(stop - start, 0), keys, row


@gluon.jit
def paged_work_item(x, source, tiles):
    """What sparse_source.work item returns, for the first tile from number x on that has rows.

    The tile is described by its sequence's first token and the tile's first row; the rows of the
    sequence; the keys that a row of the first token sees; the keys that all rows of the tile see;
    the keys of the sequence.
    """
    stride, heads = source[3], source[8]
    programs = gl.num_programs(0)
    sequence, start, q_len, keys, row = rows_of_tile(gl.maximum(tiles - 1 - x, 0), source)
    while (x < tiles) & (row >= q_len * heads):
        x += programs
        sequence, start, q_len, keys, row = rows_of_tile(gl.maximum(tiles - 1 - x, 0), source)
    rows = q_len * heads
    if source[10] == 2:
        seen = keys - q_len + 1
        whole = gl.minimum(seen + row // heads, keys)
        count = gl.minimum(seen + (gl.minimum(row + ROWS, rows) - 1) // heads, keys)
    else:
        seen = keys
        whole = keys
        count = keys
    steps = gl.where(x < tiles, gl.maximum((count + (STEP - 1)) // STEP, 1), 0)
    tile = (start, row, rows, seen, whole, keys)
    return x, tile, (x * 0, start * heads + row), sequence.to(gl.int64) * stride, count, steps


@gluon.jit
def page_entries(source, first, at, count):
    """Physical rows of a sequence's keys number `at`; -1 past the last that counts."""
    size = source[9]
    page = gl.load(source[0] + first + at // size, mask=at < count, other=0)
    return gl.where(at < count, page * size + at % size, -1)


@gluon.jit
def hide_unseen(S, tile, first, heads, CAUSAL: gl.constexpr):
    """-inf for keys that a row does not see; S holds the scores of keys `first` …"""
    _token, row0, _rows, seen, whole, keys = tile
    SL: gl.constexpr = S.type.layout
    if first + S.shape[1] > whole:
        key = gl.arange(0, S.shape[1], gl.SliceLayout(0, SL)) + first
        last = gl.zeros([S.shape[0]], gl.int32, gl.SliceLayout(1, SL)) + keys
        if CAUSAL:
            row = gl.arange(0, S.shape[0], gl.SliceLayout(1, SL)) + row0
            last = gl.minimum(seen + row // heads, last)
        S = gl.where(key[None, :] < last[:, None], S, float("-inf"))
    return S
