"""What a pair of CTAs works on: tokens in turn, each with its list of rows, KEYS at a time.

The lists of all tokens are a sparse.records.TokenLists; for INDEXING see sparse/rows.py.

Where requests of few rows and many keys may be split (`TokenLists.ranges`), a work item is one
token and one range of its keys. Ranges follow from the request's own rows and keys
(gluon/ranges/rule.py), so items are numbered request by request: of a request range by range, since
its tokens find the rows of a range in L2, and of a range from the last token to the first, since
the last sees most keys. To find an item, the items of 32 requests are counted at once, a request to
a lane. 8 heads, cu_seqlens_q [0, 2, 3], 4 tokens, cache_lengths [40, 5000]:

| item | 0 | 1 | 2 | 3 | … | 11 | 12 |
|---|---|---|---|---|---|---|---|
| token | 1 | 0 | 2 | 2 | … | 2 | 3 (no keys) |
| keys | 0-39 | 0-38 | 0-511 | 512-1023 | … | 4608-4999 | |
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

from openmla.kernels.blackwell.pair.records import Counted, Item, Second
from openmla.kernels.blackwell.sparse.records import KeyList
from openmla.kernels.blackwell.sparse.rows import (
    CHUNK,
    count_of,
    descriptor_rows,
    keys_seen,
    lanes_layout,
    listed,
    seen_of,
    steps_of,
    unseen,
    whole_steps,
)
from openmla.kernels.gluon.ranges.records import Requests
from openmla.kernels.gluon.ranges.rule import ranges_of, request_of

KEYS = gl.constexpr(256)  # keys of a step
ROWS = gl.constexpr(128)  # heads of both CTAs


@gluon.constexpr_function
def barrier_layout(common):
    """One barrier for both CTAs, or one for each."""
    return mbarrier.MBarrierLayout(cga_layout=[[0 if common else 1]])


@gluon.jit
def barriers(NUMBER: gl.constexpr, COMMON: gl.constexpr):
    """NUMBER mbarriers, each completed by one arrival, or, if COMMON, by one of each CTA."""
    EACH: gl.constexpr = 1 if COMMON else 2
    LAYOUT: gl.constexpr = barrier_layout(COMMON)
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, EACH], LAYOUT)
    for i in gl.static_range(NUMBER):
        mbarrier.init(made.index(i), count=1)
    return made


@gluon.jit
def token_of(number, lists, INDEXING: gl.constexpr):
    """The token of the number-th item. The last tokens of a sequence see most keys, and come
    first. Numbers past the last are those of no item."""
    token = number
    if lists.ranges is not None:
        token = range_of(number, lists, INDEXING).token
    elif lists.cu_seqlens is not None:
        token = lists.tokens - 1 - number
    return token


@gluon.jit
def item_of(number, lists, INDEXING: gl.constexpr):
    """The number-th item."""
    if lists.ranges is not None:
        return range_of(number, lists, INDEXING)
    else:
        token = token_of(number, lists, INDEXING)
        line = token
        first = number * 0
        if (lists.spans is not None) | (lists.second is not None):
            line, first, count = seen_of(token, lists)
        elif lists.cu_seqlens is None:
            count = count_of(lists, token)
        else:
            line, count = keys_seen(token, lists, INDEXING)
            if lists.window is not None:
                first = unseen(count, lists.window)
        steps = steps_of(count - first, KEYS)
        second = None
        if lists.second is not None:
            more = seen_of(token, lists.second)
            after = whole_steps(count - first, KEYS)
            steps = gl.maximum(after + whole_steps(more.length - more.first, KEYS), 1)
            second = Second(
                after=after,
                indices=lists.second.indices + more.line.to(gl.int64) * lists.second.stride,
                first=more.first,
                length=more.length,
            )
        return Item(
            token=token,
            indices=lists.indices + line.to(gl.int64) * lists.stride,
            first=first,
            length=count,
            steps=steps,
            part=number * 0 - 1,
            second=second,
        )


@gluon.jit
def keys_of(item, pool):
    """(KeyList of an item, the place of its first key)."""
    keys = KeyList(indices=item.indices, length=item.length, pool=pool, first=None, second=None)
    return keys, item.first


@gluon.jit
def second_keys_of(item, lists):
    """(KeyList of an item's second source, the place of step 0 of the item if it were of it)."""
    own = item.second
    keys = KeyList(
        indices=own.indices, length=own.length, pool=lists.second.pool, first=None, second=None
    )
    return keys, own.first - own.after * KEYS


@gluon.jit
def step_rows(
    item,
    lists,
    pool,
    k,
    offset,
    N: gl.constexpr,
    LAYOUT: gl.constexpr,
    INDEXING: gl.constexpr,
):
    """Descriptor rows of N keys of step k of an item, from key number `offset` of the step on."""
    keys, first = keys_of(item, pool)
    if lists.second is None:
        return descriptor_rows(keys, first + k * KEYS + offset, N, LAYOUT, INDEXING)
    else:
        if k < item.second.after:
            rows = descriptor_rows(keys, first + k * KEYS + offset, N, LAYOUT, INDEXING)
        else:
            more, start = second_keys_of(item, lists)
            at = start + k * KEYS + offset
            rows = descriptor_rows(more, at, N, LAYOUT, INDEXING.second)
        return rows


@gluon.jit
def step_counts(item, lists, pool, k, LAYOUT: gl.constexpr, INDEXING: gl.constexpr):
    """Whether each key of step k of an item counts, as numbers."""
    keys, first = keys_of(item, pool)
    if lists.second is None:
        _, ok = listed(keys, first + k * KEYS, KEYS, LAYOUT, INDEXING)
        return ok.to(gl.int32)
    else:
        if k < item.second.after:
            _, ok = listed(keys, first + k * KEYS, KEYS, LAYOUT, INDEXING)
            counts = ok.to(gl.int32)
        else:
            more, start = second_keys_of(item, lists)
            _, ok = listed(more, start + k * KEYS, KEYS, LAYOUT, INDEXING.second)
            counts = ok.to(gl.int32)
        return counts


@gluon.jit
def items_of(lists):
    """How many items there are."""
    total = lists.tokens
    if lists.ranges is not None:
        total = gl.program_id(0) * 0
        for first in range(0, lists.batch + 1, CHUNK):
            total += gl.sum(counted(first, lists).items, 0)
    return total


@gluon.jit
def requests_of(lists):
    """The `Requests` of token lists that follow from a block table."""
    return Requests(
        cu_seqlens_q=lists.cu_seqlens,
        lengths=lists.lengths,
        most_keys=lists.topk,
        batch=lists.batch,
        total_q=lists.tokens,
        rest_q=lists.ranges.rest_q,
    )


@gluon.jit
def counted(first, lists):
    """`Counted` requests, from number `first` on."""
    lanes = gl.arange(0, CHUNK, lanes_layout(gl.num_warps(), 2))
    _start, tokens, keys = request_of(first + lanes, requests_of(lists))
    parts, _bits = ranges_of(tokens * lists.ranges.heads, keys, None, True)
    return Counted(lanes=lanes, items=tokens * parts)


@gluon.jit
def range_of(number, lists, INDEXING: gl.constexpr):
    """The number-th item where requests may be split."""
    heads = lists.ranges.heads
    first = number * 0
    chunk = counted(first, lists)
    size = gl.sum(chunk.items, 0)
    within = number
    while (within >= size) & (first + CHUNK <= lists.batch):
        within -= size
        first += CHUNK
        chunk = counted(first, lists)
        size = gl.sum(chunk.items, 0)
    lane = number * 0  # the last request of the chunk that begins at or before the item
    for bit in gl.static_range(5):
        tried = lane + (16 >> bit)
        lane = gl.where(items_before(tried, chunk) <= within, tried, lane)
    within -= items_before(lane, chunk)
    request = first + lane
    start, tokens, keys = request_of(request, requests_of(lists))
    parts, bits = ranges_of(tokens * heads, keys, None, True)
    each = gl.maximum(tokens, 1)
    part = within // each
    later = within % each
    seen = keys
    if INDEXING.is_causal:
        seen = keys - later
    begin = gl.where(parts > 1, part << bits, 0)
    end = gl.where(part + 1 < parts, (part + 1) << bits, keys)
    length = gl.minimum(seen, end)
    line = gl.maximum(gl.minimum(request, lists.batch - 1), 0)
    row = part * tokens + tokens - 1 - later
    place = request * lists.ranges.part_rows + row * heads
    return Item(
        token=start + tokens - 1 - later,
        indices=lists.indices + line.to(gl.int64) * lists.stride,
        first=begin,
        length=length,
        steps=steps_of(length - begin, KEYS),
        part=gl.where(parts > 1, place, -1),
        second=None,
    )


@gluon.jit
def items_before(lane, chunk):
    """Items of the requests of a chunk, which is `Counted`, before that of a lane."""
    return gl.sum(gl.where(chunk.lanes < lane, chunk.items, 0), 0)


@gluon.jit
def after(slot, phase, SLOTS: gl.constexpr):
    """The next slot of the ring, and the phase of its barriers."""
    last = slot == SLOTS - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)
