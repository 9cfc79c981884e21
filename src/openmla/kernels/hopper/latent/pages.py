"""Tiles of whole sequences: dense prefill in latent form, over the pages of a cache.

A row of scores is one head of one token, heads fastest, so 20 or 96 heads leave no row idle. A
request makes tiles x ranges work items: tiles of 64 rows, ranges of its keys (one, unless it has
few rows and many keys: see `keys_of_range`). Work items are numbered request by request; inside a
request by range, so that the tiles of a range find its rows in L2, and by tile from the last to the
first: of a causal request the longest come first. Tokens after the last sequence belong to one more
request, number `batch`, that has no keys, so every row of the outputs is written (only in the last
launch of a call: `rest_q` is 0 in the others). 20 heads, cu_seqlens_q [0, 5, 7], 8 tokens:

| work item | 0 | 1 | 2 | 3 |
|---|---|---|---|---|
| sequence | 0 | 0 | 1 | 2 (no keys) |
| rows of it | 64-99 | 0-63 | 0-39 | 0-19 |

Lengths are only known on the device. Whoever needs work item x looks at 32 requests at a time, one
per lane, and bisects; a program remembers where it was (its cursor).

The rows of a range that is not all of its request's keys go to a workspace, unnormalized, for
merge.py: those of range p begin p x (rows of the request) after the request's first, and those of
each request `part_rows`, the most that one can have, after those of the one before.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.offsets import cut, span_of
from openmla.kernels.hopper.dense.tiles import CHUNK, owner, sum_before
from openmla.planning import latent_split as rule

ROWS = gl.constexpr(64)  # of a tile
KEYS = gl.constexpr(64)  # of a block
STEP = gl.constexpr(128)  # keys of a step
WARPS = gl.constexpr(4)  # of the producer
# See LatentSplit for these.
MIN_RANGE = gl.constexpr(rule.MIN_RANGE)
SHORT = gl.constexpr(rule.SHORT)
KEYS_PER_ROW = gl.constexpr(rule.KEYS_PER_ROW)
FREE_ROWS = gl.constexpr(rule.FREE_ROWS)
PART_ROWS = gl.constexpr(rule.MOST_PART_ROWS)
NEVER = gl.constexpr(2**20)  # rows of a request that is not split


@gluon.jit
def request_of(request, source):
    """(first token, tokens, keys) of a request, or of several."""
    lengths_ptr, most_keys = source[1], source[2]
    cu_ptr, batch, total_q, rest_q = source[5], source[6], source[7], source[12]
    here = gl.minimum(request, batch)
    start = gl.load(cu_ptr + here)
    stop = gl.load(cu_ptr + gl.minimum(here + 1, batch))
    start, tokens = span_of(start, gl.where(here < batch, stop, rest_q), total_q)
    keys = gl.load(lengths_ptr + here, mask=request < batch, other=0)
    return start, gl.where(request <= batch, tokens, 0), cut(keys, most_keys)


@gluon.jit
def keys_of_range(rows, keys):
    """Keys of a range, from the request's own rows and keys alone: see LatentSplit."""
    rows = gl.maximum(gl.minimum(rows, NEVER), 1)
    keys = gl.maximum(keys, 1)
    least = gl.maximum(gl.maximum(SHORT // keys, KEYS_PER_ROW * (rows - FREE_ROWS)), MIN_RANGE)
    count = gl.maximum(gl.minimum(keys // least, PART_ROWS // rows), 1)
    return ((keys - 1) // count // STEP + 1) * STEP


@gluon.jit
def ranges_of(rows, keys, SPLIT: gl.constexpr):
    """(ranges of a request, keys of each)."""
    each = keys
    parts = rows * 0 + 1
    if SPLIT:
        each = keys_of_range(rows, keys)
        parts = gl.maximum((keys + each - 1) // each, 1)
    return parts, each


@gluon.jit
def work_items(first, source, NW: gl.constexpr):
    """Of requests first … first + CHUNK - 1, one per lane: their work items."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    _start, tokens, keys = request_of(first + gl.arange(0, CHUNK, LANES), source)
    rows = tokens * source[8]
    tiles = (rows + (ROWS - 1)) // ROWS
    parts, _each = ranges_of(rows, keys, source[11] is not None)
    return tiles * parts


@gluon.jit
def draw(x, source):
    """The number of a program's next work item: the next that nobody has, or without a counter the
    one that follows number x when all programs take turns."""
    counter = source[13]
    if counter is not None:
        return gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
    else:
        return x + gl.num_programs(0)


@gluon.jit
def finish_drawing(x, total, source):
    """Put the counter back to 0, if x is the last number that was drawn: of `total` work items all
    but the first of each program, and one more number for each that has done any."""
    counter = source[13]
    if counter is not None:  # noqa: SIM102 - decided when compiled
        if x - gl.num_programs(0) == total - 1:
            gl.store(counter, 0)


@gluon.jit
def first_cursor(source):
    """Where a program begins: its work item; the chunk of requests at hand, the work items before
    it; and what `work_items` says of the chunk."""
    x = gl.program_id(0)
    return x, x * 0, x * 0, work_items(x * 0, source, WARPS)


@gluon.jit
def paged_work_item(cursor, source, NEXT: gl.constexpr):
    """What source.work_item returns.

    The tile is described by its request's first token and the tile's first row; the rows of the
    request; then, counted from the first key of its range, the keys that a row of the first token
    sees, the keys that all rows of the tile see, the keys there are; and where its rows begin in
    the workspace, -1 if it sees all keys of the request.
    """
    x, chunk, base, every = cursor
    if NEXT:
        x = draw(x, source)
    stride, batch, heads = source[3], source[6], source[8]
    size = gl.sum(every, 0)
    while (x >= base + size) & (chunk + CHUNK <= batch):
        base += size
        chunk += CHUNK
        every = work_items(chunk, source, WARPS)
        size = gl.sum(every, 0)
    lane = owner(x - base, every, WARPS)
    sequence = chunk + lane
    number = x - base - sum_before(lane, every, WARPS)
    start, q_len, keys = request_of(sequence, source)
    rows = q_len * heads
    tiles = gl.maximum((rows + (ROWS - 1)) // ROWS, 1)
    parts, each = ranges_of(rows, keys, source[11] is not None)
    row = (tiles - 1 - number % tiles) * ROWS
    skipped = x * 0
    slot = x * 0 - 1
    stop = keys
    if source[11] is not None:
        part = number // tiles
        skipped = part * each
        stop = gl.minimum(skipped + each, keys)
        slot = gl.where(parts > 1, sequence * source[14] + part * rows + row, -1)
    if source[10] == 2:
        seen = keys - q_len + 1
        whole = gl.minimum(seen + row // heads, stop)
        count = gl.minimum(seen + (gl.minimum(row + ROWS, rows) - 1) // heads, stop)
    else:
        seen = keys
        whole = stop
        count = stop
    steps = gl.maximum((count - skipped + (STEP - 1)) // STEP, 1)
    steps = gl.where(x < base + size, steps, 0)
    tile = (start, row, rows, seen - skipped, whole - skipped, stop - skipped, slot)
    finish_drawing(x, base + size, source)
    cursor = (x, chunk, base, every)
    box = (x * 0, start * heads + row)
    return cursor, tile, box, sequence.to(gl.int64) * stride, skipped, count, steps


@gluon.jit
def page_entries(source, first, at, count):
    """Physical rows of a sequence's keys number `at`; -1 past the last that counts."""
    size = source[9]
    page = gl.load(source[0] + first + at // size, mask=at < count, other=0)
    return gl.where(at < count, page * size + at % size, -1)


@gluon.jit
def box_entry(source, first, at, count):
    """(physical row of key number `at`, how many keys follow it in its block, itself counted)."""
    size = source[9]
    page = gl.load(source[0] + first + at // size, mask=count > at, other=0)
    return page * size + at % size, gl.minimum(count - at, KEYS)


@gluon.jit
def hide_unseen(S, tile, first, heads, CAUSAL: gl.constexpr):
    """-inf for keys that a row does not see; S holds the scores of keys `first` … of a range."""
    row0, seen, whole, keys = tile[1], tile[3], tile[4], tile[5]
    SL: gl.constexpr = S.type.layout
    if first + S.shape[1] > whole:
        key = gl.arange(0, S.shape[1], gl.SliceLayout(0, SL)) + first
        last = gl.zeros([S.shape[0]], gl.int32, gl.SliceLayout(1, SL)) + keys
        if CAUSAL:
            row = gl.arange(0, S.shape[0], gl.SliceLayout(1, SL)) + row0
            last = gl.minimum(seen + row // heads, last)
        S = gl.where(key[None, :] < last[:, None], S, float("-inf"))
    return S
