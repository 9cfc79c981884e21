"""Where the rows of a tile's keys lie: a list of indices per token, or the pages of a sequence.

A `Source` answers four questions, in the producer's layout:

| function | gives |
|---|---|
| `first_work`, `find_work` | the work item that a program begins with, and the next one |
| `work_item` | its rows, its queries, its steps of 128 keys |
| `entries` | for 64 places of a work item, the physical rows; -1: none (loaded a step ahead) |
| `locate` | from entries: (page, row of the page, whether there is a key) |

The address of a row is page * page stride + row of the page * row stride, 64 bits wide.

Whole sequences (dense prefill in latent form, over the pages of a cache): a row of scores is one
head of one token, heads fastest, so 20 or 96 heads leave no row idle. A request makes tiles x
ranges work items: tiles of 64 rows, ranges of its keys (one, unless it has few rows and many keys:
see `ranges_of`). Tokens after the last sequence belong to one more request, number `batch`,
that has no keys, so every row of the outputs is written (only in the last launch of a call:
`rest_q` is 0 in the others).

A program that begins a long work item last keeps all others waiting, so long ones are numbered
before short ones, among 32 or 128 requests at a time: by rank, which is the number of steps in
units of the longest's thirty-second. All ranges of a request but its last are equally long, so a
request has two ranks. Inside a rank work items are numbered request by request; inside a request by
range, so that the tiles of a range find its rows in L2, and by tile from the last to the first,
since the last of a causal request sees the most keys. 20 heads, cu_seqlens_q [0, 5, 7], 8 tokens,
cache_lengths [200, 1000]:

| work item | 0 | 1 | 2 | 3 |
|---|---|---|---|---|
| sequence | 1 | 0 | 0 | 2 (no keys) |
| rows of it | 0-39 | 64-99 | 0-63 | 0-19 |

H200, 128 requests of 1 to 8192 keys at random, 128 heads: 1.35 times as fast as in the order of
requests. Lengths are only known on the device: to find work item x, a program counts the work items
of a chunk of requests by rank and bisects. It remembers which chunk it was at (`Found`).

That takes hundreds of instructions, and those that have not run yet are fetched slowly: 3 to 6
microseconds. So a program begins with a work item for which it looks at one request alone: requests
take turns, `mean_tiles` programs each (`Beginning`), and what they begin with is not numbered.
Programs for which their request has no work item left look for a number at once. All others search
once without taking a number while the rows of their first step are on their way, which brings the
code into the instruction cache (rows.step_ahead). With static scheduling, where no numbers are
fetched, program x begins with number x.

Ranges, and where their rows lie in the workspace: kernels/gluon/ranges/rule.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.pages import divided
from openmla.kernels.gluon.ranges.records import Requests
from openmla.kernels.gluon.ranges.rule import ranges_of, request_of
from openmla.kernels.gluon.scores import MINUS_INF, opaque_zero
from openmla.kernels.hopper.latent.records import (
    CAUSAL,
    FULL,
    LISTED,
    WINDOW,
    Beginning,
    BoxEntry,
    BoxStart,
    Found,
    ListedTile,
    RangeTile,
    TokenList,
    TokenRange,
    WindowTile,
    Work,
    WorkItem,
)
from openmla.planning import latent_split as rule

ROWS = gl.constexpr(64)  # of a tile
KEYS = gl.constexpr(64)  # of a block
STEP = gl.constexpr(128)  # keys of a step
LAST = gl.constexpr(64)  # last tokens, which are taken in the order of their lengths
WARPS = gl.constexpr(4)  # of the producer
RANKS = gl.constexpr(32)
# Logarithm of a number of LatentSplit, which is a power of two.
STEP_BITS = gl.constexpr(rule.STEP.bit_length() - 1)


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
def steps_of(keys):
    """Steps of a work item over so many keys."""
    return gl.maximum((keys + (STEP - 1)) >> STEP_BITS, 1)


@gluon.jit
def lanes(CHUNK: gl.constexpr):
    """0 … CHUNK - 1: the requests of a chunk. Every warp has them all, so that none has to wait for
    another."""
    return gl.arange(0, CHUNK, gl.BlockedLayout([CHUNK // 32], [32], [WARPS], [0]))


@gluon.jit
def tiles_of(rows):
    """Tiles of requests with so many rows."""
    return (rows + (ROWS - 1)) // ROWS


@gluon.jit
def beginning_of(x, source):
    """The `Beginning` of program x. Requests take turns, `mean_tiles` programs each."""
    each = source.sequences.mean_tiles
    batch = gl.maximum(source.sequences.batch, 1)
    slot = x // each
    turn = slot // batch
    return Beginning(request=slot - turn * batch, turn=turn, number=x - slot * each + turn * each)


@gluon.jit
def begun_with(number, tiles, parts, source):
    """How many work items of request `number` programs begin with: the first ones, of its full
    ranges or of its only one. None where programs take turns."""
    if source.counter is not None:
        each = source.sequences.mean_tiles
        missing = beginning_of(gl.num_programs(0), source)  # the program after the last
        most = (missing.turn + gl.where(number < missing.request, 1, 0)) * each
        most = gl.where(number == missing.request, missing.number, most)
        most = gl.where(number < source.sequences.batch, most, 0)
        return gl.minimum(most, tiles * gl.maximum(parts - 1, 1))
    else:
        return tiles * 0


@gluon.jit
def work_of(first, source, CHUNK: gl.constexpr):
    """`Work` of the chunk of requests that begins with number `first`."""
    numbers = first + lanes(CHUNK)
    _start, tokens, keys = request_of(numbers, requests_of(source))
    rows = tokens * source.sequences.heads
    tiles = tiles_of(rows)
    if source.window is not None:
        keys = gl.minimum(keys, source.window + ROWS)  # of a tile, at most
    parts, bits = ranges_of(rows, keys, source.range_bits, source.part_rows is not None)
    full = 1 << (bits - STEP_BITS)
    last = steps_of(keys - gl.where(parts > 1, (parts - 1) << bits, 0))
    longest = gl.max(gl.where(tiles > 0, gl.where(parts > 1, full, last), 1), 0)
    unit = (RANKS - 1) / longest.to(gl.float32)
    begun = begun_with(numbers, tiles, parts, source)
    return Work(
        full=gl.maximum(tiles * (parts - 1) - begun, 0),
        full_rank=rank_of(full, unit),
        last=gl.where(parts > 1, tiles, tiles - begun),
        last_rank=rank_of(last, unit),
    )


@gluon.jit
def no_work(CHUNK: gl.constexpr):
    """`Work` of a chunk that has none."""
    zero = lanes(CHUNK) * 0
    return Work(full=zero, full_rank=zero, last=zero, last_rank=zero)


@gluon.jit
def rank_of(steps, unit):
    """The rank of work items of so many steps, from 0 to RANKS - 1. unit: RANKS - 1, divided by the
    steps of the longest."""
    return gl.minimum((steps.to(gl.float32) * unit).to(gl.int32), RANKS - 1)


@gluon.jit
def ranked(work, rank):
    """Work items of each request of `Work` that have this rank or a higher one."""
    full = gl.where(work.full_rank >= rank, work.full, 0)
    return full + gl.where(work.last_rank >= rank, work.last, 0)


@gluon.jit
def plus(a, b):
    """The operator of prefix sums."""
    return a + b


@gluon.jit
def find_ranked(x, work, CHUNK: gl.constexpr):
    """(request of the chunk, number, full) of work item x of a chunk: it is the number-th work item
    of its request that has its rank, and the first `full` of those are full ranges."""
    rank = x * 0
    bit = opaque_zero() + RANKS // 2
    while bit > 0:  # not unrolled: the less code is fetched, the faster
        tried = rank + bit
        rank = gl.where(x < gl.sum(ranked(work, tried), 0), tried, rank)
        bit = bit >> 1
    higher = ranked(work, rank + 1)
    here = ranked(work, rank) - higher
    before = gl.associative_scan(here, 0, plus) - here + gl.sum(higher, 0)
    begun = before <= x  # the last such request has it
    lane = gl.max(gl.where(begun, lanes(CHUNK), 0), 0)
    is_full = (work.full_rank == rank) & (lanes(CHUNK) == lane)
    full = gl.max(gl.where(is_full, work.full, 0), 0)
    return lane, x - gl.max(gl.where(begun, before, 0), 0), full


@gluon.jit
def fetch_number(x, begin, counter):
    """The number of a program's next work item: fetched from the atomic counter, from `begin` on,
    or without one the number that follows x when all programs take turns."""
    if counter is not None:
        return gl.atomic_add(counter, 1, sem="relaxed") + begin
    else:
        return x + gl.num_programs(0)


@gluon.jit
def reset_counter(x, total, counter):
    """Set the atomic counter back to 0 if x is the last number that is fetched from it.

    Of lists each of `total` work items is followed by one fetch, the last of each program past the
    end; the numbers with which programs begin are not fetched, and are the first. Of sequences
    `total` work items are fetched, and each program fetches once more.
    """
    if counter is not None:  # noqa: SIM102 - decided when compiled
        if x - gl.num_programs(0) == total - 1:
            gl.store(counter, 0)


@gluon.jit
def find_paged(found, source, NEXT, CHUNK: gl.constexpr):
    """`find_work` for sequences: the `Found` of the next work item."""
    x, chunk, before = found.number, found.chunk, found.before
    if NEXT:
        x = fetch_number(x, 0, source.counter)
    work = no_work(CHUNK)
    size = x * 0
    beyond = x >= 0
    while beyond:  # runs at least once, so that work_of is inlined once
        work = work_of(chunk, source, CHUNK)
        size = gl.sum(work.full + work.last, 0)
        beyond = (x >= before + size) & (chunk + CHUNK <= source.sequences.batch)
        before = gl.where(beyond, before + size, before)
        chunk = gl.where(beyond, chunk + CHUNK, chunk)
    lane, within, full = find_ranked(x - before, work, CHUNK)
    reset_counter(x, before + size, source.counter)
    return Found(
        number=x,
        chunk=chunk,
        before=before,
        sequence=gl.where(x < before + size, chunk + lane, -1),
        within=within,
        full=full,
    )


@gluon.jit
def number_in_request(found, begun, FIRST: gl.constexpr):
    """(number of a work item among those of its request that have its rank, whether it exists).

    The first `begun` numbers are those that programs begin with (FIRST); `Found` counts from there.
    """
    number = found.within
    exists = found.sequence >= 0
    if FIRST:
        exists &= number < begun
    else:
        number += begun
    return number, exists


@gluon.jit
def windowed_work_item(found, source, FIRST: gl.constexpr):
    """`work_item` for sequences with windows: the tile is a `WindowTile`. No key before the first
    row's window is read: keys are counted from there."""
    heads = source.sequences.heads
    sequence = gl.maximum(found.sequence, 0)
    start, q_len, keys = request_of(sequence, requests_of(source))
    rows = q_len * heads
    tiles = tiles_of(rows)
    begun = begun_with(sequence, tiles, tiles * 0 + 1, source)
    number, exists = number_in_request(found, begun, FIRST)
    tiles = gl.maximum(tiles, 1)
    row = (tiles - number % tiles - 1) * ROWS
    seen = keys - q_len + 1
    first = gl.minimum(seen + row // heads, keys)
    stop = gl.minimum(seen + (gl.minimum(row + ROWS, rows) - 1) // heads, keys)
    skipped = gl.maximum(first - source.window, 0)
    steps = gl.maximum((stop - skipped + (STEP - 1)) // STEP, 1)
    seen -= skipped
    tile = WindowTile(
        first_token=start,
        first_row=row,
        rows=rows,
        seen=seen,
        whole=first - skipped,
        keys=keys - skipped,
        since=seen - source.window,
    )
    item = WorkItem(
        tile=tile,
        box=BoxStart(outer=found.within * 0, row=start * heads + row),
        first_entry=sequence.to(gl.int64) * source.table_stride,
        skipped=skipped,
        stop=stop,
    )
    return item, gl.where(exists, steps, 0)


@gluon.jit
def paged_work_item(found, source, FIRST: gl.constexpr):
    """`work_item` for sequences without windows: the tile is a `RangeTile`."""
    heads = source.sequences.heads
    SPLIT: gl.constexpr = source.part_rows is not None
    sequence = gl.maximum(found.sequence, 0)
    start, q_len, keys = request_of(sequence, requests_of(source))
    rows = q_len * heads
    tiles = tiles_of(rows)
    parts, bits = ranges_of(rows, keys, source.range_bits, SPLIT)
    begun = begun_with(sequence, tiles, parts, source)
    number, exists = number_in_request(found, begun, FIRST)
    full = begun
    if not FIRST:
        full += found.full
    tiles = gl.maximum(tiles, 1)
    row = (tiles - 1 - number % tiles) * ROWS
    skipped = number * 0
    slot = number * 0 - 1
    stop = keys
    if SPLIT:
        is_full = (number < full) & (parts > 1)
        part = gl.where(is_full, number // tiles, parts - 1)
        skipped = gl.where(parts > 1, part << bits, 0)
        stop = gl.where(is_full, skipped + (1 << bits), keys)
        if source.range_bits is None:
            place = sequence * source.part_rows + part * rows + row
        else:
            place = part * source.part_rows + start * heads + row
        slot = gl.where(parts > 1, place, -1)
    if source.sequences.mask == CAUSAL:
        seen = keys - q_len + 1
        whole = gl.minimum(seen + row // heads, stop)
        count = gl.minimum(seen + (gl.minimum(row + ROWS, rows) - 1) // heads, stop)
    else:
        seen = keys
        whole = stop
        count = stop
    steps = gl.maximum((count - skipped + (STEP - 1)) // STEP, 1)
    steps = gl.where(exists, steps, 0)
    tile = RangeTile(
        first_token=start,
        first_row=row,
        rows=rows,
        seen=seen - skipped,
        whole=whole - skipped,
        keys=stop - skipped,
        slot=slot,
    )
    item = WorkItem(
        tile=tile,
        box=BoxStart(outer=number * 0, row=start * heads + row),
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
    pages = source.sequences.pages
    entry, row = divided(at, pages)
    page = gl.load(source.table + first + entry, mask=at < stop, other=0)
    return gl.where(at < stop, page * pages.size + row, -1)


@gluon.jit
def span_entries(source, first, at, stop):
    """Physical rows of positions `at` of a request; -1 from position `stop` on, and where the block
    table names no page of the pool. first: see `page_entries`."""
    size = source.page_rows
    page = gl.load(source.table + first + at // size, mask=at < stop, other=-1)
    there = (page >= 0) & (page < source.pool_rows // size)
    return gl.where(there, page * size + at % size, -1)


@gluon.jit
def box_entry(source, first, at, stop):
    """The `BoxEntry` of the block of keys that begins with number `at`; see `page_entries`."""
    entry, row = divided(at, source.sequences.pages)
    page = gl.load(source.table + first + entry, mask=stop > at, other=0)
    return BoxEntry(page=page, row=row, keys=gl.minimum(stop - at, KEYS))


@gluon.jit
def first_work(source):
    """The work item that a program begins with: its `Found` for sequences, its number for lists."""
    x = gl.program_id(0)
    if source.sequences is not None:
        begin = beginning_of(x, source)
        zero = x * 0
        return Found(
            number=x - gl.num_programs(0),  # the one before number x
            chunk=zero,
            before=zero,
            sequence=begin.request,
            within=begin.number,
            full=zero,
        )
    else:
        return x


@gluon.jit
def find_work(found, source, NEXT, CHUNK: gl.constexpr):
    """Find the work item after the one that was `found`: its `Found` for sequences, its number for
    lists. NEXT: False takes no number; the search then only brings its code into the instruction
    cache (sequences). CHUNK: requests whose work items are numbered together; 0 for lists."""
    if source.sequences is not None:
        return find_paged(found, source, NEXT, CHUNK)
    else:
        return fetch_number(found, gl.num_programs(0), source.counter)


@gluon.jit
def work_item(found, source, counts, FIRST: gl.constexpr = False):
    """(`WorkItem`, steps) of the work item that `find_work` found, or (FIRST) with which a program
    begins.

    Every work item has at least one step; 0 steps: there is none. counts: the `TileCounts` of
    lists.
    """
    if source.window is not None:
        return windowed_work_item(found, source, FIRST)
    elif source.sequences is not None:
        return paged_work_item(found, source, FIRST)
    else:
        # The halves of a token are neighbors, so that they find each other's rows in L2.
        token = gl.minimum(found, counts.tiles - 1) // counts.head_blocks
        if source.counter is not None and source.lengths is not None:
            token = longest_first(token, counts.tiles // counts.head_blocks, source.lengths)
        first_head = found % counts.head_blocks * ROWS
        if source.begin is not None or source.second_keys is not None:
            return token_work_item(found, source, counts, token, first_head)
        count = source.most_keys
        if source.lengths is not None:
            count = gl.minimum(gl.load(source.lengths + token), source.most_keys)
        steps = gl.where(found < counts.tiles, gl.maximum((count + (STEP - 1)) // STEP, 1), 0)
        reset_counter(found, counts.tiles, source.counter)
        item = WorkItem(
            tile=ListedTile(token=token, first_head=first_head),
            box=BoxStart(outer=token, row=first_head),
            first_entry=token.to(gl.int64) * source.table_stride,
            skipped=found * 0,
            stop=count,
        )
        return item, steps


@gluon.jit
def range_of(source, token):
    """The `TokenRange` of a token."""
    stop = source.most_keys
    if source.lengths is not None:
        stop = gl.minimum(gl.load(source.lengths + token), source.most_keys)
    line = token
    skipped = token * 0
    if source.begin is not None:
        line = gl.load(source.request + token)
        skipped = gl.maximum(gl.load(source.begin + token), 0)
        seen = (line >= 0) & (line < source.requests) & (skipped < stop)
        line = gl.where(seen, line, 0)
        skipped = gl.where(seen, skipped, 0)
        stop = gl.where(seen, stop, 0)
    return TokenRange(line=line, skipped=skipped, stop=stop)


@gluon.jit
def list_of(source, token):
    """The `TokenList` of a token."""
    line, skipped, stop = range_of(source, token)
    first_entry = line.to(gl.int64) * source.table_stride
    return TokenList(first_entry=first_entry, skipped=skipped, stop=stop)


@gluon.jit
def whole_blocks(keys):
    """So many keys, rounded up to blocks."""
    return gl.maximum(keys + (KEYS - 1), 0) // KEYS * KEYS


@gluon.jit
def count_of(source, own, token):
    """Places of a token whose `TokenList` or `TokenRange` is `own`, of both sources where there are
    two: see listing.py."""
    count = own.stop - own.skipped
    if source.second_keys is not None:
        more = range_of(source.second, token)
        count = whole_blocks(count) + gl.maximum(more.stop - more.skipped, 0)
    return count


@gluon.jit
def token_work_item(found, source, counts, token, first_head):
    """`work_item` for a token that sees a span, or rows of two sources."""
    own = list_of(source, token)
    count = count_of(source, own, token)
    steps = gl.where(found < counts.tiles, gl.maximum((count + (STEP - 1)) // STEP, 1), 0)
    item = WorkItem(
        tile=ListedTile(token=token, first_head=first_head),
        box=BoxStart(outer=token, row=first_head),
        first_entry=own.first_entry,
        skipped=own.skipped if source.second_keys is None else found * 0,
        stop=own.stop,
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
def entries(source, first, stop, start, LAYOUT: gl.constexpr, NUMBER: gl.constexpr = KEYS):
    """Physical rows of places start … start + 63 of a work item, or of fewer; -1 from place `stop`
    on.

    first: where its list, or its line of the block table, begins.
    """
    at = gl.arange(0, NUMBER, LAYOUT) + start
    if source.sequences is not None:
        return page_entries(source, first, at, stop)
    elif source.begin is not None:
        return span_entries(source, first, at, stop)
    else:
        return gl.load(source.table + first + at, mask=at < stop, other=-1)


@gluon.jit
def locate(source, index, rows):
    """(page, row of the page, whether there is a key) of physical rows of `CacheRows`. Where pages
    lie end to end, the row is the physical one, and the page is of no matter."""
    ok = (index >= 0) & (index < source.pool_rows)
    row = gl.where(ok, index, 0)
    page = row
    if rows.page_stride is not None:
        page, row = divided(row, rows.pages)
    return page, row, ok


@gluon.jit
def hide_unseen(S, tile, first, heads, MASK: gl.constexpr):
    """Scores of keys `first` … of a sequence's tile, -inf for keys that a row does not see."""
    SL: gl.constexpr = S.type.layout
    some = first + S.shape[1] > tile.whole
    if MASK == WINDOW:
        some = some | (first < tile.since + (tile.first_row + (ROWS - 1)) // heads)
    if some:
        key = gl.arange(0, S.shape[1], gl.SliceLayout(0, SL)) + first
        last = gl.zeros([S.shape[0]], gl.int32, gl.SliceLayout(1, SL)) + tile.keys
        if MASK != FULL:
            row = gl.arange(0, S.shape[0], gl.SliceLayout(1, SL)) + tile.first_row
            last = gl.minimum(tile.seen + row // heads, last)
            if MASK == WINDOW:
                since = tile.since + row // heads
                S = gl.where(key[None, :] < since[:, None], float("-inf"), S)
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
            bias = validity.bias.index(b).load(gl.SliceLayout(0, SL))[None, :]
            S = gl.where(bias == 0.0, S, MINUS_INF)  # not added: the score of no key may be NaN
        return S
    else:
        return hide_unseen(S, tile, first, heads, MASK)
