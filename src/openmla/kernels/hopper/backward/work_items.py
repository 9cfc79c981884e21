"""Work items of a pass, and the scheduler warp that announces them.

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

The next number is fetched when the producer has two blocks left to load. The counter is 0 between
launches: the CTA that fetches the last number resets it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from openmla.kernels.gluon.requests import CHUNK, owner, span_of, sum_before
from openmla.kernels.hopper.backward.records import SequenceRows, WorkItem
from openmla.kernels.hopper.dense.scheduler import draw, get, put

HEAD = gl.constexpr(0)
TOKEN = gl.constexpr(1)
ROWS = gl.constexpr(2)
START = gl.constexpr(3)
LENGTH = gl.constexpr(4)
FIRST = gl.constexpr(5)
BLOCKS = gl.constexpr(6)
MASKED = gl.constexpr(7)
LIMIT = gl.constexpr(8)
PLACE = gl.constexpr(9)
USED = gl.constexpr(10)  # of the FIELDS of a slot


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
def counts(first, sequences, TILE: gl.constexpr):
    """Work items of sequences first … first + CHUNK - 1, one sequence per lane."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
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
def put_work_item(info, slot, item):
    """Describe a WorkItem in a slot; by the one warp of the scheduler."""
    put(info, slot, HEAD, item.head)
    put(info, slot, TOKEN, item.token)
    put(info, slot, ROWS, item.rows)
    put(info, slot, START, item.start)
    put(info, slot, LENGTH, item.length)
    put(info, slot, FIRST, item.first)
    put(info, slot, BLOCKS, item.blocks)
    put(info, slot, MASKED, item.masked)
    put(info, slot, LIMIT, item.limit)
    put(info, slot, PLACE, item.place)


@gluon.jit
def get_work_item(info, slot, NW: gl.constexpr):
    """The WorkItem of a slot, in a partition of NW warps."""
    return WorkItem(
        head=get(info, slot, HEAD, NW),
        token=get(info, slot, TOKEN, NW),
        rows=get(info, slot, ROWS, NW),
        start=get(info, slot, START, NW),
        length=get(info, slot, LENGTH, NW),
        first=get(info, slot, FIRST, NW),
        blocks=get(info, slot, BLOCKS, NW),
        masked=get(info, slot, MASKED, NW),
        limit=get(info, slot, LIMIT, NW),
        place=get(info, slot, PLACE, NW),
    )


@gluon.jit
def scheduler(info, bars, counter, sequences, TILE: gl.constexpr):
    """Announce work items until there are none, then announce the end.

    bars: QueryBarriers or KeyBarriers, sequences: Sequences, TILE: Tiling.
    """
    batch = sequences.batch
    programs = gl.num_programs(0)
    x = gl.program_id(0)
    # The chunk of sequences at hand: its first sequence, its first work item.
    first = x * 0
    base = x * 0
    every = counts(first, sequences, TILE)
    size = gl.sum(every, 0)
    turn = x * 0
    live = x * 0 + 1
    while live > 0:
        while (x >= base + size) & (first + CHUNK <= batch):
            base += size
            first += CHUNK
            every = counts(first, sequences, TILE)
            size = gl.sum(every, 0)
        slot = turn & 1
        mbarrier.wait(bars.t_empty.index(slot), ((turn >> 1) & 1) ^ 1)
        if x < base + size:
            lane = owner(x - base, every, 1)
            number = x - base - sum_before(lane, every, 1)
            put_work_item(info, slot, work_item(first + lane, number, sequences, TILE))
            mbarrier.arrive(bars.t_ready.index(slot), count=1)
            if (batch < CHUNK) & (size <= programs):  # every CTA sees the same: one work item each
                x = size + programs
            else:
                mbarrier.wait(bars.t_request.index(0), turn & 1)
                x = draw(counter) + programs
        else:
            for field in gl.static_range(USED):
                put(info, slot, field, 0)
            mbarrier.arrive(bars.t_ready.index(slot), count=1)
            if x - programs == base + size - 1:
                gl.store(counter, 0)
            live = x * 0
        turn += 1
