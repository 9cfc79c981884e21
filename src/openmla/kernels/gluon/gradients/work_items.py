"""Work items of a pass: which rows of its own a block has, and what it walks.

A sequence makes heads x tiles work items: `tiles` of OWN rows of the side that a pass owns. They
are numbered sequence by sequence; inside a sequence by groups of HG heads (they share L2), then
tiles, those that walk the most first, heads fastest. Rows after the last sequence belong to one
more sequence, number `batch`, that has nothing on the other side, so that every row of the
gradients is written.

| pass | owns | walks | most first | blocks walked |
|---|---|---|---|---|
| query pass | 128 queries | keys that a row of the tile sees | last tile | from the last on |
| key pass | 128 keys | queries that see a key of the tile | first tile | from the first on |

In both orders the blocks that the diagonal cuts come first.

Statistics of query rows lie in rows of their own: tile i of sequence s, which begins at query row
q_start, has rows 128 x (q_start // 128 + s + i) …, which no other tile has. So they begin at
multiples of 128 whatever the lengths are, and rows past a sequence's end are its own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.gradients.records import SequenceRows, WorkItem
from openmla.kernels.gluon.requests import CHUNK, owner, span_of, sum_before


@gluon.jit
def span(sequence, cu_ptr, batch, total, rest):
    """(start, length) of a sequence; number `batch` owns the rows up to `rest`."""
    start = gl.load(cu_ptr + sequence)
    stop = gl.load(cu_ptr + gl.minimum(sequence + 1, batch))
    return span_of(start, gl.where(sequence < batch, stop, rest), total)


@gluon.jit
def rows_of(sequence, sequences, BY_KEYS: gl.constexpr):
    """The SequenceRows of a sequence; number `batch` has rows of the pass's own side alone."""
    batch = sequences.batch
    rest_q = 0
    rest_k = 0
    if BY_KEYS:
        rest_k = sequences.total_k
    else:
        rest_q = sequences.total_q
    q_start, q_len = span(sequence, sequences.cu_seqlens_q, batch, sequences.total_q, rest_q)
    k_start, k_len = span(sequence, sequences.cu_seqlens_k, batch, sequences.total_k, rest_k)
    return SequenceRows(q_start, q_len, k_start, k_len)


@gluon.jit
def counts(first, sequences, TILE: gl.constexpr, NW: gl.constexpr):
    """Work items of sequences first … first + CHUNK - 1, one per lane, in each of NW warps."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    OWN: gl.constexpr = TILE.own_rows
    sequence = first + gl.arange(0, CHUNK, LANES)
    rows = rows_of(gl.minimum(sequence, sequences.batch), sequences, TILE.by_keys)
    own = rows.k_len if TILE.by_keys else rows.q_len
    return gl.where(sequence <= sequences.batch, (own + OWN - 1) // OWN, 0) * sequences.heads


@gluon.jit
def work_item(sequence, x, sequences, TILE: gl.constexpr):
    """WorkItem number x of a sequence."""
    OWN: gl.constexpr = TILE.own_rows
    STEP: gl.constexpr = TILE.step_rows
    HG: gl.constexpr = TILE.head_group
    q_start, q_len, k_start, k_len = rows_of(sequence, sequences, TILE.by_keys)
    own = k_len if TILE.by_keys else q_len
    tiles = (own + OWN - 1) // OWN
    group = x // (tiles * HG)
    rest = x - group * (tiles * HG)
    head = group * HG + rest % HG
    tile = rest // HG
    place = (q_start // OWN + sequence) * OWN
    first = x * 0
    if TILE.by_keys:
        row = tile * OWN
        limit = row - (k_len - q_len)
        every = (q_len + STEP - 1) // STEP
        masked = x * 0
        if TILE.is_causal:
            first = gl.maximum(limit, 0) // STEP
            masked = (gl.maximum(limit + OWN - 1, 0) + STEP - 1) // STEP - first
        blocks = gl.maximum(every - first, 1)
        return WorkItem(
            head=head,
            token=k_start + row,
            rows=k_len - row,
            start=q_start,
            length=q_len,
            first=first,
            blocks=blocks,
            masked=gl.minimum(masked, blocks),
            limit=limit,
            place=place,
        )
    else:
        row = (tiles - 1 - tile) * OWN
        limit = k_len - q_len + row + 1
        stop = k_len
        whole = k_len // STEP
        if TILE.is_causal:
            stop = gl.minimum(k_len, limit + gl.minimum(q_len - row, OWN) - 1)
            whole = gl.maximum(gl.minimum(limit, k_len), 0) // STEP
        blocks = gl.maximum((stop + STEP - 1) // STEP, 1)
        return WorkItem(
            head=head,
            token=q_start + row,
            rows=q_len - row,
            start=k_start,
            length=k_len,
            first=first,
            blocks=blocks,
            masked=blocks - gl.minimum(whole, blocks),
            limit=limit,
            place=place + row,
        )


@gluon.jit
def find_work_item(x, sequences, TILE: gl.constexpr, NW: gl.constexpr):
    """WorkItem number x of a launch, worked out by NW warps; without blocks if there is none."""
    batch = sequences.batch
    # The chunk of sequences at hand: its first sequence, its first work item.
    first = x * 0
    base = x * 0
    every = counts(first, sequences, TILE, NW)
    size = gl.sum(every, 0)
    while (x >= base + size) & (first + CHUNK <= batch):
        base += size
        first += CHUNK
        every = counts(first, sequences, TILE, NW)
        size = gl.sum(every, 0)
    lane = owner(x - base, every, NW)
    number = x - base - sum_before(lane, every, NW)
    exists = x < base + size
    item = work_item(gl.minimum(first + lane, batch), number, sequences, TILE)
    return WorkItem(
        head=item.head,
        token=item.token,
        rows=gl.where(exists, item.rows, 0),
        start=item.start,
        length=item.length,
        first=item.first,
        blocks=gl.where(exists, item.blocks, 0),
        masked=gl.where(exists, item.masked, 0),
        limit=item.limit,
        place=item.place,
    )
