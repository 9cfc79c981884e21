"""Scores of the indexer on Blackwell.

    score[t, s] = k_scale[s] * sum over heads of weight[t, h] * relu(q[t, h] . k[s])

| partition | warps | does |
|---|---|---|
| sums 0, 1 | 4 each | relu, weights, sum over heads, store; every second query tile |
| multiply | 1 | issues all products |
| producer | 1 | fetches work items, loads queries, keys and scales by TMA (indexer_work.py) |

A product is 128 keys (M) times the heads of a query tile (N = 128: 128 / HEADS queries), over the
128 columns of a key. Its row is a key and lies in one thread, so the sum over heads needs no other.
Query tile j has columns 128 j … of tensor memory: its next product waits until they are read, and
three others run meanwhile.

| barrier | number | completed by (count) | waited for by |
|---|---|---|---|
| q_ready, k_ready | QS, ST | TMA bytes (1) | multiply; k_ready also sums |
| q_empty | QS | commit of the item's last product, multiply and sums have read (4) | producer |
| k_empty | ST | commit of the stage's products, sums 0, 1 have its scales (3) | producer |
| item_ready | QS | producer: the item is announced (1) | multiply, sums |
| ready, empty of products | TILES | commit of the product (1), sums have it (1) | sums, multiply |
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    allocate_tensor_memory,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
)

from openmla.kernels.blackwell.indexer.records import ProductBarriers, Scores
from openmla.kernels.gluon.barriers import barriers
from openmla.kernels.gluon.compat import reinterpret
from openmla.kernels.gluon.indexer_records import (
    Descriptors,
    Matrix,
    SharedTiles,
    Sources,
    WindowPointers,
)
from openmla.kernels.gluon.indexer_work import (
    COLUMNS,
    COUNTS,
    KEY,
    LINE,
    QUERY,
    VECTORS,
    allocate_barriers,
    allocate_items,
    allocate_tiles,
    get,
    next_item,
    producer,
    weights_of,
    window_of,
)

BN = gl.constexpr(128)  # keys of a product
PART = gl.constexpr(32)  # heads that are summed at a time
GROUPS = gl.constexpr(2)  # partitions of sums
WARPS = gl.constexpr(4)  # of each of them


@gluon.jit
def multiply(smem, bars, products, tmem, CFG: gl.constexpr, LAYOUT: gl.constexpr):
    """Issue every product of every work item.

    smem: SharedTiles; bars: ScoresBarriers; products: ProductBarriers.
    """
    TILES: gl.constexpr = CFG.tiles
    ST: gl.constexpr = CFG.key_stages
    QS: gl.constexpr = CFG.query_stages
    k_tiles = reinterpret(smem.k, smem.k.dtype, [ST, BN, COLUMNS], LAYOUT)
    turn = gl.program_id(0) * 0
    it = turn
    blocks = next_item(smem, bars, turn, CFG, 1)
    while blocks > 0:
        slot = turn % QS
        mbarrier.wait(bars.q_ready.index(slot), (turn // QS) & 1)
        for _c in range(0, blocks):
            stage = it % ST
            mbarrier.wait(bars.k_ready.index(stage), (it // ST) & 1)
            for j in gl.static_range(TILES):
                mbarrier.wait(products.empty.index(j), (it & 1) ^ 1)
                q = smem.q.index(slot * TILES + j).permute((1, 0))
                tcgen05_mma(k_tiles.index(stage), q, tmem.index(j), use_acc=False)
                tcgen05_commit(products.ready.index(j))
            tcgen05_commit(bars.k_empty.index(stage))
            it += 1
        tcgen05_commit(bars.q_empty.index(slot))
        mbarrier.arrive(bars.q_empty.index(slot), count=1)
        turn += 1
        blocks = next_item(smem, bars, turn, CFG, 1)


@gluon.jit
def put_weights(w_smem, weights, query, total_q, TILE: gl.constexpr, HEADS: gl.constexpr):
    """Copy the weights (Matrix) of a tile's columns to shared memory, halved."""
    column = gl.arange(0, COLUMNS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    at, token = weights_of(weights, query, column, HEADS)
    w_smem.index(TILE).store(gl.load(at, mask=token < total_q, other=0.0) * 0.5)


@gluon.jit
def sum_heads(tile, weights, FIRST: gl.constexpr, HEADS: gl.constexpr, REGS: gl.constexpr):
    """One query's sums [BN] over its heads, which are columns FIRST … of the tile."""
    sums = gl.zeros([BN], gl.float32, gl.SliceLayout(1, REGS))
    for p in gl.static_range(HEADS // PART):
        part = tile.slice(FIRST + p * PART, PART).load(REGS)
        weight = weights.slice(FIRST + p * PART, PART).load(gl.SliceLayout(0, REGS))
        sums += gl.sum((part + gl.abs(part)) * weight[None, :], 1)
    return sums


@gluon.jit
def sums(
    work,
    WHO: gl.constexpr,
    CFG: gl.constexpr,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    REGS: gl.constexpr,
):
    """Sum and store query tiles WHO, WHO + 2, … of every block of keys.

    work: Scores.
    """
    smem = work.smem
    bars = work.bars
    products = work.products
    out = work.out
    total_q = work.total_q
    TILES: gl.constexpr = CFG.tiles
    ST: gl.constexpr = CFG.key_stages
    QS: gl.constexpr = CFG.query_stages
    QUERIES: gl.constexpr = COLUMNS // HEADS
    BY_KEY: gl.constexpr = gl.SliceLayout(1, REGS)
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    scales = reinterpret(smem.scales, gl.float32, [ST, BN], LINEAR)
    row = gl.arange(0, BN, BY_KEY)
    turn = gl.program_id(0) * 0
    it = turn
    blocks = next_item(smem, bars, turn, CFG, WARPS)
    while blocks > 0:
        slot = turn % QS
        first = get(smem.items, slot, QUERY, WARPS)
        key = get(smem.items, slot, KEY, WARPS)
        line = get(smem.items, slot, LINE, WARPS)
        for j in gl.static_range(WHO, TILES, GROUPS):
            put_weights(work.weight_tiles, work.weights, first + j * QUERIES, total_q, j, HEADS)
        for c in range(0, blocks):
            stage = it % ST
            keys = key + c * BN + row
            mbarrier.wait(bars.k_ready.index(stage), (it // ST) & 1)
            scale = scales.index(stage).load(BY_KEY)
            mbarrier.arrive(bars.k_empty.index(stage), count=1)
            for j in gl.static_range(WHO, TILES, GROUPS):
                mbarrier.wait(products.ready.index(j), it & 1)
                for q in gl.static_range(QUERIES):
                    query = first + j * QUERIES + q
                    tile = work.tmem.index(j)
                    weights = work.weight_tiles.index(j)
                    scores = sum_heads(tile, weights, q * HEADS, HEADS, REGS)
                    if q == QUERIES - 1:
                        mbarrier.arrive(products.empty.index(j), count=1)
                    window = window_of(work.windows, query, line, total_q, work.columns, PAGE)
                    at = out.ptr + query.to(gl.int64) * out.row_stride
                    inside = (keys >= window.low) & (keys < window.high)
                    gl.store(at + keys, scores * scale, mask=inside)
            it += 1
        mbarrier.arrive(bars.q_empty.index(slot), count=1)
        turn += 1
        blocks = next_item(smem, bars, turn, CFG, WARPS)


@gluon.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=VECTORS)
def scores_kernel(  # noqa: PLR0913
    q_desc,
    k_desc,
    s_desc,
    weights_ptr,
    starts_ptr,
    ends_ptr,
    sequences_ptr,
    longest_ptr,
    table_ptr,
    out_ptr,
    counter_ptr,
    total_q,
    columns,
    chunks,
    weights_stride,
    table_stride,
    out_stride,
    CFG: gl.constexpr,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    REGISTERS: gl.constexpr,
    LAYOUT: gl.constexpr,
    TMEM: gl.constexpr,
    REGS: gl.constexpr,
):
    """Scores of all queries; CFG: ScoresConfig with 128 keys per stage. REGISTERS: of a thread in
    the partitions after the first, in their order. LAYOUT: of shared tiles whose rows have 128
    bytes. TMEM: of a product. REGS: of 32 columns of a product in registers."""
    TILES: gl.constexpr = CFG.tiles
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    q_smem, k_smem, scales = allocate_tiles(q_desc, CFG, LAYOUT)
    w_smem = gl.allocate_shared_memory(gl.float32, [TILES, COLUMNS], LINEAR)
    smem = SharedTiles(items=allocate_items(CFG), q=q_smem, k=k_smem, scales=scales)
    bars = allocate_barriers(CFG, 2 + GROUPS, 1 + GROUPS)
    products = ProductBarriers(ready=barriers(TILES, 1), empty=barriers(TILES, 1))
    tmem = allocate_tensor_memory(gl.float32, [TILES, BN, COLUMNS], TMEM)
    windows = WindowPointers(starts_ptr, ends_ptr, sequences_ptr, longest_ptr)
    weights = Matrix(weights_ptr, weights_stride)
    out = Matrix(out_ptr, out_stride)
    table = Matrix(table_ptr, table_stride)
    descs = Descriptors(q=q_desc, k=k_desc, scales=s_desc)
    sources = Sources(descs, windows, table, counter_ptr, total_q, columns, chunks)
    work = Scores(smem, w_smem, bars, products, tmem, windows, weights, out, total_q, columns)
    gl.warp_specialize(
        [
            (sums, (work, 0, CFG, HEADS, PAGE, REGS)),
            (sums, (work, 1, CFG, HEADS, PAGE, REGS)),
            (multiply, (smem, bars, products, tmem, CFG, LAYOUT)),
            (producer, (sources, smem, bars, CFG, HEADS, PAGE)),
        ],
        [4, 1, 1],
        REGISTERS,
    )
