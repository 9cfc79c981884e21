"""Where the rows of a tile's keys lie: a list of indices per token, or the pages of a sequence.

A `Source` answers three questions, in the producer's layout:

| function | gives |
|---|---|
| `work_item` | what a program works on next: its rows, its queries, its steps of 128 keys |
| `entries` | for 64 places of a work item, the physical rows; -1: none (loaded a step ahead) |
| `locate` | from entries: (page, row of the page, whether there is a key) |

The address of a row is page * page stride + row of the page * row stride, 64 bits wide.

Whole sequences (dense prefill in latent form, over the pages of a cache): a row of scores is one
head of one token, heads fastest, so 20 or 96 heads leave no row idle. A request makes tiles x
ranges work items: tiles of 64 rows, ranges of its keys (one, unless it has few rows and many keys:
see `keys_of_range`). Work items are numbered request by request; inside a request by range, so that
the tiles of a range find its rows in L2, and by tile from the last to the first, so that the
longest of a causal request come first. Tokens after the last sequence belong to one more request,
number `batch`, that has no keys, so every row of the outputs is written (only in the last launch of
a call: `rest_q` is 0 in the others). 20 heads, cu_seqlens_q [0, 5, 7], 8 tokens:

| work item | 0 | 1 | 2 | 3 |
|---|---|---|---|---|
| sequence | 0 | 0 | 1 | 2 (no keys) |
| rows of it | 64-99 | 0-63 | 0-39 | 0-19 |

Lengths are only known on the device. To find work item x, a program looks at 32 requests at a time,
one per lane, and bisects; it remembers where it was (its `Cursor`).

The rows of a range that is not all of its request's keys go to a workspace, unnormalized, for
merge.py. The rows of range p begin p x (rows of the request) after the request's first, and each
request has `part_rows` rows of the workspace, the most that one can need.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.requests import CHUNK, cut, owner, span_of, sum_before
from openmla.kernels.hopper.latent.records import (
    CAUSAL,
    LISTED,
    BoxEntry,
    BoxStart,
    Cursor,
    ListedTile,
    RangeTile,
    Requests,
    WorkItem,
)
from openmla.planning import latent_split as rule

ROWS = gl.constexpr(64)  # of a tile
KEYS = gl.constexpr(64)  # of a block
STEP = gl.constexpr(128)  # keys of a step
LAST = gl.constexpr(64)  # tokens that are taken in the order of their lengths
WARPS = gl.constexpr(4)  # of the producer
# See LatentSplit for these.
MIN_RANGE = gl.constexpr(rule.MIN_RANGE)
SHORT = gl.constexpr(rule.SHORT)
KEYS_PER_ROW = gl.constexpr(rule.KEYS_PER_ROW)
FREE_ROWS = gl.constexpr(rule.FREE_ROWS)
PART_ROWS = gl.constexpr(rule.MOST_PART_ROWS)
NEVER = gl.constexpr(2**20)  # rows of a request that is not split


@gluon.jit
def requests_of(source):
    """The `Requests` of a source whose keys are those of sequences."""
    return Requests(
        cu_seqlens_q=source.sequences.cu_seqlens_q,
        lengths=source.lengths,
        most_keys=source.most_keys,
        batch=source.sequences.batch,
        total_q=source.sequences.total_q,
        rest_q=source.sequences.rest_q,
    )


@gluon.jit
def request_of(number, requests):
    """(first token, tokens, keys) of one or several requests of `Requests`, by their numbers."""
    here = gl.minimum(number, requests.batch)
    start = gl.load(requests.cu_seqlens_q + here)
    stop = gl.load(requests.cu_seqlens_q + gl.minimum(here + 1, requests.batch))
    stop = gl.where(here < requests.batch, stop, requests.rest_q)
    start, tokens = span_of(start, stop, requests.total_q)
    keys = gl.load(requests.lengths + here, mask=number < requests.batch, other=0)
    tokens = gl.where(number <= requests.batch, tokens, 0)
    return start, tokens, cut(keys, requests.most_keys)


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
    """How many work items requests first … first + CHUNK - 1 make, one request per lane."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    number = first + gl.arange(0, CHUNK, LANES)
    _start, tokens, keys = request_of(number, requests_of(source))
    rows = tokens * source.sequences.heads
    tiles = (rows + (ROWS - 1)) // ROWS
    parts, _each = ranges_of(rows, keys, source.part_rows is not None)
    return tiles * parts


@gluon.jit
def fetch_number(x, counter):
    """The number of a program's next work item: fetched from the atomic counter, or without one
    the number that follows x when all programs take turns."""
    if counter is not None:
        return gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
    else:
        return x + gl.num_programs(0)


@gluon.jit
def reset_counter(x, total, counter):
    """Set the atomic counter back to 0 if x is the last number that is fetched from it.

    Each of `total` work items is followed by one fetch, the last of each program past the end; the
    numbers with which programs begin are not fetched.
    """
    if counter is not None:  # noqa: SIM102 - decided when compiled
        if x - gl.num_programs(0) == total - 1:
            gl.store(counter, 0)


@gluon.jit
def first_cursor(source):
    """The `Cursor` with which a program begins."""
    x = gl.program_id(0)
    return Cursor(number=x, chunk=x * 0, before=x * 0, of_requests=work_items(x * 0, source, WARPS))


@gluon.jit
def paged_work_item(cursor, source, NEXT: gl.constexpr):
    """What source.work_item returns, for sequences; the tile is a `RangeTile`."""
    x, chunk, before, of_requests = cursor
    if NEXT:
        x = fetch_number(x, source.counter)
    heads = source.sequences.heads
    SPLIT: gl.constexpr = source.part_rows is not None
    size = gl.sum(of_requests, 0)
    while (x >= before + size) & (chunk + CHUNK <= source.sequences.batch):
        before += size
        chunk += CHUNK
        of_requests = work_items(chunk, source, WARPS)
        size = gl.sum(of_requests, 0)
    lane = owner(x - before, of_requests, WARPS)
    sequence = chunk + lane
    number = x - before - sum_before(lane, of_requests, WARPS)
    start, q_len, keys = request_of(sequence, requests_of(source))
    rows = q_len * heads
    tiles = gl.maximum((rows + (ROWS - 1)) // ROWS, 1)
    parts, each = ranges_of(rows, keys, SPLIT)
    row = (tiles - 1 - number % tiles) * ROWS
    skipped = x * 0
    slot = x * 0 - 1
    stop = keys
    if SPLIT:
        part = number // tiles
        skipped = part * each
        stop = gl.minimum(skipped + each, keys)
        slot = gl.where(parts > 1, sequence * source.part_rows + part * rows + row, -1)
    if source.sequences.mask == CAUSAL:
        seen = keys - q_len + 1
        whole = gl.minimum(seen + row // heads, stop)
        count = gl.minimum(seen + (gl.minimum(row + ROWS, rows) - 1) // heads, stop)
    else:
        seen = keys
        whole = stop
        count = stop
    steps = gl.maximum((count - skipped + (STEP - 1)) // STEP, 1)
    steps = gl.where(x < before + size, steps, 0)
    tile = RangeTile(
        first_token=start,
        first_row=row,
        rows=rows,
        seen=seen - skipped,
        whole=whole - skipped,
        keys=stop - skipped,
        slot=slot,
    )
    reset_counter(x, before + size, source.counter)
    item = WorkItem(
        cursor=Cursor(number=x, chunk=chunk, before=before, of_requests=of_requests),
        tile=tile,
        box=BoxStart(outer=x * 0, row=start * heads + row),
        first_entry=sequence.to(gl.int64) * source.table_stride,
        skipped=skipped,
        stop=count,
    )
    return item, steps


@gluon.jit
def page_entries(source, first, at, stop):
    """Physical rows of keys number `at` of a sequence; -1 from key `stop` on.

    first: where the sequence's line of the block table begins.
    """
    size = source.sequences.page_size
    page = gl.load(source.table + first + at // size, mask=at < stop, other=0)
    return gl.where(at < stop, page * size + at % size, -1)


@gluon.jit
def box_entry(source, first, at, stop):
    """The `BoxEntry` of the block of keys that begins with number `at`; see `page_entries`."""
    size = source.sequences.page_size
    page = gl.load(source.table + first + at // size, mask=stop > at, other=0)
    return BoxEntry(row=page * size + at % size, keys=gl.minimum(stop - at, KEYS))


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


@gluon.jit
def hide_unseen(S, tile, first, heads, MASK: gl.constexpr):
    """Scores of keys `first` … of a sequence's tile, -inf for keys that a row does not see."""
    SL: gl.constexpr = S.type.layout
    if first + S.shape[1] > tile.whole:
        key = gl.arange(0, S.shape[1], gl.SliceLayout(0, SL)) + first
        last = gl.zeros([S.shape[0]], gl.int32, gl.SliceLayout(1, SL)) + tile.keys
        if MASK == CAUSAL:
            row = gl.arange(0, S.shape[0], gl.SliceLayout(1, SL)) + tile.first_row
            last = gl.minimum(tile.seen + row // heads, last)
        S = gl.where(key[None, :] < last[:, None], S, float("-inf"))
    return S


@gluon.jit
def masked(S, missing, validity, b, tile, first, heads, MASK: gl.constexpr):
    """Scores with -inf for keys that are not there or not seen.

    S holds the scores of block b, which are keys `first` … of the tile. A block that misses no key
    and that all rows see is left alone.
    """
    if MASK == LISTED:
        SL: gl.constexpr = S.type.layout
        if missing != 0:
            S = S + validity.bias.index(b).load(gl.SliceLayout(0, SL))[None, :]
        return S
    else:
        return hide_unseen(S, tile, first, heads, MASK)
