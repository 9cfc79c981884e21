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

With a window, keys that no row of a work item sees are left out, block by block, as if its request
began after them. Blocks are counted from the first key that any query of the request sees, and what
lies before is never read.

Every partition gets the work item as a records.WorkItem.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.blackwell.dense.records import WorkItem
from openmla.kernels.blackwell.sparse.rows import lanes_layout
from openmla.kernels.gluon.requests import cut, span_of

CHUNK = gl.constexpr(32)  # requests that a warp looks at together
WARPS = gl.constexpr(4)


@gluon.jit
def span(request, cu_ptr, batch, total, rest):
    """(start, length) of a request; number `batch` owns the rows up to `rest`."""
    start = gl.load(cu_ptr + gl.minimum(request, batch))
    stop = gl.load(cu_ptr + gl.minimum(request + 1, batch))
    return span_of(start, gl.where(request < batch, stop, rest), total)


@gluon.jit
def key_span(request, sequences):
    """(first row, number) of the keys of a request; number `batch` has none."""
    batch, cu_ptr, total = sequences.batch, sequences.cu_seqlens_k, sequences.total_k
    start, length = span(request, cu_ptr, batch, total, 0)
    if sequences.k_start is not None:
        own = request < batch
        start = cut(gl.load(sequences.k_start + request, mask=own, other=0), total)
        first = gl.load(cu_ptr + gl.minimum(request, batch))
        length = gl.load(cu_ptr + gl.minimum(request + 1, batch)) - first
        length = gl.maximum(gl.minimum(length, total - start), 0)
    return start, length


@gluon.jit
def first_key(seen, window):
    """The first key of a row that sees the last `window` of its first `seen` keys."""
    # Clamped before the subtraction: seen may be negative, and the difference overflow 32 bits.
    return gl.maximum(gl.maximum(seen, 0) - window, 0)


@gluon.jit
def work_items(first, sequences, BM: gl.constexpr, LANES: gl.constexpr):
    """How many work items requests first … first + CHUNK - 1 have, one request per lane."""
    batch, total_q = sequences.batch, sequences.total_q
    request = first + gl.arange(0, CHUNK, LANES)
    _start, length = span(request, sequences.cu_seqlens_q, batch, total_q, total_q)
    return gl.where(request <= batch, sequences.heads * ((length + BM - 1) // BM), 0)


@gluon.jit
def sum_before(lane, counts):
    """Exclusive prefix sum of `counts` at `lane`: the work items of the lanes before it."""
    LANES: gl.constexpr = counts.type.layout
    return gl.sum(gl.where(gl.arange(0, CHUNK, LANES) < lane, counts, 0), 0)


@gluon.jit
def find(x, sequences, BM: gl.constexpr, LANES: gl.constexpr):
    """The request that work item x belongs to (batch + 1: none), and the item's number in it."""
    batch = sequences.batch
    first = x * 0
    base = x * 0
    counts = work_items(first, sequences, BM, LANES)
    size = gl.sum(counts, 0)
    while (x >= base + size) & (first + CHUNK <= batch):
        base += size
        first += CHUNK
        counts = work_items(first, sequences, BM, LANES)
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
    x,
    sequences,
    BM: gl.constexpr,
    BN: gl.constexpr,
    CAUSAL: gl.constexpr,
    SKIPS: gl.constexpr,
    CTAS: gl.constexpr,
):
    """The work item of program x, among Sequences `sequences`.

    A work item visits at least one block of keys, if only to find them masked. SKIPS: its first
    query tile may visit fewer blocks than the second.
    """
    LANES: gl.constexpr = lanes_layout(WARPS, CTAS)
    batch, total_q = sequences.batch, sequences.total_q
    request, number = find(x, sequences, BM, LANES)
    q_start, q_len = span(request, sequences.cu_seqlens_q, batch, total_q, total_q)
    k_start, k_len = key_span(request, sequences)
    tiles = gl.maximum((q_len + BM - 1) // BM, 1)
    head = number // tiles
    row = (tiles - 1 - number % tiles) * BM
    seen = k_len - q_len + row + 1
    if sequences.window is not None:
        origin = first_key(seen - row, sequences.window)
        unseen = origin + (first_key(seen, sequences.window) - origin) // BN * BN
        k_start += unseen
        k_len -= unseen
        seen -= unseen
    stop = k_len
    unmasked = k_len // BN
    if CAUSAL:
        stop = gl.minimum(k_len, seen + gl.minimum(q_len - row, BM) - 1)
        unmasked = gl.maximum(gl.minimum(seen, k_len), 0) // BN
    exists = request <= batch
    blocks = gl.where(exists, gl.maximum((stop + BN - 1) // BN, 1), 0)
    rows = gl.where(exists, q_len - row, 0)
    unmasked = gl.minimum(unmasked, blocks)
    half_stop = stop
    if CAUSAL and SKIPS:
        half_stop = gl.minimum(stop, seen + BM // 2 - 1)
    skipped = gl.maximum(blocks - gl.maximum((half_stop + BN - 1) // BN, 1), 0)
    return WorkItem(
        head=head,
        token=q_start + row,
        rows=rows,
        first_key=k_start,
        keys=k_len,
        seen=seen,
        blocks=blocks,
        unmasked=unmasked,
        request=request,
        skipped=skipped,
    )


@gluon.jit
def blocks_of_windows(work, window, BM: gl.constexpr, BN: gl.constexpr):
    """How many unmasked blocks of a WorkItem begin before the window of its last row."""
    latest = first_key(work.seen + gl.minimum(work.rows, BM) - 1, window)
    return gl.minimum((latest + BN - 1) // BN, work.unmasked)
