"""Which rows of which request a block works on, and over which keys.

A request makes heads x tiles work items of BM queries. They are numbered request by request, inside
a request head by head, so that blocks that run together read the same keys from L2, and inside a
head the longest tile first. Rows after the last sequence belong to one more request, number
`batch`, that has no keys, so every row of the outputs is written. The grid is an upper bound:
lengths are on the device, and a block without a work item does nothing.

BM 256, 1 head, cu_seqlens_q [0, 300, 310], 320 tokens:

| block | 0 | 1 | 2 | 3 | 4 |
|---|---|---|---|---|---|
| request | 0 | 0 | 1 | 2 (no keys) | none |
| rows of it | 256-299 | 0-255 | 0-9 | 0-9 | |

What a work item is, as a tuple that every partition gets: head; token, its first row of q and out;
rows from there to the request's end; key, the first row of k and v; keys of the request; seen, keys
that its first row sees if causal (may be negative); blocks of BN keys that it visits, 0 for no work
item; whole, those of them that need no mask; request; skipped, the blocks at the end that come
after all keys that the first half of BM rows, if causal, may see.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.blackwell.sparse.rows import lanes_layout
from openmla.kernels.gluon.offsets import span_of

CHUNK = gl.constexpr(32)  # requests looked at together
WARPS = gl.constexpr(4)


@gluon.jit
def span(request, cu_ptr, batch, total, rest):
    """(start, length) of a request; number `batch` owns the rows up to `rest`."""
    start = gl.load(cu_ptr + gl.minimum(request, batch))
    stop = gl.load(cu_ptr + gl.minimum(request + 1, batch))
    return span_of(start, gl.where(request < batch, stop, rest), total)


@gluon.jit
def work_items(first, shape, BM: gl.constexpr, LANES: gl.constexpr):
    """Work items of requests first … first + CHUNK - 1, one request per lane."""
    cu_q, _cu_k, batch, total_q, _total_k, heads = shape
    request = first + gl.arange(0, CHUNK, LANES)
    _start, length = span(request, cu_q, batch, total_q, total_q)
    return gl.where(request <= batch, heads * ((length + BM - 1) // BM), 0)


@gluon.jit
def sum_before(lane, counts):
    """Work items of the lanes before `lane`."""
    LANES: gl.constexpr = counts.type.layout
    return gl.sum(gl.where(gl.arange(0, CHUNK, LANES) < lane, counts, 0), 0)


@gluon.jit
def find(x, shape, BM: gl.constexpr, LANES: gl.constexpr):
    """The request that work item x belongs to, and the work item's number in it; batch + 1 if to
    none.
    """
    batch = shape[2]
    first = x * 0
    base = x * 0
    counts = work_items(first, shape, BM, LANES)
    size = gl.sum(counts, 0)
    while (x >= base + size) & (first + CHUNK <= batch):
        base += size
        first += CHUNK
        counts = work_items(first, shape, BM, LANES)
        size = gl.sum(counts, 0)
    # The last lane that begins at or before x.
    lane = x * 0
    for bit in gl.static_range(5):
        tried = lane + (16 >> bit)
        lane = gl.where(sum_before(tried, counts) <= x - base, tried, lane)
    request = gl.where(x < base + size, first + lane, batch + 1)
    return request, x - base - sum_before(lane, counts)


@gluon.jit
def work_item_of(
    x, shape, BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr, SKIPS: gl.constexpr,
    CTAS: gl.constexpr,
):  # fmt: skip
    """Block x's work item. A work item visits at least one block of keys, if only to find them
    masked; SKIPS says whether its first half may visit fewer than the second.
    """
    LANES: gl.constexpr = lanes_layout(WARPS, CTAS)
    cu_q, cu_k, batch, total_q, total_k, _heads = shape
    request, number = find(x, shape, BM, LANES)
    q_start, q_len = span(request, cu_q, batch, total_q, total_q)
    k_start, k_len = span(request, cu_k, batch, total_k, 0)
    tiles = gl.maximum((q_len + BM - 1) // BM, 1)
    head = number // tiles
    row = (tiles - 1 - number % tiles) * BM
    seen = k_len - q_len + row + 1
    stop = k_len
    whole = k_len // BN
    if CAUSAL:
        stop = gl.minimum(k_len, seen + gl.minimum(q_len - row, BM) - 1)
        whole = gl.maximum(gl.minimum(seen, k_len), 0) // BN
    exists = request <= batch
    blocks = gl.where(exists, gl.maximum((stop + BN - 1) // BN, 1), 0)
    rows = gl.where(exists, q_len - row, 0)
    whole = gl.minimum(whole, blocks)
    half_stop = stop
    if CAUSAL and SKIPS:
        half_stop = gl.minimum(stop, seen + BM // 2 - 1)
    skipped = gl.maximum(blocks - gl.maximum((half_stop + BN - 1) // BN, 1), 0)
    return head, q_start + row, rows, k_start, k_len, seen, blocks, whole, request, skipped
