"""Work items of the indexer's scores, a block of queries and a range of keys, and their loads.

Hopper and Blackwell share this: both load by TMA. Which partitions multiply and add up differs.

Programs are persistent. One warp of each, the producer, fetches work-item numbers from an atomic
counter, finds out what they stand for, and loads that by TMA:

| number | is |
|---|---|
| x // chunks | a block of QB queries; queries of several sequences are several work items |
| x % chunks | CFG.chunk keys, counted from the first that any query of the block sees |

A work item is announced through a ring of QS slots in shared memory, FIELDS numbers each. Keys go
through a ring of ST stages of BN keys with their scales, which all consumers share. The counter is
0 between launches: the program that fetches the last number resets it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from openmla.kernels.gluon.barriers import barriers
from openmla.kernels.gluon.compat import reinterpret, tma_load
from openmla.kernels.gluon.indexer_records import ScoresBarriers, Window, WorkItem

# Arguments of a scores kernel whose values, and pointers whose alignment, are compiled into none.
COUNTS = ["total_q", "columns", "chunks", "weights_stride", "table_stride"]
VECTORS = [
    "weights_ptr",
    "starts_ptr",
    "ends_ptr",
    "sequences_ptr",
    "longest_ptr",
    "table_ptr",
    "counter_ptr",
]
# Numbers of the fields of a slot in the ring of work items; see WorkItem.
FIELDS = gl.constexpr(4)
QUERY = gl.constexpr(0)
KEY = gl.constexpr(1)
BLOCKS = gl.constexpr(2)  # blocks of BN keys; 0 is the end marker: no more work items
LINE = gl.constexpr(3)
ROWS = gl.constexpr(64)  # keys of a tile in shared memory
COLUMNS = gl.constexpr(128)  # heads of all queries of one product; also bytes of a key
FAR = gl.constexpr(0x7FFFFFFF)
# One atomic add per warp, its result given to every lane.
DRAW = gl.constexpr(
    "{ .reg .pred p; .reg .b32 t; mov.u32 t, %laneid; setp.eq.u32 p, t, 0; mov.b32 t, 0; "
    "@p atom.global.add.u32 t, [$1], 1; shfl.sync.idx.b32 $0, t, 0, 31, -1; }"
)


@gluon.jit
def allocate_tiles(q_desc, CFG: gl.constexpr, LAYOUT: gl.constexpr):
    """Rings in shared memory for tiles of queries, tiles of keys of their type, and the keys'
    scales."""
    STAGES: gl.constexpr = CFG.key_stages * CFG.block_keys // ROWS
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    TILES: gl.constexpr = CFG.query_stages * CFG.tiles
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [TILES, COLUMNS, COLUMNS], LAYOUT)
    k_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, ROWS, COLUMNS], LAYOUT)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], LINEAR)
    return q_smem, k_smem, scales


@gluon.jit
def allocate_items(CFG: gl.constexpr):
    """The ring of announced work items."""
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    return gl.allocate_shared_memory(gl.int32, [CFG.query_stages * FIELDS, 1], LINEAR)


@gluon.jit
def allocate_barriers(CFG: gl.constexpr, Q_READERS: gl.constexpr, K_READERS: gl.constexpr):
    """ScoresBarriers; so many arrivals say that a slot of queries or a stage of keys was read."""
    return ScoresBarriers(
        q_ready=barriers(CFG.query_stages, 1),
        q_empty=barriers(CFG.query_stages, Q_READERS),
        k_ready=barriers(CFG.key_stages, 1),
        k_empty=barriers(CFG.key_stages, K_READERS),
        item_ready=barriers(CFG.query_stages, 1),
    )


@gluon.jit
def draw(counter):
    """Fetch the next work-item number of the launch."""
    return gl.inline_asm_elementwise(
        DRAW, "=r,l,~{memory}", [counter], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def put(items, slot, FIELD: gl.constexpr, value):
    """Write one field of a slot; called by the producer's one warp."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    items.index(slot * FIELDS + FIELD).store(gl.full([1], 0, gl.int32, ONE) + value)


@gluon.jit
def get(items, slot, FIELD: gl.constexpr, NW: gl.constexpr):
    """Read one field of a slot in a partition of NW warps."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    return gl.max(items.index(slot * FIELDS + FIELD).load(ONE), 0)


@gluon.jit
def next_item(smem, bars, turn, CFG: gl.constexpr, NW: gl.constexpr):
    """Wait in a partition of NW warps until work item number `turn` is announced; returns its
    blocks of keys, of which the end marker has none."""
    slot = turn % CFG.query_stages
    mbarrier.wait(bars.item_ready.index(slot), (turn // CFG.query_stages) & 1)
    return get(smem.items, slot, BLOCKS, NW)


@gluon.jit
def load_keys(descs, entries, key, last, barrier, k_tile, scale_tile, PAGE: gl.constexpr):
    """Load 64 keys and their scales; `entries`: the sequence's line of the block table. Its entries
    past the last key are never read.
    """
    K_LAYOUT: gl.constexpr = descs.k.layout
    SCALE_LAYOUT: gl.constexpr = descs.scales.layout
    BOX: gl.constexpr = descs.k.block_shape[1]
    NUMBER: gl.constexpr = ROWS // BOX
    BOXES: gl.constexpr = (NUMBER, 1, BOX, descs.k.block_shape[2])
    LINES: gl.constexpr = (NUMBER, 1, BOX)
    boxes = reinterpret(k_tile, descs.k.dtype, BOXES, K_LAYOUT)
    lines = reinterpret(scale_tile, descs.scales.dtype, LINES, SCALE_LAYOUT)
    for i in gl.static_range(NUMBER):
        at = key + i * BOX
        page = at * 0
        if PAGE > 0:
            page = gl.load(entries + gl.minimum(at, last - 1) // PAGE)
            at = at % PAGE
        tma_load(descs.k, [page, at, 0], barrier, boxes.index(i))
        tma_load(descs.scales, [page, at], barrier, lines.index(i))


@gluon.jit
def load_item(
    descs,
    smem,
    bars,
    entries,
    item,
    turn,
    it,
    CFG: gl.constexpr,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
):
    """Announce a WorkItem and load its keys, and with the first of them its queries.

    descs: Descriptors; smem: SharedTiles; bars: ScoresBarriers. Returns turn and it, the numbers of
    the next work item and of the next stage of keys.
    """
    TILES: gl.constexpr = CFG.tiles
    BN: gl.constexpr = CFG.block_keys
    ST: gl.constexpr = CFG.key_stages
    QS: gl.constexpr = CFG.query_stages
    SUB: gl.constexpr = BN // ROWS
    Q_BOX: gl.constexpr = descs.q.block_shape
    Q_LAYOUT: gl.constexpr = descs.q.layout
    blocks = (gl.minimum(item.last - item.key, CFG.chunk) + BN - 1) // BN
    slot = turn % QS
    mbarrier.wait(bars.q_empty.index(slot), ((turn // QS) & 1) ^ 1)
    put(smem.items, slot, QUERY, item.query)
    put(smem.items, slot, KEY, item.key)
    put(smem.items, slot, BLOCKS, blocks)
    put(smem.items, slot, LINE, item.line)
    mbarrier.arrive(bars.item_ready.index(slot), count=1)
    for c in range(0, blocks):
        stage = it % ST
        mbarrier.wait(bars.k_empty.index(stage), ((it // ST) & 1) ^ 1)
        mbarrier.expect(bars.k_ready.index(stage), BN * (descs.k.block_shape[2] + 4))
        for j in gl.static_range(SUB):
            load_keys(
                descs,
                entries,
                item.key + c * BN + j * ROWS,
                item.last,
                bars.k_ready.index(stage),
                smem.k.index(stage * SUB + j),
                smem.scales.index(stage * SUB + j),
                PAGE,
            )
        if c == 0:
            mbarrier.expect(bars.q_ready.index(slot), TILES * COLUMNS * COLUMNS)
            for w in gl.static_range(TILES):
                tile = smem.q.index(slot * TILES + w)
                tile = reinterpret(tile, descs.q.dtype, Q_BOX, Q_LAYOUT)
                first = item.query + w * (COLUMNS // HEADS)
                tma_load(descs.q, [first, 0, 0], bars.q_ready.index(slot), tile)
        it += 1
    return turn + 1, it


@gluon.jit
def producer(
    sources,
    smem,
    bars,
    CFG: gl.constexpr,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
):
    """Fetch work items and load them until there are none, then announce the end.

    sources: Sources; smem: SharedTiles; bars: ScoresBarriers.
    """
    descs, windows, table, counter, total_q, columns, chunks = sources
    QB: gl.constexpr = CFG.tiles * (COLUMNS // HEADS)
    QS: gl.constexpr = CFG.query_stages
    CHUNK: gl.constexpr = CFG.chunk
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    if windows.longest_ptr is not None:
        longest = gl.minimum(gl.load(windows.longest_ptr), columns)
        chunks = gl.maximum((longest + CHUNK - 1) // CHUNK, 1)
    x = gl.program_id(0)
    total = (total_q + QB - 1) // QB * chunks
    turn = x * 0
    it = x * 0
    while x < total:
        query = x // chunks * QB
        live = (lane < QB) & (query + lane < total_q)
        start = gl.maximum(gl.load(windows.starts_ptr + query + lane, mask=live, other=0), 0)
        end = gl.minimum(gl.load(windows.ends_ptr + query + lane, mask=live, other=0), columns)
        live = (live & (start < end)).to(gl.int32)
        if PAGE > 0:
            lines = gl.load(windows.sequences_ptr + query + lane, mask=live > 0, other=0)
            while gl.max(live, 0) > 0:
                line = gl.min(gl.where(live > 0, lines, FAR), 0)
                mine = (live > 0) & (lines == line)
                live = gl.where(lines == line, 0, live)
                first = gl.min(gl.where(mine, start, FAR), 0) // ROWS * ROWS
                last = gl.max(gl.where(mine, end, 0), 0)
                key = first + x % chunks * CHUNK
                if key < last:
                    entries = table.ptr + line.to(gl.int64) * table.row_stride
                    item = WorkItem(query, key, last, line)
                    turn, it = load_item(
                        descs, smem, bars, entries, item, turn, it, CFG, HEADS, PAGE
                    )
        else:
            first = gl.min(gl.where(live > 0, start, FAR), 0) // ROWS * ROWS
            last = gl.max(gl.where(live > 0, end, 0), 0)
            if last > 0:
                key = first + x % chunks * CHUNK
                if key < last:
                    item = WorkItem(query, key, last, x * 0)
                    turn, it = load_item(
                        descs, smem, bars, table.ptr, item, turn, it, CFG, HEADS, PAGE
                    )
        x = draw(counter) + gl.num_programs(0)
    if x == total + gl.num_programs(0) - 1:
        gl.store(counter, 0)
    slot = turn % QS
    mbarrier.wait(bars.q_empty.index(slot), ((turn // QS) & 1) ^ 1)
    put(smem.items, slot, BLOCKS, 0)
    mbarrier.arrive(bars.item_ready.index(slot), count=1)


@gluon.jit
def window_of(windows, query, line, total_q, columns, PAGE: gl.constexpr):
    """The Window of a query; empty if the query is of another sequence than `line`.

    windows: WindowPointers.
    """
    live = query < total_q
    low = gl.load(windows.starts_ptr + query, mask=live, other=0)
    high = gl.load(windows.ends_ptr + query, mask=live, other=0)
    high = gl.minimum(high, columns)
    if PAGE > 0:
        own = gl.load(windows.sequences_ptr + query, mask=live, other=-1) == line
        high = gl.where(own, high, 0)
    return Window(gl.maximum(low, 0), high)


@gluon.jit
def weights_of(weights, query, column, HEADS: gl.constexpr):
    """Addresses of the weights (Matrix) of a query tile's columns, and the query of each.

    Kernels halve them: what they sum is x + |x|, at the full rate of FADD, which is 2 relu(x).
    """
    token = query + column // HEADS
    return weights.ptr + token.to(gl.int64) * weights.row_stride + column % HEADS, token
