"""Which queries of which sequence a block owns, and which keys they see.

A tile has BM rows of scores. A token has one (of the tile's head), or one for each of its heads:
`per_token`. Sequence b owns tile numbers cu_seqlens_q[b] * per_token // BM + b and up: enough for
its rows, at least one, known without reading a length on the host. Tokens after the last sequence
belong to one more, number `batch`, that has no keys, so every row of the outputs is written.

BM 256, one row per token, cu_seqlens_q [0, 300, 310], 320 tokens:

| tile | 0 | 1 | 2 | 3 |
|---|---|---|---|---|
| sequence | 0 | 0 | 1 | 2 (no keys) |
| rows of it | 0-255 | 256-299 | 0-9 | 0-9 |

Heads run fastest: neighbors in the grid differ in the head, and with 8 dies taking blocks in turn
all tiles of a head run on one die and share its L2. Longer causal tiles run first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.cdna4.records import WorkItem
from openmla.kernels.gluon.requests import cut, span_of


@gluon.jit
def first_tile(sequence, cu_ptr, total, per_token, BM: gl.constexpr):
    """Number of a sequence's first tile."""
    return cut(gl.load(cu_ptr + sequence), total) * per_token // BM + sequence


@gluon.jit
def sequence_of(tile, cu_ptr, batch, total, per_token, BM: gl.constexpr):
    """The last sequence whose first tile is not after `tile`, by bisection."""
    low = tile * 0
    high = tile * 0 + batch
    while low < high:
        middle = (low + high + 1) // 2
        before = first_tile(middle, cu_ptr, total, per_token, BM) <= tile
        low = gl.where(before, middle, low)
        high = gl.where(before, high, middle - 1)
    return low


@gluon.jit
def span(sequence, cu_ptr, batch, total, rest):
    """(start, length) of a sequence's tokens; number `batch` owns those up to `rest`."""
    start = gl.load(cu_ptr + sequence)
    stop = gl.load(cu_ptr + gl.minimum(sequence + 1, batch))
    return span_of(start, gl.where(sequence < batch, stop, rest), total)


@gluon.jit
def key_span(sequence, sequences):
    """(start, length) of a sequence's keys. Where sequences may share keys, `starts_ptr` names the
    first row, and the offsets only count."""
    batch = sequences.batch
    total_k = sequences.total_k
    start, length = span(sequence, sequences.cu_k_ptr, batch, total_k, 0)
    if sequences.starts_ptr is not None:
        start = gl.load(sequences.starts_ptr + sequence, mask=sequence < batch, other=0)
        start = cut(start, total_k)
        counted = gl.load(sequences.cu_k_ptr + gl.minimum(sequence + 1, batch))
        counted = counted - gl.load(sequences.cu_k_ptr + sequence)
        length = gl.maximum(gl.minimum(counted, total_k - start), 0)
    return start, length


@gluon.jit
def first_row(tile, sequence, cu_ptr, total, per_token, BM: gl.constexpr):
    """The first row of a tile, counted within its sequence. Offsets that go back give 0."""
    return gl.maximum(tile - first_tile(sequence, cu_ptr, total, per_token, BM), 0) * BM


@gluon.jit
def work_item_of(program, tiles, sequences, BM: gl.constexpr):
    """The WorkItem of program `program` over Sequences."""
    head = program % sequences.heads
    tile = tiles - 1 - program // sequences.heads
    batch = sequences.batch
    total_q = sequences.total_q
    cu_q_ptr = sequences.cu_q_ptr
    sequence = sequence_of(tile, cu_q_ptr, batch, total_q, 1, BM)
    q_start, q_len = span(sequence, cu_q_ptr, batch, total_q, total_q)
    k_start, k_len = key_span(sequence, sequences)
    row = first_row(tile, sequence, cu_q_ptr, total_q, 1, BM)
    return WorkItem(
        head=head,
        sequence=sequence,
        token=q_start + row,
        rows=q_len - row,
        key=k_start,
        keys=k_len,
        seen=k_len - q_len + row + 1,
        window=None,
        origin=None,
    )


@gluon.jit
def with_bits(item, words):
    """A WorkItem whose queries see only keys that have a bit, of 32 in each of so many words."""
    keys = gl.where(words < (item.keys + 31) // 32, words * 32, item.keys)
    return WorkItem(
        head=item.head,
        sequence=item.sequence,
        token=item.token,
        rows=item.rows,
        key=item.key,
        keys=keys,
        seen=item.seen,
        window=None,
        origin=None,
    )


@gluon.jit
def first_key(seen, window):
    """The first key of a query that sees the last `window` of its first `seen` keys."""
    return gl.maximum(gl.maximum(seen, 0) - window, 0)


@gluon.jit
def with_window(item, window):
    """A WorkItem whose queries see their last `window` keys. Keys are counted from the first that
    any of them sees, so those before are neither copied nor multiplied."""
    origin = first_key(item.seen, window)
    return WorkItem(
        head=item.head,
        sequence=item.sequence,
        token=item.token,
        rows=item.rows,
        key=item.key + origin,
        keys=item.keys - origin,
        seen=item.seen - origin,
        window=window,
        origin=origin,
    )


@gluon.jit
def blocks_entered(rows, seen, window, BM: gl.constexpr, KV: gl.constexpr):
    """Blocks of KV keys in which the window of some row of a tile begins, and those before. Keys
    are counted from `origin` of the WorkItem."""
    last = first_key(seen + gl.minimum(rows, BM) - 1, window)
    return (last + KV - 1) // KV


@gluon.jit
def key_blocks(rows, keys, seen, BM: gl.constexpr, KV: gl.constexpr, CAUSAL: gl.constexpr):
    """(blocks of KV keys that the tile visits, those of them that all its rows see whole)."""
    if CAUSAL:
        stop = gl.minimum(keys, seen + gl.minimum(rows, BM) - 1)
        whole = gl.maximum(gl.minimum(seen, keys), 0) // KV
    else:
        stop = keys
        whole = keys // KV
    blocks = (gl.maximum(stop, 0) + KV - 1) // KV
    return blocks, gl.minimum(whole, blocks)
