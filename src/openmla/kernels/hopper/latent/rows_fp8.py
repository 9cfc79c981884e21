"""The producer of the latent kernel over an FP8 cache: rows are dequantized to bf16 on their way.

Takes the place of rows.producer: the same tiles and barriers. The e4m3 columns of a block, 64 x 512
bytes, take as much room as its left tile. That is free first, so they are copied there (cp.async)
while the block before is dequantized, and from there, 64 columns (a chunk) at a time, through
registers: the right columns to their tile, then the left columns, all of them loaded before the
first is stored, to where they came from.

| order | block 0 | block 1 |
|---|---|---|
| 1 | wait until right 0 is free; copy rope 0 | wait until right 1 is free |
| 2 | from bytes that have arrived to right 0 | to right 1 |
| 3 | wait until left 1 is free; copy the bytes of block 1, and rope 1 | |
| 4 | to left 0 | to left 1 |
| 5 | | wait until left 0 is free; copy the bytes of the next block 0 |

Scales are loaded when the bytes are copied, where a block has few of them: 4 registers for each
group of columns. Rope that is e4m3 passes through registers too, and is not copied before.

Ordinary stores wrote the tiles that wgmma will read: one arrival for all 128 threads ends each of
them, and whoever waits for it fences them (`wait_tile` of kernel.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from openmla.kernels.gluon.compat import cp_async, reinterpret
from openmla.kernels.gluon.dequantize.rows import (
    CHUNK,
    WORDS,
    blocks_of,
    chunk_layout,
    dequantized,
    key_layout,
    load_raw,
    load_scales,
    rope_start,
    start_of_row,
)
from openmla.kernels.hopper.latent.rows import copy, load_queries, put_validity
from openmla.kernels.hopper.latent.source import KEYS, STEP, begin, entries, locate, work_item
from openmla.kernels.hopper.latent.work_items import announce

THREADS = gl.constexpr(128)
MOST_AHEAD = gl.constexpr(4)  # groups of columns whose scales are loaded a block ahead
CHUNK_WORDS = gl.constexpr(16)


@gluon.constexpr_function
def group_columns(block):
    """Columns whose scales are loaded together."""
    return max(64, block)


@gluon.constexpr_function
def groups_of(dims, block):
    """Such groups in a row without rope."""
    return -(-2 * dims[0] // group_columns(block))


@gluon.jit
def group_scales(
    rows, keys, FIRST: gl.constexpr, COUNT: gl.constexpr, CACHE: gl.constexpr, LANES: gl.constexpr
):
    """Scales of COUNT groups of columns, from column FIRST on."""
    scales = ()
    for i in gl.static_range(COUNT):
        scales += (
            load_scales(rows, keys, FIRST + i * group_columns(CACHE[1]), CHUNK, CACHE, LANES),
        )
    return scales


@gluon.jit
def scales_ahead(rows, keys, DIMS: gl.constexpr, CACHE: gl.constexpr, LANES: gl.constexpr):
    """Those of all columns, where they are few; else nothing."""
    COUNT: gl.constexpr = groups_of(DIMS, CACHE[1])
    if COUNT <= MOST_AHEAD:
        return group_scales(rows, keys, 0, COUNT, CACHE, LANES)
    else:
        return ()


@gluon.jit
def stage_of(tile):
    """A tile of bf16 columns as room for the bytes of twice as many: words of 64 keys."""
    L: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, order=[1, 0])
    return reinterpret(tile, gl.int32, [KEYS, tile.shape[1] // 2], L)


@gluon.jit
def copy_bytes(rows, keys, tile, CACHE: gl.constexpr, LANES: gl.constexpr):
    """Start copying the e4m3 columns of a block; zeros where there is no key."""
    stage = stage_of(tile)
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [4, 1], [1, 0])
    keys = gl.convert_layout(keys, gl.SliceLayout(1, L))
    start = rows[0] + start_of_row(keys, rows[1], rows[2], CACHE[0]) * WORDS
    word = gl.arange(0, stage.shape[1], gl.SliceLayout(0, L))
    cp_async(stage, start[:, None] + word[None, :], mask=(keys >= 0)[:, None])


@gluon.jit
def copy_rope(rows, keys, tile, CACHE: gl.constexpr, LANES: gl.constexpr):
    """Start copying rope that is stored as bf16."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    keys = gl.convert_layout(keys, gl.SliceLayout(1, L))
    copy(tile, rope_start(rows, keys, CACHE), keys >= 0, 0, L)


@gluon.jit
def staged(stage, C: gl.constexpr, CACHE: gl.constexpr, LANES: gl.constexpr):
    """Words of chunk number C, as dequantize/rows.py holds them."""
    BLOCKS: gl.constexpr = blocks_of(CHUNK, CACHE[1])
    L: gl.constexpr = gl.BlockedLayout([1, 2], [32 // LANES, LANES], [4, 1], [1, 0])
    raw = stage.slice(C * CHUNK_WORDS, CHUNK_WORDS, dim=1).load(L)
    raw = raw.reshape([KEYS, BLOCKS, CHUNK_WORDS // BLOCKS])
    return gl.convert_layout(raw, chunk_layout(CHUNK, CACHE[1], LANES))


@gluon.jit
def dequantize_half(
    rows, keys, tiles, scales, SIDE: gl.constexpr, CACHE: gl.constexpr, LANES: gl.constexpr
):
    """Half of the columns (SIDE 0: left, 1: right): all are loaded before the first is stored."""
    stage = stage_of(tiles[0])
    tile = tiles[SIDE]
    HALF: gl.constexpr = tile.shape[1]
    COUNT: gl.constexpr = HALF // CHUNK
    GROUP: gl.constexpr = group_columns(CACHE[1])
    AHEAD: gl.constexpr = len(scales) > 0
    SKIPPED: gl.constexpr = 0 if AHEAD else SIDE * COUNT
    if not AHEAD:
        scales = group_scales(rows, keys, SIDE * HALF, 1, CACHE, LANES)
    words = ()
    for i in gl.static_range(COUNT):
        words += (staged(stage, SIDE * COUNT + i, CACHE, LANES),)
    for i in gl.static_range(COUNT):
        if not AHEAD and i + 1 < COUNT:
            scales += group_scales(rows, keys, SIDE * HALF + (i + 1) * CHUNK, 1, CACHE, LANES)
        columns = dequantized(words[i], scales[(SIDE * HALF + i * CHUNK) // GROUP - SKIPPED])
        tile.slice(i * CHUNK, CHUNK, dim=1).store(columns)


@gluon.jit
def dequantize_rope(rows, keys, tile, DIMS: gl.constexpr, CACHE: gl.constexpr, LANES: gl.constexpr):
    """Rope that is e4m3: loaded when it is wanted, there are no registers to load it before."""
    FIRST: gl.constexpr = 2 * DIMS[0]
    raw = load_raw(rows, keys, FIRST, DIMS[1], CACHE, LANES)
    tile.store(dequantized(raw, load_scales(rows, keys, FIRST, DIMS[1], CACHE, LANES)))


@gluon.jit
def physical(source, entry, PAGE: gl.constexpr):
    """Physical rows of 64 keys, -1 where there is none."""
    page, place, ok = locate(source, entry, PAGE)
    if PAGE > 0:
        place += page * PAGE
    return gl.where(ok, place, -1)


@gluon.jit
def block_tiles(tiles, number):
    """Left, right and rope of a block."""
    return tiles[0].index(number), tiles[1].index(number), tiles[2].index(number)


@gluon.jit
def fp8_producer(
    info, source, rows, shape, q_descs, smem, bars, ST: gl.constexpr, DIMS: gl.constexpr,
    CACHE: gl.constexpr, LANES: gl.constexpr,
):  # fmt: skip
    """Every work item of this program."""
    q_smem, k_smem, validity = smem
    bias, flags = validity
    q_bars, ready, free, valid, t_bars = bars
    q_ready, q_free = q_bars
    PAGE: gl.constexpr = CACHE[0]
    KL: gl.constexpr = key_layout(CHUNK, CACHE[1], LANES)
    ROPE: gl.constexpr = DIMS[1] > 0 and rows[6] is not None
    E4M3: gl.constexpr = DIMS[1] > 0 and rows[6] is None
    turn = gl.program_id(0) * 0
    it = turn  # steps so far, over all work items
    cursor, tile, box, first, skipped, count, steps = work_item(begin(source), source, shape, False)
    announce(info, t_bars, turn, tile, steps, source)
    keys0 = physical(source, entries(source, first, count, skipped, KL), PAGE)
    entry = entries(source, first, count, skipped + KEYS, KL)
    scales0 = scales_ahead(rows, keys0, DIMS, CACHE, LANES)
    copy_bytes(rows, keys0, k_smem[0].index(0), CACHE, LANES)
    async_copy.commit_group()
    while steps > 0:
        cursor, tile, next_box, next_first, next_skipped, next_count, next_steps = work_item(
            cursor, source, shape, True
        )
        announce(info, t_bars, turn + 1, tile, next_steps, source)
        mbarrier.wait(q_free, (turn & 1) ^ 1)
        load_queries(q_descs, q_smem, q_ready, box, DIMS)
        for j in range(0, steps):
            b = it % ST * 2
            phase = ((it // ST) & 1) ^ 1
            last = j == steps - 1
            ahead = gl.where(last, next_skipped, skipped + (j + 1) * STEP)
            ahead_first = gl.where(last, next_first, first)
            ahead_count = gl.where(last, next_count, count)
            keys1 = physical(source, entry, PAGE)
            entry = entries(source, ahead_first, ahead_count, ahead, KL)
            mbarrier.wait(free.index(2 * b + 1), phase)
            if ROPE:
                copy_rope(rows, keys0, k_smem[2].index(b), CACHE, LANES)
            async_copy.commit_group()
            async_copy.wait_group(1)  # all but the last: the bytes of block 0 are there
            put_validity(bias.index(b), flags.index(b), keys0 >= 0, valid.index(b), LANES)
            tiles0 = block_tiles(k_smem, b)
            dequantize_half(rows, keys0, tiles0, scales0, 1, CACHE, LANES)
            if E4M3:
                dequantize_rope(rows, keys0, tiles0[2], DIMS, CACHE, LANES)
            async_copy.wait_group(0)
            mbarrier.arrive(ready.index(2 * b + 1), count=THREADS)
            scales1 = scales_ahead(rows, keys1, DIMS, CACHE, LANES)
            mbarrier.wait(free.index(2 * b + 2), phase)
            copy_bytes(rows, keys1, k_smem[0].index(b + 1), CACHE, LANES)
            if ROPE:
                copy_rope(rows, keys1, k_smem[2].index(b + 1), CACHE, LANES)
            async_copy.commit_group()
            dequantize_half(rows, keys0, tiles0, scales0, 0, CACHE, LANES)
            mbarrier.arrive(ready.index(2 * b), count=THREADS)
            keys0 = physical(source, entry, PAGE)
            mbarrier.wait(free.index(2 * b + 3), phase)
            async_copy.wait_group(0)
            b += 1
            put_validity(bias.index(b), flags.index(b), keys1 >= 0, valid.index(b), LANES)
            tiles1 = block_tiles(k_smem, b)
            dequantize_half(rows, keys1, tiles1, scales1, 1, CACHE, LANES)
            mbarrier.arrive(ready.index(2 * b + 1), count=THREADS)
            dequantize_half(rows, keys1, tiles1, scales1, 0, CACHE, LANES)
            if E4M3:
                dequantize_rope(rows, keys1, tiles1[2], DIMS, CACHE, LANES)
            mbarrier.arrive(ready.index(2 * b), count=THREADS)
            it += 1
            b = it % ST * 2
            scales0 = scales_ahead(rows, keys0, DIMS, CACHE, LANES)
            mbarrier.wait(free.index(2 * b), ((it // ST) & 1) ^ 1)
            copy_bytes(rows, keys0, k_smem[0].index(b), CACHE, LANES)
            async_copy.commit_group()
            entry = entries(source, ahead_first, ahead_count, ahead + KEYS, KL)
        turn += 1
        box = next_box
        first = next_first
        skipped = next_skipped
        count = next_count
        steps = next_steps
    async_copy.wait_group(0)
