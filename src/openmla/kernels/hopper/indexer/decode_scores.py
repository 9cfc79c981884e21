"""Scores of the indexer on Hopper where requests have one or two queries each: decoding.

Every key of a request is read for one or two queries, so the kernel is bound by memory. What
scores.py does, a block of queries of several requests that share the keys, would read each request
after the other on one SM. Here, a work item is QUERIES queries of one request with a range of its
keys:

| partition | warps | does |
|---|---|---|
| consumer 0 … NC - 1 | 4 each | every NC-th block of keys against the work item's queries |
| producer | 1 | finds its work items, loads queries, keys and scales by TMA |

Keys are wgmma's M (64 rows), the heads of the queries its N = QUERIES x HEADS. A score is added up
in the order of scores.py, so it has the same bits.

Work is divided evenly by blocks of keys, without atomics: each producer adds up the blocks of all
queries (prefix sums over 128 queries at a time) and takes its share of the consecutive numbers, so
requests of any lengths give every SM as many blocks, and an empty window costs nothing. A share is
few work items, parts of neighboring requests, and its first keys are loaded as soon as the ring has
room. Entries of the block table are read 32 at a time, one such group ahead of the keys.

The kernel in front, which writes the windows, ends while this one sets up its barriers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openmla.kernels.gluon.barriers import barriers, wait_for_kernel_before
from openmla.kernels.gluon.compat import reinterpret, tma_load
from openmla.kernels.gluon.indexer_records import (
    Descriptors,
    Matrix,
    ScoresBarriers,
    SharedTiles,
    WindowPointers,
    WorkItem,
)
from openmla.kernels.gluon.indexer_work import (
    BLOCKS,
    COLUMNS,
    KEY,
    LINE,
    QUERY,
    ROWS,
    allocate_items,
    get,
    next_item,
    put,
    weights_of,
)
from openmla.kernels.hopper.indexer.records import DecodeScores, Group
from openmla.kernels.hopper.indexer.scores import WARPS, finish, tile_windows
from openmla.kernels.hopper.indexer.tile import plus

# Arguments whose values, and pointers whose alignment, are compiled into none.
COUNTS = ["total_q", "columns", "weights_stride", "table_stride"]
VECTORS = ["weights_ptr", "starts_ptr", "ends_ptr", "sequences_ptr", "table_ptr"]
GROUP = gl.constexpr(128)  # queries whose blocks are added up at once
LANES = gl.constexpr(32)  # entries of the block table that are read at once


@gluon.jit
def load_group(work, first, CFG: gl.constexpr):
    """The Group of queries first … first + GROUP - 1.

    Queries of one request that share a tile are one work item, the first's. work: DecodeScores.
    """
    windows = work.windows
    BN: gl.constexpr = CFG.block_keys
    query = first + gl.arange(0, GROUP, gl.BlockedLayout([GROUP // 32], [32], [1], [0]))
    inside = query < work.total_q
    low = gl.maximum(gl.load(windows.starts_ptr + query, mask=inside, other=0), 0)
    high = gl.minimum(gl.load(windows.ends_ptr + query, mask=inside, other=0), work.columns)
    line = gl.load(windows.sequences_ptr + query, mask=inside, other=0)
    live = low < high
    if CFG.queries == 2:
        other = query ^ 1
        inside = other < work.total_q
        other_low = gl.maximum(gl.load(windows.starts_ptr + other, mask=inside, other=0), 0)
        other_high = gl.minimum(
            gl.load(windows.ends_ptr + other, mask=inside, other=0), work.columns
        )
        other_line = gl.load(windows.sequences_ptr + other, mask=inside, other=0)
        together = live & (other_low < other_high) & (other_line == line)
        low = gl.where(together, gl.minimum(low, other_low), low)
        high = gl.where(together, gl.maximum(high, other_high), high)
        live = live & ((query % 2 == 0) | (together == 0))
    low = low // ROWS * ROWS
    blocks = gl.where(live, (high - low + BN - 1) // BN, 0)
    return Group(query=query, low=low, high=high, line=line, blocks=blocks)


@gluon.jit
def pick(values, mine):
    """The element of a vector for which `mine` is true, of one element at most."""
    return gl.sum(gl.where(mine, values, 0), 0)


@gluon.jit
def load_entries(entries, page, pages):
    """Entries page … page + 31 of a line of the block table; those from `pages` on are not read."""
    lane = gl.arange(0, LANES, gl.BlockedLayout([1], [32], [1], [0]))
    return gl.load(entries + page + lane, mask=page + lane < pages, other=0)


@gluon.jit
def load_work_item(
    work, descs, entries, item, blocks, turn, it, CFG: gl.constexpr, PAGE: gl.constexpr
):
    """Announce a WorkItem of so many blocks, and load its queries and keys.

    work: DecodeScores; descs: Descriptors; entries: the line of the block table; `turn` and `it`
    are the numbers of the work item and of its first stage of keys.
    """
    smem = work.smem
    bars = work.bars
    BN: gl.constexpr = CFG.block_keys
    ST: gl.constexpr = CFG.key_stages
    QS: gl.constexpr = CFG.query_stages
    SUB: gl.constexpr = BN // ROWS
    BOX: gl.constexpr = descs.k.block_shape[1]
    NUMBER: gl.constexpr = ROWS // BOX
    K_BOXES: gl.constexpr = (NUMBER, 1, BOX, descs.k.block_shape[2])
    S_BOXES: gl.constexpr = (NUMBER, 1, BOX)
    K_LAYOUT: gl.constexpr = descs.k.layout
    S_LAYOUT: gl.constexpr = descs.scales.layout
    Q_BOX: gl.constexpr = descs.q.block_shape
    Q_LAYOUT: gl.constexpr = descs.q.layout
    lane = gl.arange(0, LANES, gl.BlockedLayout([1], [32], [1], [0]))
    pages = (item.last - 1) // PAGE + 1
    page = item.key // PAGE
    these = load_entries(entries, page, pages)
    slot = turn % QS
    mbarrier.wait(bars.q_empty.index(slot), ((turn // QS) & 1) ^ 1)
    put(smem.items, slot, QUERY, item.query)
    put(smem.items, slot, KEY, item.key)
    put(smem.items, slot, BLOCKS, blocks)
    put(smem.items, slot, LINE, item.line)
    mbarrier.arrive(bars.item_ready.index(slot), count=1)
    mbarrier.expect(bars.q_ready.index(slot), smem.q.shape[1] * COLUMNS)
    q_tile = reinterpret(smem.q.index(slot), descs.q.dtype, Q_BOX, Q_LAYOUT)
    tma_load(descs.q, [item.query, 0, 0], bars.q_ready.index(slot), q_tile)
    following = load_entries(entries, page + LANES, pages)
    for c in range(0, blocks):
        stage = (it + c) % ST
        mbarrier.wait(bars.k_empty.index(stage), (((it + c) // ST) & 1) ^ 1)
        mbarrier.expect(bars.k_ready.index(stage), BN * (COLUMNS + 4))
        for j in gl.static_range(SUB):
            k_tile = smem.k.index(stage * SUB + j)
            k_boxes = reinterpret(k_tile, descs.k.dtype, K_BOXES, K_LAYOUT)
            s_tile = smem.scales.index(stage * SUB + j)
            s_boxes = reinterpret(s_tile, descs.scales.dtype, S_BOXES, S_LAYOUT)
            for i in gl.static_range(NUMBER):
                at = item.key + c * BN + j * ROWS + i * BOX
                # Boxes past the last key are of its page: their scores are not stored.
                number = gl.minimum(at, item.last - 1) // PAGE
                if number >= page + LANES:
                    page += LANES
                    these = following
                    following = load_entries(entries, page + LANES, pages)
                entry = pick(these, lane == number - page)
                row = at % PAGE
                tma_load(descs.k, [entry, row, 0], bars.k_ready.index(stage), k_boxes.index(i))
                tma_load(descs.scales, [entry, row], bars.k_ready.index(stage), s_boxes.index(i))


@gluon.jit
def producer(work, descs, table, CFG: gl.constexpr, PAGE: gl.constexpr):
    """Load this program's share of all blocks, then announce the end.

    work: DecodeScores; descs: Descriptors; table: Matrix of pages.
    """
    smem = work.smem
    bars = work.bars
    BN: gl.constexpr = CFG.block_keys
    QS: gl.constexpr = CFG.query_stages
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    total = program * 0
    for first in range(0, work.total_q, GROUP):
        total += gl.sum(load_group(work, first, CFG).blocks, 0)
    share = total // programs
    longer = total % programs  # so many programs have a block more
    number = program * share + gl.minimum(program, longer)
    end = number + share + (program < longer).to(gl.int32)
    begin = number
    turn = program * 0
    before = program * 0  # blocks of the groups before
    first = program * 0
    while number < end:
        group = load_group(work, first, CFG)
        upto = before + gl.associative_scan(group.blocks, 0, plus)
        until = gl.minimum(before + gl.sum(group.blocks, 0), end)
        while number < until:
            mine = (number >= upto - group.blocks) & (number < upto)
            key = pick(group.low, mine) + (number - pick(upto - group.blocks, mine)) * BN
            blocks = gl.minimum(pick(upto, mine), end) - number
            line = pick(group.line, mine)
            query = pick(group.query, mine) // CFG.queries * CFG.queries
            item = WorkItem(query, key, pick(group.high, mine), line)
            entries = table.ptr + line.to(gl.int64) * table.row_stride
            load_work_item(work, descs, entries, item, blocks, turn, number - begin, CFG, PAGE)
            number += blocks
            turn += 1
        before += gl.sum(group.blocks, 0)
        first += GROUP
    slot = turn % QS
    mbarrier.wait(bars.q_empty.index(slot), ((turn // QS) & 1) ^ 1)
    put(smem.items, slot, BLOCKS, 0)
    mbarrier.arrive(bars.item_ready.index(slot), count=1)


@gluon.jit
def consumer(
    work,
    weights,
    out,
    WHO: gl.constexpr,
    CFG: gl.constexpr,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
):
    """Multiply the queries of every work item with every NC-th block of keys, from block WHO on.

    Blocks count through all work items of the program, as stages of the ring do.

    work: DecodeScores; weights, out: Matrix.
    """
    smem = work.smem
    bars = work.bars
    NC: gl.constexpr = CFG.consumers
    BN: gl.constexpr = CFG.block_keys
    ST: gl.constexpr = CFG.key_stages
    QS: gl.constexpr = CFG.query_stages
    N: gl.constexpr = CFG.queries * HEADS
    SUB: gl.constexpr = BN // ROWS
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    column = gl.arange(0, N, gl.SliceLayout(0, SL))
    turn = gl.program_id(0) * 0
    it = turn
    blocks = next_item(smem, bars, turn, CFG, WARPS)
    while blocks > 0:
        slot = turn % QS
        query = get(smem.items, slot, QUERY, WARPS)
        first = get(smem.items, slot, KEY, WARPS)
        line = get(smem.items, slot, LINE, WARPS)
        at, token = weights_of(weights, query, column, HEADS)
        halves = gl.load(at, mask=token < work.total_q, other=0.0) * 0.5
        seen, low, high = tile_windows(
            work.windows, query, line, work.total_q, work.columns, CFG.queries, PAGE
        )
        row_ptr = out.ptr + query.to(gl.int64) * out.row_stride
        mbarrier.wait(bars.q_ready.index(slot), (turn // QS) & 1)
        q = smem.q.index(slot).permute((1, 0))
        zero = gl.zeros([ROWS, N], gl.float32, SL)
        for c in range((WHO + NC - it % NC) % NC, blocks, NC):
            stage = (it + c) % ST
            key = first + c * BN
            whole = (key >= low) & (key + BN <= high)
            mbarrier.wait(bars.k_ready.index(stage), ((it + c) // ST) & 1)
            for j in gl.static_range(SUB):
                k = smem.k.index(stage * SUB + j)
                S_next = warpgroup_mma(k, q, zero, use_acc=False, is_async=True)
                scale = smem.scales.index(stage * SUB + j).load(RL)
                S = warpgroup_mma_wait(0, deps=(S_next,))
                if j == SUB - 1:
                    mbarrier.arrive(bars.k_empty.index(stage), count=1)
                place = key + j * ROWS
                finish(S, halves, scale, row_ptr, out.row_stride, place, whole, seen, CFG.queries)
        it += blocks
        mbarrier.arrive(bars.q_empty.index(slot), count=1)
        turn += 1
        blocks = next_item(smem, bars, turn, CFG, WARPS)


@gluon.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=VECTORS)
def decode_scores_kernel(  # noqa: PLR0913
    q_desc,
    k_desc,
    s_desc,
    weights_ptr,
    starts_ptr,
    ends_ptr,
    sequences_ptr,
    table_ptr,
    out_ptr,
    total_q,
    columns,
    weights_stride,
    table_stride,
    out_stride,
    CFG: gl.constexpr,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    REGISTERS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Scores of all queries; CFG: DecodeScoresConfig of 2 to 4 consumers. REGISTERS: Registers.
    LAYOUT: of shared tiles whose rows have 128 bytes."""
    NC: gl.constexpr = CFG.consumers
    N: gl.constexpr = CFG.queries * HEADS
    STAGES: gl.constexpr = CFG.key_stages * CFG.block_keys // ROWS
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    smem = SharedTiles(
        items=allocate_items(CFG),
        q=gl.allocate_shared_memory(q_desc.dtype, [CFG.query_stages, N, COLUMNS], LAYOUT),
        k=gl.allocate_shared_memory(k_desc.dtype, [STAGES, ROWS, COLUMNS], LAYOUT),
        scales=gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], LINEAR),
    )
    bars = ScoresBarriers(
        q_ready=barriers(CFG.query_stages, 1),
        q_empty=barriers(CFG.query_stages, NC),
        k_ready=barriers(CFG.key_stages, 1),
        k_empty=barriers(CFG.key_stages, 1),
        item_ready=barriers(CFG.query_stages, 1),
    )
    windows = WindowPointers(starts_ptr, ends_ptr, sequences_ptr, None)
    weights = Matrix(weights_ptr, weights_stride)
    out = Matrix(out_ptr, out_stride)
    table = Matrix(table_ptr, table_stride)
    descs = Descriptors(q=q_desc, k=k_desc, scales=s_desc)
    work = DecodeScores(smem, bars, windows, total_q, columns)
    wait_for_kernel_before()
    R: gl.constexpr = REGISTERS
    if NC == 2:
        gl.warp_specialize(
            [
                (consumer, (work, weights, out, 0, CFG, HEADS, PAGE)),
                (consumer, (work, weights, out, 1, CFG, HEADS, PAGE)),
                (producer, (work, descs, table, CFG, PAGE)),
            ],
            [4, 1],
            [R.consumer, R.producer],
        )
    elif NC == 3:
        gl.warp_specialize(
            [
                (consumer, (work, weights, out, 0, CFG, HEADS, PAGE)),
                (consumer, (work, weights, out, 1, CFG, HEADS, PAGE)),
                (consumer, (work, weights, out, 2, CFG, HEADS, PAGE)),
                (producer, (work, descs, table, CFG, PAGE)),
            ],
            [4, 4, 1],
            [R.consumer, R.consumer, R.producer],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (work, weights, out, 0, CFG, HEADS, PAGE)),
                (consumer, (work, weights, out, 1, CFG, HEADS, PAGE)),
                (consumer, (work, weights, out, 2, CFG, HEADS, PAGE)),
                (consumer, (work, weights, out, 3, CFG, HEADS, PAGE)),
                (producer, (work, descs, table, CFG, PAGE)),
            ],
            [4, 4, 4, 1],
            [R.consumer, R.consumer, R.consumer, R.producer],
        )
