"""Scores of the indexer on Hopper where requests have one or two queries each: decoding.

Every key of a request is read for one or two queries, so the kernel is bound by memory. What
scores.py does, a block of queries of several requests that share the keys, would read each request
after the other on one SM. Here, a work item is a tile of QUERIES queries of one request with a
range of its keys:

| partition | warps | does |
|---|---|---|
| consumer 0 … NC - 1 | 4 each | every NC-th block of keys against the work item's queries |
| producer | 1 | finds its work items, loads queries, keys and scales by TMA |
| converter 0, 1 | 4 each | where keys are FP4: make e4m3 tiles of them (fp4_keys.py) |

Keys are wgmma's M (64 rows), the heads of the queries its N = QUERIES x HEADS. A score is added up
in the order of scores.py, so it has the same bits.

Work is divided evenly by blocks of keys, without atomics: each producer adds up the blocks of all
requests (prefix sums over GROUP requests at a time) and takes its share of the consecutive numbers,
so requests of any lengths give every SM as many blocks, and a request without keys costs nothing. A
share is few work items, parts of neighboring requests, and its first keys are loaded as soon as the
ring has room. Entries of the block table are read 32 at a time, one such group ahead of the keys.

Windows are found here, from offsets and lengths of the requests, so that no kernel need run in
front. Producers write them when their loads are issued, for a selection that may follow.

What runs once per program is short, because its instructions are fetched from memory: loops are not
unrolled, nothing is divided, and counting and loading share one loop over the requests.
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
    Window,
    WindowPointers,
)
from openmla.kernels.gluon.indexer_work import COLUMNS, FAR, ROWS, weights_of
from openmla.kernels.gluon.requests import cut
from openmla.kernels.gluon.select.tile import plus
from openmla.kernels.hopper.indexer.fp4_keys import (
    allocate_codes,
    convert_blocks,
    finish_wide_keys,
    loaded,
)
from openmla.kernels.hopper.indexer.records import (
    DecodeScores,
    Group,
    KeyRange,
    RequestPointers,
    TileWindows,
)
from openmla.kernels.hopper.indexer.scores import WARPS, finish

# Arguments whose values, and pointers whose alignment, are compiled into none.
COUNTS = [
    "total_q",
    "columns",
    "batch",
    "reach",
    "first_query",
    "least",
    "weights_stride",
    "table_stride",
]
VECTORS = [
    "weights_ptr",
    "cu_ptr",
    "lengths_ptr",
    "table_ptr",
    "starts_ptr",
    "ends_ptr",
    "sequences_ptr",
]
LANES = gl.constexpr(32)  # entries of the block table that are read at once
# Numbers of the fields of a slot in the ring of work items.
FIELDS = gl.constexpr(5)
QUERY = gl.constexpr(0)
KEY = gl.constexpr(1)
BLOCKS = gl.constexpr(2)  # blocks of BN keys; 0 is the end marker: no more work items
END = gl.constexpr(3)  # the key after the last that the tile's first query sees
SECOND_END = gl.constexpr(4)  # the same of its second query, 0 where there is none


@gluon.jit
def put(items, slot, FIELD: gl.constexpr, value):
    """Write one field of a slot; called by the producer's one warp."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    items.index(slot * FIELDS + FIELD).store(gl.full([1], 0, gl.int32, ONE) + value)


@gluon.jit
def get(items, slot, FIELD: gl.constexpr):
    """Read one field of a slot in a consumer."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(items.index(slot * FIELDS + FIELD).load(ONE), 0)


@gluon.jit
def load_group(work, first, CFG: gl.constexpr):
    """The Group of requests first … first + CFG.group - 1. work: DecodeScores."""
    requests = work.requests
    BN: gl.constexpr = CFG.block_keys
    LAYOUT: gl.constexpr = gl.BlockedLayout([CFG.group // 32], [32], [1], [0])
    request = first + gl.arange(0, CFG.group, LAYOUT)
    inside = request < requests.batch
    start = gl.load(requests.cu_ptr + request, mask=inside, other=0)
    after = gl.load(requests.cu_ptr + request + 1, mask=inside, other=0)
    length = gl.load(requests.lengths_ptr + request, mask=inside, other=0)
    start = cut(start - requests.first_query, work.total_q)
    stop = gl.maximum(cut(after - requests.first_query, work.total_q), start)
    # The last query of a request sees all keys; this call may have been given only some before it.
    end = length - (after - requests.first_query - stop)
    blocks = gl.where(end > requests.least, (cut(end, work.columns) + BN - 1) // BN, 0)
    tiles = (stop - start + CFG.queries - 1) // CFG.queries
    return Group(request=request, start=start, stop=stop, end=end, blocks=tiles * blocks)


@gluon.jit
def pick(values, mine):
    """The element of a vector for which `mine` is true, of one element at most."""
    return gl.sum(gl.where(mine, values, 0), 0)


@gluon.jit
def scored_end(end, work):
    """The key after the last of a query that sees keys up to `end`, if it needs scores; else 0.

    work: DecodeScores.
    """
    return gl.where(end > work.requests.least, gl.minimum(end, work.columns), 0)


@gluon.jit
def load_entries(entries, page, pages):
    """Entries page … page + 31 of a line of the block table; those from `pages` on are not read."""
    lane = gl.arange(0, LANES, gl.BlockedLayout([1], [32], [1], [0]))
    return gl.load(entries + page + lane, mask=page + lane < pages, other=0)


@gluon.jit
def load_keys(work, descs, entries, keys, page, this, it, CFG: gl.constexpr, PAGE: gl.constexpr):
    """Load the blocks of a KeyRange into the ring, from stage number `it` on.

    work: DecodeScores; descs: Descriptors; entries: the line of the block table, and `this` its
    entries page … page + 31.
    """
    smem = work.smem
    bars = work.bars
    BN: gl.constexpr = CFG.block_keys
    ST: gl.constexpr = CFG.key_stages
    BOX: gl.constexpr = descs.k.block_shape[1]
    NUMBER: gl.constexpr = BN // BOX  # boxes of a stage
    K_BOXES: gl.constexpr = (ST * NUMBER, 1, BOX, descs.k.block_shape[2])
    S_BOXES: gl.constexpr = (ST * NUMBER, 1, BOX)
    K_LAYOUT: gl.constexpr = descs.k.layout
    S_LAYOUT: gl.constexpr = descs.scales.layout
    k_boxes = reinterpret(smem.k, descs.k.dtype, K_BOXES, K_LAYOUT)
    s_boxes = reinterpret(smem.scales, descs.scales.dtype, S_BOXES, S_LAYOUT)
    lane = gl.arange(0, LANES, gl.BlockedLayout([1], [32], [1], [0]))
    pages = (keys.last - 1) // PAGE + 1
    following = load_entries(entries, page + LANES, pages)
    for c in range(0, keys.blocks):
        stage = (it + c) % ST
        mbarrier.wait(bars.k_empty.index(stage), (((it + c) // ST) & 1) ^ 1)
        mbarrier.expect(bars.k_ready.index(stage), BN * (descs.k.block_shape[2] + 4))
        for i in range(0, NUMBER + work.zero):
            at = keys.first + c * BN + i * BOX
            # Boxes past the last key are of its page: their scores are not stored.
            number = gl.minimum(at, keys.last - 1) // PAGE
            if number >= page + LANES:
                page += LANES
                this = following
                following = load_entries(entries, page + LANES, pages)
            entry = pick(this, lane == number - page)
            row = at % PAGE
            box = stage * NUMBER + i
            tma_load(descs.k, [entry, row, 0], bars.k_ready.index(stage), k_boxes.index(box))
            tma_load(descs.scales, [entry, row], bars.k_ready.index(stage), s_boxes.index(box))


@gluon.jit
def load_work_item(
    work, descs, table, group, mine, block, most, turn, it, CFG: gl.constexpr, PAGE: gl.constexpr
):
    """Announce the work item that begins with a block of a request, and load its queries and keys.
    Returns how many blocks it has, `most` of them at most.

    work: DecodeScores; descs: Descriptors; table: Matrix of pages; group: a Group, and `mine` says
    which request of it; `turn` and `it` are the numbers of the work item and of its first stage of
    keys.
    """
    smem = work.smem
    bars = work.bars
    BN: gl.constexpr = CFG.block_keys
    QS: gl.constexpr = CFG.query_stages
    Q_BOX: gl.constexpr = descs.q.block_shape
    Q_LAYOUT: gl.constexpr = descs.q.layout
    request = pick(group.request, mine)
    query = pick(group.start, mine)
    stop = pick(group.stop, mine)
    last = pick(group.end, mine)
    high = gl.minimum(last, work.columns)
    every = (high + BN - 1) // BN  # blocks of each tile of the request
    while block >= every:
        block -= every
        query += CFG.queries
    keys = KeyRange(block * BN, high, gl.minimum(every - block, most))
    entries = table.ptr + request.to(gl.int64) * table.row_stride
    page = keys.first // PAGE
    this = load_entries(entries, page, (high - 1) // PAGE + 1)
    own = last - (stop - 1 - query)
    slot = turn % QS
    mbarrier.wait(bars.q_empty.index(slot), ((turn // QS) & 1) ^ 1)
    put(smem.items, slot, QUERY, query)
    put(smem.items, slot, KEY, keys.first)
    put(smem.items, slot, BLOCKS, keys.blocks)
    put(smem.items, slot, END, scored_end(own, work))
    if CFG.queries == 2:
        second = gl.where(query + 1 < stop, scored_end(own + 1, work), 0)
        put(smem.items, slot, SECOND_END, second)
    mbarrier.arrive(bars.item_ready.index(slot), count=1)
    mbarrier.expect(bars.q_ready.index(slot), smem.q.shape[1] * COLUMNS)
    q_tile = reinterpret(smem.q.index(slot), descs.q.dtype, Q_BOX, Q_LAYOUT)
    tma_load(descs.q, [query, 0, 0], bars.q_ready.index(slot), q_tile)
    load_keys(work, descs, entries, keys, page, this, it, CFG, PAGE)
    return keys.blocks


@gluon.jit
def write_windows(work, seen):
    """Write the windows of all queries, as the kernel does that other scores kernels need in front:
    programs take 32 queries in turn. work: DecodeScores; seen: WindowPointers."""
    requests = work.requests
    lane = gl.arange(0, LANES, gl.BlockedLayout([1], [32], [1], [0]))
    for first in range(gl.program_id(0) * LANES, work.total_q, gl.num_programs(0) * LANES):
        query = first + lane
        inside = query < work.total_q
        number = query + requests.first_query
        # Bisect for how many requests end before the query or at it.
        place = lane * 0
        step = requests.reach
        while step > 0:
            tried = place + step
            after = gl.load(requests.cu_ptr + tried, mask=tried <= requests.batch, other=FAR)
            place = gl.where(after <= number, tried, place)
            step = step >> 1
        owned = (place < requests.batch) & inside
        after = gl.load(requests.cu_ptr + place + 1, mask=owned, other=0)
        length = gl.load(requests.lengths_ptr + place, mask=owned, other=0)
        end = gl.where(owned, gl.maximum(length - after + number + 1, 0), 0)
        gl.store(seen.starts_ptr + query, lane * 0, mask=inside)
        gl.store(seen.ends_ptr + query, end, mask=inside)
        gl.store(seen.sequences_ptr + query, gl.where(owned, place, 0), mask=inside)


@gluon.jit
def producer(work, descs, table, seen, CFG: gl.constexpr, PAGE: gl.constexpr):
    """Load this program's share of all blocks, then announce the end.

    work: DecodeScores; descs: Descriptors; table: Matrix of pages; seen: WindowPointers, written.
    """
    smem = work.smem
    bars = work.bars
    QS: gl.constexpr = CFG.query_stages
    batch = work.requests.batch
    program = gl.program_id(0)
    counting = program * 0 + 1  # the first time through the requests
    first = program * 0
    upto = program * 0  # blocks of the requests so far
    queries = program * 0
    number = program * 0
    begin = program * 0
    end = program * 0
    turn = program * 0
    while first < batch:
        group = load_group(work, first, CFG)
        first += CFG.group
        before = upto
        upto += gl.sum(group.blocks, 0)
        if counting > 0:
            queries += gl.sum(group.stop - group.start, 0)
            if first >= batch:
                counting = program * 0
                # Offsets that are no offsets could give so much work that numbers overflow.
                total = gl.where(queries <= work.total_q, upto, 0)
                share = (total.to(gl.float32) * work.part).to(gl.int32)
                while share * gl.num_programs(0) < total:
                    share += 1
                number = program * share
                begin = number
                end = gl.minimum(number + share, total)
                first = program * 0
                upto = program * 0
        elif number < upto:
            after = before + gl.associative_scan(group.blocks, 0, plus)
            until = gl.minimum(upto, end)
            while number < until:
                mine = (number >= after - group.blocks) & (number < after)
                within = number - pick(after - group.blocks, mine)
                number += load_work_item(
                    work,
                    descs,
                    table,
                    group,
                    mine,
                    within,
                    end - number,
                    turn,
                    number - begin,
                    CFG,
                    PAGE,
                )
                turn += 1
            if number >= end:
                first = batch
    write_windows(work, seen)
    slot = turn % QS
    mbarrier.wait(bars.q_empty.index(slot), ((turn // QS) & 1) ^ 1)
    put(smem.items, slot, BLOCKS, 0)
    mbarrier.arrive(bars.item_ready.index(slot), count=1)


@gluon.jit
def next_item(smem, bars, turn, CFG: gl.constexpr):
    """Wait in a consumer until work item number `turn` is announced; returns its blocks of keys, of
    which the end marker has none."""
    slot = turn % CFG.query_stages
    mbarrier.wait(bars.item_ready.index(slot), (turn // CFG.query_stages) & 1)
    return get(smem.items, slot, BLOCKS)


@gluon.jit
def converter(work, fp4, loads, WHO: gl.constexpr, CFG: gl.constexpr):
    """Convert every second block of keys, from block WHO on.

    work: DecodeScores; fp4: Fp4Tiles; loads: ScoresBarriers of the codes.
    """
    bars = work.bars
    turn = gl.program_id(0) * 0
    it = turn
    blocks = next_item(work.smem, bars, turn, CFG)
    while blocks > 0:
        mbarrier.arrive(bars.q_empty.index(turn % CFG.query_stages), count=1)
        convert_blocks(work.smem, fp4, bars, loads, it, blocks, WHO, 2, CFG)
        it += blocks
        turn += 1
        blocks = next_item(work.smem, bars, turn, CFG)


@gluon.jit
def consumer(work, fp4, weights, out, WHO: gl.constexpr, CFG: gl.constexpr, HEADS: gl.constexpr):
    """Multiply the queries of every work item with every NC-th block of keys, from block WHO on.

    Blocks count through all work items of the program, as stages of the ring do.

    work: DecodeScores; fp4: Fp4Tiles, None of other keys; weights, out: Matrix.
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
    blocks = next_item(smem, bars, turn, CFG)
    while blocks > 0:
        slot = turn % QS
        query = get(smem.items, slot, QUERY)
        first = get(smem.items, slot, KEY)
        at, token = weights_of(weights, query, column, HEADS)
        halves = gl.load(at, mask=token < work.total_q, other=0.0) * 0.5
        window = Window(turn * 0, get(smem.items, slot, END))
        second = window
        high = window.high
        if CFG.queries == 2:
            second = Window(turn * 0, get(smem.items, slot, SECOND_END))
            high = gl.minimum(high, second.high)
        seen = TileWindows(window, second, window, window)
        row_ptr = out.ptr + query.to(gl.int64) * out.row_stride
        mbarrier.wait(bars.q_ready.index(slot), (turn // QS) & 1)
        q = smem.q.index(slot).permute((1, 0))
        zero = gl.zeros([ROWS, N], gl.float32, SL)
        for c in range((WHO + NC - it % NC) % NC, blocks, NC):
            stage = (it + c) % ST
            key = first + c * BN
            whole = key + BN <= high
            mbarrier.wait(bars.k_ready.index(stage), ((it + c) // ST) & 1)
            for j in range(0, SUB + work.zero):
                k = smem.k.index(stage * SUB + j)
                S_next = warpgroup_mma(k, q, zero, use_acc=False, is_async=True)
                scale = smem.scales.index(stage * SUB + j).load(RL)
                S = warpgroup_mma_wait(0, deps=(S_next,))
                place = key + j * ROWS
                finish(S, halves, scale, row_ptr, out.row_stride, place, whole, seen, CFG.queries)
            if fp4 is not None:
                finish_wide_keys(
                    fp4,
                    stage,
                    smem.q.index(slot),
                    weights,
                    query,
                    work.total_q,
                    out,
                    key,
                    seen,
                    CFG,
                    CFG.queries,
                    HEADS,
                )
            mbarrier.arrive(bars.k_empty.index(stage), count=1)
        it += blocks
        mbarrier.arrive(bars.q_empty.index(slot), count=1)
        turn += 1
        blocks = next_item(smem, bars, turn, CFG)


@gluon.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=VECTORS)
def decode_scores_kernel(  # noqa: PLR0913
    q_desc,
    k_desc,
    s_desc,
    weights_ptr,
    cu_ptr,
    lengths_ptr,
    table_ptr,
    out_ptr,
    starts_ptr,
    ends_ptr,
    sequences_ptr,
    total_q,
    columns,
    batch,
    reach,
    first_query,
    least,
    part,
    weights_stride,
    table_stride,
    out_stride,
    CFG: gl.constexpr,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    REGISTERS: gl.constexpr,
    LAYOUT: gl.constexpr,
    FP4: gl.constexpr = False,
):
    """Scores of all queries; CFG: DecodeScoresConfig of 2 to 4 consumers. REGISTERS: Registers.
    LAYOUT: of shared tiles whose rows have 128 bytes. FP4: keys are e2m1, and s_desc has their
    exponents. See DecodeScores and RequestPointers for the
    numbers; windows are written to starts_ptr, ends_ptr and sequences_ptr."""
    NC: gl.constexpr = CFG.consumers
    N: gl.constexpr = CFG.queries * HEADS
    STAGES: gl.constexpr = CFG.key_stages * CFG.block_keys // ROWS
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    smem = SharedTiles(
        items=gl.allocate_shared_memory(gl.int32, [CFG.query_stages * FIELDS, 1], LINEAR),
        q=gl.allocate_shared_memory(q_desc.dtype, [CFG.query_stages, N, COLUMNS], LAYOUT),
        k=gl.allocate_shared_memory(q_desc.dtype, [STAGES, ROWS, COLUMNS], LAYOUT),
        scales=gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], LINEAR),
    )
    # Not known at compile time: loops that it bounds are not unrolled.
    zero = gl.minimum(total_q, 0)
    bars = ScoresBarriers(
        q_ready=barriers(CFG.query_stages, 1),
        q_empty=barriers(CFG.query_stages, NC + 2 if FP4 else NC),
        k_ready=barriers(CFG.key_stages, 1),
        k_empty=barriers(CFG.key_stages, 1),
        item_ready=barriers(CFG.query_stages, 1),
    )
    requests = RequestPointers(cu_ptr, lengths_ptr, batch, reach, first_query, least)
    seen = WindowPointers(starts_ptr, ends_ptr, sequences_ptr, None)
    weights = Matrix(weights_ptr, weights_stride)
    out = Matrix(out_ptr, out_stride)
    table = Matrix(table_ptr, table_stride)
    descs = Descriptors(q=q_desc, k=k_desc, scales=s_desc)
    work = DecodeScores(smem, bars, requests, total_q, columns, part, zero)
    wait_for_kernel_before()
    R: gl.constexpr = REGISTERS
    if FP4:
        gl.static_assert(NC == 2, "FP4 keys leave registers for two consumers")
        fp4 = allocate_codes(smem.k, CFG)
        rings, loads = loaded(smem, bars, fp4, CFG)
        loading = DecodeScores(rings, loads, requests, total_q, columns, part, zero)
        gl.warp_specialize(
            [
                (consumer, (work, fp4, weights, out, 0, CFG, HEADS)),
                (consumer, (work, fp4, weights, out, 1, CFG, HEADS)),
                (converter, (work, fp4, loads, 0, CFG)),
                (converter, (work, fp4, loads, 1, CFG)),
                (producer, (loading, descs, table, seen, CFG, PAGE)),
            ],
            [4, 4, 4, 1],
            [R.consumer, R.converter, R.converter, R.producer],
        )
    elif NC == 2:
        gl.warp_specialize(
            [
                (consumer, (work, None, weights, out, 0, CFG, HEADS)),
                (consumer, (work, None, weights, out, 1, CFG, HEADS)),
                (producer, (work, descs, table, seen, CFG, PAGE)),
            ],
            [4, 1],
            [R.consumer, R.producer],
        )
    elif NC == 3:
        gl.warp_specialize(
            [
                (consumer, (work, None, weights, out, 0, CFG, HEADS)),
                (consumer, (work, None, weights, out, 1, CFG, HEADS)),
                (consumer, (work, None, weights, out, 2, CFG, HEADS)),
                (producer, (work, descs, table, seen, CFG, PAGE)),
            ],
            [4, 4, 1],
            [R.consumer, R.consumer, R.producer],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (work, None, weights, out, 0, CFG, HEADS)),
                (consumer, (work, None, weights, out, 1, CFG, HEADS)),
                (consumer, (work, None, weights, out, 2, CFG, HEADS)),
                (consumer, (work, None, weights, out, 3, CFG, HEADS)),
                (producer, (work, descs, table, seen, CFG, PAGE)),
            ],
            [4, 4, 4, 1],
            [R.consumer, R.consumer, R.consumer, R.producer],
        )
