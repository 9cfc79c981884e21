"""Pieces of work of the indexer's scores: a block of queries and a range of keys, and their loads.

Hopper and Blackwell share this: both load by TMA.

One warp draws numbers from a counter, works out what they stand for, and loads it by TMA:

| number | is |
|---|---|
| x // chunks | a block of QB queries; queries of several sequences are several work items |
| x % chunks | CHUNK keys, counted from the first that any query of the piece sees |

What a piece is goes through a ring of QS slots in shared memory, FIELDS numbers each. Keys go
through a ring of ST stages of BN keys with their scales, which all consumers share. The counter is
0 between launches: whoever draws the last number puts it back.

CFG: query tiles (128 / HEADS queries each), keys per stage, key stages, query stages, keys of a
piece.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from openmla.kernels.gluon.compat import reinterpret, tma_load

FIELDS = gl.constexpr(4)
QUERY = gl.constexpr(0)  # the block's first query
KEY = gl.constexpr(1)  # the first key, a multiple of 64
BLOCKS = gl.constexpr(2)  # blocks of BN keys; 0: no more work
LINE = gl.constexpr(3)  # the sequence; queries of others are not in the piece
ROWS = gl.constexpr(64)  # keys of a tile in shared memory
COLUMNS = gl.constexpr(128)  # heads of all queries of one product; also bytes of a key
FAR = gl.constexpr(0x7FFFFFFF)
# One atomic add per warp, its result given to every lane.
DRAW = gl.constexpr(
    "{ .reg .pred p; .reg .b32 t; mov.u32 t, %laneid; setp.eq.u32 p, t, 0; mov.b32 t, 0; "
    "@p atom.global.add.u32 t, [$1], 1; shfl.sync.idx.b32 $0, t, 0, 31, -1; }"
)


@gluon.jit
def draw(counter):
    """The next number of the launch."""
    return gl.inline_asm_elementwise(
        DRAW, "=r,l,~{memory}", [counter], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def put(info, slot, FIELD: gl.constexpr, value):
    """Write one field; by the producer's one warp."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    info.index(slot * FIELDS + FIELD).store(gl.full([1], 0, gl.int32, ONE) + value)


@gluon.jit
def get(info, slot, FIELD: gl.constexpr, NW: gl.constexpr):
    """Read one field in a partition of NW warps."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    return gl.max(info.index(slot * FIELDS + FIELD).load(ONE), 0)


@gluon.jit
def load_keys(descs, table, key, last, barrier, k_tile, s_tile, PAGE: gl.constexpr):
    """64 keys and their scales. Entries of the table past the last key are never read."""
    k_desc, s_desc = descs
    K_BOX: gl.constexpr = k_desc.block_shape
    K_LAYOUT: gl.constexpr = k_desc.layout
    S_LAYOUT: gl.constexpr = s_desc.layout
    BOX: gl.constexpr = K_BOX[1]
    NUMBER: gl.constexpr = ROWS // BOX
    BOXES: gl.constexpr = (NUMBER, 1, BOX, K_BOX[2])
    LINES: gl.constexpr = (NUMBER, 1, BOX)
    boxes = reinterpret(k_tile, k_desc.dtype, BOXES, K_LAYOUT)
    lines = reinterpret(s_tile, s_desc.dtype, LINES, S_LAYOUT)
    for i in gl.static_range(NUMBER):
        at = key + i * BOX
        page = at * 0
        if PAGE > 0:
            page = gl.load(table + gl.minimum(at, last - 1) // PAGE)
            at = at % PAGE
        tma_load(k_desc, [page, at, 0], barrier, boxes.index(i))
        tma_load(s_desc, [page, at], barrier, lines.index(i))


@gluon.jit
def load_piece(
    descs, smem, bars, table, piece, turn, it, CFG: gl.constexpr, HEADS: gl.constexpr,
    PAGE: gl.constexpr,
):  # fmt: skip
    """Announce a piece and load its keys, and with the first of them its queries."""
    q_desc, k_desc, s_desc = descs
    info, q_smem, k_smem, s_smem = smem
    q_ready, q_empty, k_ready, k_empty, t_ready = bars
    query, key, last, line = piece
    NC: gl.constexpr = CFG[0]
    BN: gl.constexpr = CFG[1]
    ST: gl.constexpr = CFG[2]
    QS: gl.constexpr = CFG[3]
    SUB: gl.constexpr = BN // ROWS
    Q_BOX: gl.constexpr = q_desc.block_shape
    Q_LAYOUT: gl.constexpr = q_desc.layout
    blocks = (gl.minimum(last - key, CFG[4]) + BN - 1) // BN
    slot = turn % QS
    mbarrier.wait(q_empty.index(slot), ((turn // QS) & 1) ^ 1)
    put(info, slot, QUERY, query)
    put(info, slot, KEY, key)
    put(info, slot, BLOCKS, blocks)
    put(info, slot, LINE, line)
    mbarrier.arrive(t_ready.index(slot), count=1)
    for c in range(0, blocks):
        stage = it % ST
        mbarrier.wait(k_empty.index(stage), ((it // ST) & 1) ^ 1)
        mbarrier.expect(k_ready.index(stage), BN * (COLUMNS + 4))
        for j in gl.static_range(SUB):
            load_keys(
                (k_desc, s_desc), table, key + c * BN + j * ROWS, last, k_ready.index(stage),
                k_smem.index(stage * SUB + j), s_smem.index(stage * SUB + j), PAGE,
            )  # fmt: skip
        if c == 0:
            mbarrier.expect(q_ready.index(slot), NC * COLUMNS * COLUMNS)
            for w in gl.static_range(NC):
                tile = reinterpret(q_smem.index(slot * NC + w), q_desc.dtype, Q_BOX, Q_LAYOUT)
                first = query + w * (COLUMNS // HEADS)
                tma_load(q_desc, [first, 0, 0], q_ready.index(slot), tile)
        it += 1
    return turn + 1, it


@gluon.jit
def producer(
    descs, smem, bars, windows, table, counter, total_q, columns, chunks, CFG: gl.constexpr,
    HEADS: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Draw work items and load them until there are none, then announce the end."""
    starts_ptr, ends_ptr, sequences_ptr, longest_ptr = windows
    table_ptr, table_stride = table
    q_empty = bars[1]
    t_ready = bars[4]
    QB: gl.constexpr = CFG[0] * (COLUMNS // HEADS)
    QS: gl.constexpr = CFG[3]
    CHUNK: gl.constexpr = CFG[4]
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    if longest_ptr is not None:
        longest = gl.minimum(gl.load(longest_ptr), columns)
        chunks = gl.maximum((longest + CHUNK - 1) // CHUNK, 1)
    x = gl.program_id(0)
    total = (total_q + QB - 1) // QB * chunks
    turn = x * 0
    it = x * 0
    while x < total:
        query = x // chunks * QB
        live = (lane < QB) & (query + lane < total_q)
        start = gl.maximum(gl.load(starts_ptr + query + lane, mask=live, other=0), 0)
        end = gl.minimum(gl.load(ends_ptr + query + lane, mask=live, other=0), columns)
        live = (live & (start < end)).to(gl.int32)
        if PAGE > 0:
            lines = gl.load(sequences_ptr + query + lane, mask=live > 0, other=0)
            while gl.max(live, 0) > 0:
                line = gl.min(gl.where(live > 0, lines, FAR), 0)
                mine = (live > 0) & (lines == line)
                live = gl.where(lines == line, 0, live)
                first = gl.min(gl.where(mine, start, FAR), 0) // ROWS * ROWS
                last = gl.max(gl.where(mine, end, 0), 0)
                key = first + x % chunks * CHUNK
                if key < last:
                    entries = table_ptr + line.to(gl.int64) * table_stride
                    piece = (query, key, last, line)
                    turn, it = load_piece(
                        descs, smem, bars, entries, piece, turn, it, CFG, HEADS, PAGE
                    )
        else:
            first = gl.min(gl.where(live > 0, start, FAR), 0) // ROWS * ROWS
            last = gl.max(gl.where(live > 0, end, 0), 0)
            if last > 0:
                key = first + x % chunks * CHUNK
                if key < last:
                    piece = (query, key, last, x * 0)
                    turn, it = load_piece(
                        descs, smem, bars, table_ptr, piece, turn, it, CFG, HEADS, PAGE
                    )
        x = draw(counter) + gl.num_programs(0)
    if x == total + gl.num_programs(0) - 1:
        gl.store(counter, 0)
    slot = turn % QS
    mbarrier.wait(q_empty.index(slot), ((turn // QS) & 1) ^ 1)
    put(info_of(smem), slot, BLOCKS, 0)
    mbarrier.arrive(t_ready.index(slot), count=1)


@gluon.jit
def info_of(smem):
    """The ring of work items."""
    return smem[0]


@gluon.jit
def window_of(windows, query, line, total_q, columns, PAGE: gl.constexpr):
    """A query's first key and the one after its last; empty if it is not of the piece."""
    starts_ptr, ends_ptr, sequences_ptr, _ = windows
    live = query < total_q
    low = gl.load(starts_ptr + query, mask=live, other=0)
    high = gl.load(ends_ptr + query, mask=live, other=0)
    high = gl.minimum(high, columns)
    if PAGE > 0:
        own = gl.load(sequences_ptr + query, mask=live, other=-1) == line
        high = gl.where(own, high, 0)
    return gl.maximum(low, 0), high
