"""Scores of the indexer on Hopper.

    score[t, s] = k_scale[s] * sum over heads of weight[t, h] * relu(q[t, h] . k[s])

| partition | warps | does |
|---|---|---|
| consumer 0 … 3 | 4 each | its 128 / HEADS queries against every block of keys |
| producer | 1 | fetches work items, loads queries, keys and scales by TMA (indexer_work.py) |
| converter | 4 | where keys are FP4: makes e4m3 tiles of them, for three consumers (fp4_keys.py) |

Keys are wgmma's M (64 rows), the heads of a consumer's queries its N = 128, the 128 columns of a
key its K, so the sum over heads stays inside a quad of threads. Queries are divided among the
consumers and keys are shared: a key is read from L2 once for 4 x 128 / HEADS queries. A consumer
has one product in flight; what overlaps is the products of one with the sums of the others.

Why so (H200, 2026-11-15, triton 3.6.0, a prototype with contiguous keys, TFLOP/s at 2048 x 8192 and
4096 x 65536, 64 heads): 4 consumers 1005 and 1047; 3 consumers 998 and 1026; 2 consumers with 4
queries and two products in flight 918 and 972; blocks of 256 keys 766 and 789, of 64 keys 911 and
983. Every partition is compiled apart, so what is unrolled costs instruction cache four times.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

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
    ROWS,
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
from openmla.kernels.hopper.indexer.fp4_keys import (
    allocate_codes,
    convert_blocks,
    finish_wide_keys,
    loaded,
)
from openmla.kernels.hopper.indexer.records import Scores, TileWindows

WARPS = gl.constexpr(4)  # of a consumer


@gluon.jit
def store_row(sums, scale, pointer, keys, whole, window):
    """Scale and store the scores of one query and 64 keys: all of them if the block is whole, else
    those inside the query's Window."""
    RL: gl.constexpr = scale.type.layout
    scores = gl.convert_layout(sums, RL, assert_trivial=True) * scale
    if whole:
        gl.store(pointer + keys, scores)
    else:
        inside = (keys >= window.low) & (keys < window.high)
        gl.store(pointer + keys, scores, mask=inside)


@gluon.jit
def finish(S, weights, scale, row_ptr, stride, key, whole, windows, QUERIES: gl.constexpr):
    """Relu, weigh, add up the heads of every query, scale and store.

    weights: halved, as of `weights_of`; windows: TileWindows.
    """
    keys = key + gl.arange(0, ROWS, gl.SliceLayout(1, S.type.layout))
    S = (S + gl.abs(S)) * weights[None, :]
    sums = gl.sum(S.reshape([ROWS, QUERIES, S.shape[1] // QUERIES]), 2)
    if QUERIES == 1:
        store_row(gl.sum(sums, 1), scale, row_ptr, keys, whole, windows.first)
    elif QUERIES == 2:
        a, b = gl.split(sums)
        store_row(a, scale, row_ptr, keys, whole, windows.first)
        store_row(b, scale, row_ptr + stride, keys, whole, windows.second)
    else:
        even, odd = gl.split(sums.reshape([ROWS, 2, 2]))
        a, c = gl.split(even)
        b, d = gl.split(odd)
        store_row(a, scale, row_ptr, keys, whole, windows.first)
        store_row(b, scale, row_ptr + stride, keys, whole, windows.second)
        # Added one by one: three times a stride may overflow 32 bits.
        store_row(c, scale, row_ptr + stride + stride, keys, whole, windows.third)
        store_row(d, scale, row_ptr + stride + stride + stride, keys, whole, windows.fourth)


@gluon.jit
def tile_windows(windows, query, line, total_q, columns, QUERIES: gl.constexpr, PAGE: gl.constexpr):
    """TileWindows of the queries from `query` on, and the keys low … high - 1 that all of them see.

    windows: WindowPointers.
    """
    w0 = window_of(windows, query, line, total_q, columns, PAGE)
    low = w0.low
    high = w0.high
    w1 = w0
    w2 = w0
    w3 = w0
    if QUERIES > 1:
        w1 = window_of(windows, query + 1, line, total_q, columns, PAGE)
        low = gl.maximum(low, w1.low)
        high = gl.minimum(high, w1.high)
    if QUERIES > 2:
        w2 = window_of(windows, query + 2, line, total_q, columns, PAGE)
        w3 = window_of(windows, query + 3, line, total_q, columns, PAGE)
        low = gl.maximum(gl.maximum(low, w2.low), w3.low)
        high = gl.minimum(gl.minimum(high, w2.high), w3.high)
    return TileWindows(w0, w1, w2, w3), low, high


@gluon.jit
def converter(smem, fp4, bars, loads, CFG: gl.constexpr):
    """Convert the keys of every work item. smem: SharedTiles; fp4: Fp4Tiles; bars: ScoresBarriers
    of the tiles, and `loads` of the codes."""
    turn = gl.program_id(0) * 0
    it = turn
    blocks = next_item(smem, bars, turn, CFG, WARPS)
    while blocks > 0:
        mbarrier.arrive(bars.q_empty.index(turn % CFG.query_stages), count=1)
        convert_blocks(smem, fp4, bars, loads, it, blocks, 0, 1, CFG)
        it += blocks
        turn += 1
        blocks = next_item(smem, bars, turn, CFG, WARPS)


@gluon.jit
def consumer(
    work,
    fp4,
    WHO: gl.constexpr,
    CFG: gl.constexpr,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
):
    """Multiply query tile WHO of every work item with the item's keys, 64 at a time.

    work: Scores; fp4: Fp4Tiles, None of other keys.
    """
    smem = work.smem
    bars = work.bars
    windows = work.windows
    weights = work.weights
    out = work.out
    total_q = work.total_q
    columns = work.columns
    BN: gl.constexpr = CFG.block_keys
    ST: gl.constexpr = CFG.key_stages
    QS: gl.constexpr = CFG.query_stages
    SUB: gl.constexpr = BN // ROWS
    QUERIES: gl.constexpr = COLUMNS // HEADS
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, SL))
    turn = gl.program_id(0) * 0
    it = turn
    blocks = next_item(smem, bars, turn, CFG, WARPS)
    while blocks > 0:
        slot = turn % QS
        query = get(smem.items, slot, QUERY, WARPS) + WHO * QUERIES
        first = get(smem.items, slot, KEY, WARPS)
        line = get(smem.items, slot, LINE, WARPS)
        at, token = weights_of(weights, query, column, HEADS)
        halves = gl.load(at, mask=token < total_q, other=0.0) * 0.5
        seen, low, high = tile_windows(windows, query, line, total_q, columns, QUERIES, PAGE)
        row_ptr = out.ptr + query.to(gl.int64) * out.row_stride
        mbarrier.wait(bars.q_ready.index(slot), (turn // QS) & 1)
        q = smem.q.index(slot * CFG.tiles + WHO).permute((1, 0))
        zero = gl.zeros([ROWS, COLUMNS], gl.float32, SL)
        for c in range(0, blocks):
            stage = it % ST
            key = first + c * BN
            whole = (key >= low) & (key + BN <= high)
            mbarrier.wait(bars.k_ready.index(stage), (it // ST) & 1)
            for j in gl.static_range(SUB):
                k = smem.k.index(stage * SUB + j)
                S_next = warpgroup_mma(k, q, zero, use_acc=False, is_async=True)
                scale = smem.scales.index(stage * SUB + j).load(RL)
                S = warpgroup_mma_wait(0, deps=(S_next,))
                if j == SUB - 1 and fp4 is None:
                    mbarrier.arrive(bars.k_empty.index(stage), count=1)
                finish(
                    S,
                    halves,
                    scale,
                    row_ptr,
                    out.row_stride,
                    key + j * ROWS,
                    whole,
                    seen,
                    QUERIES,
                )
            if fp4 is not None:
                finish_wide_keys(
                    fp4,
                    stage,
                    smem.q.index(slot * CFG.tiles + WHO),
                    weights,
                    query,
                    total_q,
                    out,
                    key,
                    seen,
                    CFG,
                    QUERIES,
                    HEADS,
                )
                mbarrier.arrive(bars.k_empty.index(stage), count=1)
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
    FP4: gl.constexpr = False,
):
    """Scores of all queries; CFG: ScoresConfig with a query tile for each of 3 or 4 consumers.
    REGISTERS: Registers. LAYOUT: of shared tiles whose rows have 128 bytes. FP4: keys are e2m1,
    and s_desc has their exponents."""
    NC: gl.constexpr = CFG.tiles
    q_smem, k_smem, scales = allocate_tiles(q_desc, CFG, LAYOUT)
    smem = SharedTiles(items=allocate_items(CFG), q=q_smem, k=k_smem, scales=scales)
    bars = allocate_barriers(CFG, NC + 1 if FP4 else NC, NC)
    windows = WindowPointers(starts_ptr, ends_ptr, sequences_ptr, longest_ptr)
    weights = Matrix(weights_ptr, weights_stride)
    out = Matrix(out_ptr, out_stride)
    table = Matrix(table_ptr, table_stride)
    descs = Descriptors(q=q_desc, k=k_desc, scales=s_desc)
    sources = Sources(descs, windows, table, counter_ptr, total_q, columns, chunks)
    work = Scores(smem, bars, windows, weights, out, total_q, columns)
    if FP4:
        gl.static_assert(NC == 3, "FP4 keys leave registers for three consumers")
        fp4 = allocate_codes(smem.k, CFG)
        rings, loads = loaded(smem, bars, fp4, CFG)
        gl.warp_specialize(
            [
                (consumer, (work, fp4, 0, CFG, HEADS, PAGE)),
                (consumer, (work, fp4, 1, CFG, HEADS, PAGE)),
                (consumer, (work, fp4, 2, CFG, HEADS, PAGE)),
                (converter, (smem, fp4, bars, loads, CFG)),
                (producer, (sources, rings, loads, CFG, HEADS, PAGE)),
            ],
            [4, 4, 4, 1],
            [REGISTERS.consumer, REGISTERS.consumer, REGISTERS.converter, REGISTERS.producer],
        )
    elif NC == 3:
        gl.warp_specialize(
            [
                (consumer, (work, None, 0, CFG, HEADS, PAGE)),
                (consumer, (work, None, 1, CFG, HEADS, PAGE)),
                (consumer, (work, None, 2, CFG, HEADS, PAGE)),
                (producer, (sources, smem, bars, CFG, HEADS, PAGE)),
            ],
            [4, 4, 1],
            [REGISTERS.consumer, REGISTERS.consumer, REGISTERS.producer],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (work, None, 0, CFG, HEADS, PAGE)),
                (consumer, (work, None, 1, CFG, HEADS, PAGE)),
                (consumer, (work, None, 2, CFG, HEADS, PAGE)),
                (consumer, (work, None, 3, CFG, HEADS, PAGE)),
                (producer, (sources, smem, bars, CFG, HEADS, PAGE)),
            ],
            [4, 4, 4, 1],
            [REGISTERS.consumer, REGISTERS.consumer, REGISTERS.consumer, REGISTERS.producer],
        )
