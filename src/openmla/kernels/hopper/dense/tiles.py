"""Which rows of which request a CTA works on, and over which keys.

A request makes heads x tiles x parts work items: `tiles` of BM queries, `parts` ranges of
keys (1 unless the request alone leaves half the SMs idle, see openmla.planning.split). Work items
are numbered request by request; inside a request by groups of heads (they share L2), then
ranges, then tiles, the longest first, heads fastest. Rows after the last sequence belong to one
more request, number `batch`, that has no keys, so every row of the outputs is written (only in the
last launch of a call: rest_q is 0 in the others).

BM 128, 1 head, cu_seqlens_q [0, 300, 310], 320 tokens, nothing split:

| work item | 0 | 1 | 2 | 3 | 4 |
|---|---|---|---|---|---|
| request | 0 | 0 | 0 | 1 | 2 (no keys) |
| rows of it | 256-299 | 128-255 | 0-127 | 0-9 | 0-9 |

With a window, the keys of a request begin at the first that any of its queries sees: what lies
before is not addressed, and ranges are ranges of the rest. Those of a tile begin with the block in
which its first row's begin. Blocks are counted from the request's first key, so that tiles of 64
and of 128 rows have the same ones.

| window 100, BN 128, 300 queries of 1000 keys, BM 128 | rows 0-127 | 128-255 | 256-299 |
|---|---|---|---|
| first key of the request: 700 + 1 - 100 | 601 | | |
| keys of the first row from there on | 0-99 | 128-227 | 256-355 |
| of the last row | 127-226 | 255-354 | 299-398 |
| blocks of them | 0, 1 | 1, 2 | 2, 3 |

Lengths are only known on the device. A warp that needs work item x looks at 32 requests at a time,
one per lane, and bisects: no table is built and nothing is read back.

`requests` is a Requests record everywhere, `request` the number of one of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.requests import CHUNK, cut, span_of
from openmla.kernels.hopper.dense.records import RequestRows, WorkItem

WGMMA_ROWS = gl.constexpr(64)
LEAST_GROUP = gl.constexpr(4)  # heads, where a power of two so large divides their number
RANGE_STEP = gl.constexpr(128)  # every key tile divides it, so no range cuts one


@gluon.jit
def span(request, cu_ptr, batch, total, rest):
    """(start, length) of a request; number `batch` owns the rows up to `rest`."""
    start = gl.load(cu_ptr + request)
    stop = gl.load(cu_ptr + gl.minimum(request + 1, batch))
    return span_of(start, gl.where(request < batch, stop, rest), total)


@gluon.jit
def request_rows(request, requests):
    """The RequestRows of a request; number `batch` has no keys.

    Where requests may share keys, `k_start` names the first key row, and the offsets only count.
    """
    batch = requests.batch
    cu_k = requests.cu_seqlens_k
    total_k = requests.total_k
    q_start, q_len = span(request, requests.cu_seqlens_q, batch, requests.total_q, requests.rest_q)
    k_start, k_len = span(request, cu_k, batch, total_k, 0)
    if requests.k_start is not None:
        k_start = gl.load(requests.k_start + request, mask=request < batch, other=0)
        k_start = cut(k_start, total_k)
        k_len = gl.load(cu_k + gl.minimum(request + 1, batch)) - gl.load(cu_k + request)
        k_len = gl.maximum(gl.minimum(k_len, total_k - k_start), 0)
    if requests.window is not None:
        before = first_key(k_len - q_len + 1, requests.window)
        k_start += before
        k_len -= before
    return RequestRows(q_start, q_len, k_start, k_len)


@gluon.jit
def first_key(seen, window):
    """The first key of a row that sees the last `window` of its first `seen` keys."""
    # Clamped before the subtraction: seen may be negative, and the difference overflow 32 bits.
    return gl.maximum(gl.maximum(seen, 0) - window, 0)


@gluon.jit
def keys_of_range(q_len, k_len, heads, SM_COUNT: gl.constexpr, MIN_KEYS: gl.constexpr):
    """Keys per range, from the request's own lengths alone; see SplitRule.keys_per_split."""
    tiles = heads * ((q_len + WGMMA_ROWS - 1) // WGMMA_ROWS)
    fill = gl.minimum(k_len // MIN_KEYS, 2 * SM_COUNT // gl.maximum(tiles, 1))
    parts = gl.where(2 * tiles > SM_COUNT, 1, gl.maximum(fill, 1))
    keys = (gl.maximum(k_len, 1) + parts - 1) // parts
    return (keys + RANGE_STEP - 1) // RANGE_STEP * RANGE_STEP


@gluon.jit
def head_group(k_len, heads, GROUP_KEYS: gl.constexpr):
    """Heads of a request whose work items follow one another: a power of two that divides `heads`.

    Few are enough to share L2, but the longest tiles of the last group begin when little else is
    left to do: requests of few keys need larger groups. GROUP_KEYS 16384: 4 heads of 4096 keys and
    of more, 16 of 1024.
    """
    most = gl.maximum(GROUP_KEYS // gl.maximum(k_len, 1), LEAST_GROUP)
    group = heads & -heads
    while group > most:
        group //= 2
    return group


@gluon.jit
def ranges(q_len, k_len, heads, SPLIT: gl.constexpr, SM_COUNT: gl.constexpr):
    """(ranges, keys of each); SPLIT is the fewest keys worth a range, 0: never split."""
    if SPLIT > 0:
        keys = keys_of_range(q_len, k_len, heads, SM_COUNT, SPLIT)
        parts = gl.maximum((k_len + keys - 1) // keys, 1)
    else:
        keys = k_len
        parts = 1
    return parts, keys


@gluon.jit
def last_slot(requests, SPLIT: gl.constexpr, SMS: gl.constexpr):
    """Number of the last workspace slot: a split request has at most 2 x SMS slots, and a request
    needs keys for two ranges to be split. Offsets that make sequences overlap would need more."""
    return gl.minimum(requests.batch, requests.total_k // (2 * SPLIT)) * (2 * SMS) - 1


@gluon.jit
def work_items(
    first, requests, BM: gl.constexpr, SPLIT: gl.constexpr, SMS: gl.constexpr, NW: gl.constexpr
):
    """Numbers of work items of requests first … first + CHUNK - 1, one request per lane: all of
    them, and those of split requests only."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    request = first + gl.arange(0, CHUNK, LANES)
    own = request_rows(gl.minimum(request, requests.batch), requests)
    tiles = gl.where(request <= requests.batch, (own.q_len + BM - 1) // BM, 0)
    if SPLIT > 0:
        parts, _keys = ranges(own.q_len, own.k_len, requests.heads, SPLIT, SMS)
        every = requests.heads * tiles * parts
        split = gl.where(parts > 1, every, 0)
    else:
        every = requests.heads * tiles
        split = every
    return every, split


@gluon.jit
def work_item(
    request,
    x,
    requests,
    BM: gl.constexpr,
    GROUP_KEYS: gl.constexpr,
    SPLIT: gl.constexpr,
    SMS: gl.constexpr,
):
    """WorkItem number x of a request."""
    q_start, q_len, k_start, k_len = request_rows(request, requests)
    tiles = (q_len + BM - 1) // BM
    parts, keys = ranges(q_len, k_len, requests.heads, SPLIT, SMS)
    heads = head_group(k_len, requests.heads, GROUP_KEYS)
    group = x // (tiles * parts * heads)
    rest = x - group * (tiles * parts * heads)
    head = group * heads + rest % heads
    rest = rest // heads
    skipped = x * 0
    if SPLIT > 0:
        skipped = rest // tiles * keys
        rest = rest % tiles
    row = (tiles - 1 - rest) * BM
    seen = k_len - q_len + row + 1 - skipped
    keys = gl.minimum(keys, k_len - skipped)
    return WorkItem(
        head=head,
        token=q_start + row,
        rows=q_len - row,
        key=k_start + skipped,
        keys=keys,
        seen=seen,
        skipped=skipped,
        parts=parts,
    )


@gluon.jit
def key_blocks(rows, keys, seen, BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr):
    """(blocks of BN keys that a tile visits, at least one; blocks that all its rows see whole)."""
    if CAUSAL:
        stop = gl.minimum(keys, seen + gl.minimum(rows, BM) - 1)
        whole = gl.maximum(gl.minimum(seen, keys), 0) // BN
    else:
        stop = keys
        whole = keys // BN
    blocks = gl.maximum((stop + BN - 1) // BN, 1)
    return blocks, gl.minimum(whole, blocks)


@gluon.jit
def within_window(item, window, BN: gl.constexpr):
    """The WorkItem without the blocks of BN keys before its first row's window; of a range that
    ends before it, with the last block alone."""
    first = gl.minimum(first_key(item.seen, window), gl.maximum(item.keys - 1, 0)) // BN * BN
    return WorkItem(
        head=item.head,
        token=item.token,
        rows=item.rows,
        key=item.key + first,
        keys=item.keys - first,
        seen=item.seen - first,
        skipped=item.skipped + first,
        parts=item.parts,
    )


@gluon.jit
def cut_blocks(rows, seen, window, BM: gl.constexpr, BN: gl.constexpr):
    """Blocks of BN keys, the first of a tile, in which some row's window begins."""
    last = first_key(seen + gl.minimum(rows, BM) - 1, window)
    return (last + BN - 1) // BN
