"""The producer of the latent kernel over an FP8 cache: rows are dequantized to bf16 on their way.

It takes the place of rows.producer, with the same tiles and barriers. The e4m3 columns of a block,
64 x 512 bytes, take as much room as its left tile, which is empty first. So they are copied there
(cp.async) while the block before is dequantized, and from there, 64 columns (a chunk) at a time,
through registers: the right columns to their tile; then the left columns, all of them loaded before
the first is stored, to where they came from.

| order | block 0 | block 1 |
|---|---|---|
| 1 | wait until right 0 is empty; copy rope 0 | wait until right 1 is empty |
| 2 | from bytes that have arrived to right 0 | to right 1 |
| 3 | wait until left 1 is empty; copy the bytes of block 1, and rope 1 | |
| 4 | to left 0 | to left 1 |
| 5 | | wait until left 0 is empty; copy the bytes of the next block 0 |

Scales are loaded when the bytes are copied, where a block has few of them: 4 registers for each
group of columns. Rope that is e4m3 passes through registers too, and is not copied before.

Ordinary stores write the tiles that wgmma will read. One thread arrives for all 128 when a tile is
written, and the warp-group that waits for it fences it (`wait_tile` of signals.py).
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
from openmla.kernels.hopper.latent.records import ColumnTiles
from openmla.kernels.hopper.latent.rows import (
    copy,
    first_work_item,
    load_queries,
    put_validity,
    validity_of,
)
from openmla.kernels.hopper.latent.signals import publish_work_item
from openmla.kernels.hopper.latent.source import KEYS, STEP, entries, find_work, work_item

THREADS = gl.constexpr(128)
MOST_AHEAD = gl.constexpr(4)  # groups of columns whose scales are loaded a block ahead
CHUNK_WORDS = gl.constexpr(16)


@gluon.constexpr_function
def group_columns(block):
    """Columns whose scales are loaded together."""
    return max(64, block)


@gluon.constexpr_function
def groups_of(columns, block):
    """Groups of columns whose scales are loaded together, of so many columns."""
    return -(-columns // group_columns(block))


@gluon.jit
def group_scales(
    rows, keys, FIRST: gl.constexpr, COUNT: gl.constexpr, CACHE: gl.constexpr, LANES: gl.constexpr
):
    """Scales of COUNT groups of columns of `CacheRows`, from column FIRST on."""
    GROUP: gl.constexpr = group_columns(CACHE.scale_block)
    scales = ()
    for i in gl.static_range(COUNT):
        scales += (load_scales(rows, keys, FIRST + i * GROUP, CHUNK, CACHE, LANES),)
    return scales


@gluon.jit
def scales_ahead(rows, keys, DIMS: gl.constexpr, CACHE: gl.constexpr, LANES: gl.constexpr):
    """Scales of all latent columns, prefetched where they are few; else ()."""
    COUNT: gl.constexpr = groups_of(DIMS.latent, CACHE.scale_block)
    if COUNT <= MOST_AHEAD:
        return group_scales(rows, keys, 0, COUNT, CACHE, LANES)
    else:
        return ()


@gluon.jit
def stage_of(tile):
    """A tile of bf16 columns, reinterpreted as words of twice as many e4m3 columns of 64 keys."""
    L: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, order=[1, 0])
    return reinterpret(tile, gl.int32, [KEYS, tile.shape[1] // 2], L)


@gluon.jit
def copy_bytes(rows, keys, tile, CACHE: gl.constexpr, LANES: gl.constexpr):
    """Start copying the e4m3 columns of a block; zeros where there is no key."""
    stage = stage_of(tile)
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [4, 1], [1, 0])
    keys = gl.convert_layout(keys, gl.SliceLayout(1, L))
    start = start_of_row(keys, rows.page_stride, rows.row_stride, rows.pages) * WORDS
    start = rows.data_ptr + start
    word = gl.arange(0, stage.shape[1], gl.SliceLayout(0, L))
    cp_async(stage, start[:, None] + word[None, :], mask=(keys >= 0)[:, None])


@gluon.jit
def copy_rope(rows, keys, tile, CACHE: gl.constexpr, LANES: gl.constexpr):
    """Start copying rope that `CacheRows` store as bf16."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    keys = gl.convert_layout(keys, gl.SliceLayout(1, L))
    copy(tile, rope_start(rows, keys, CACHE), keys >= 0, 0, L)


@gluon.jit
def staged(stage, C: gl.constexpr, CACHE: gl.constexpr, LANES: gl.constexpr):
    """Words of chunk number C, as dequantize/rows.py holds them."""
    BLOCKS: gl.constexpr = blocks_of(CHUNK, CACHE.scale_block)
    L: gl.constexpr = gl.BlockedLayout([1, 2], [32 // LANES, LANES], [4, 1], [1, 0])
    raw = stage.slice(C * CHUNK_WORDS, CHUNK_WORDS, dim=1).load(L)
    raw = raw.reshape([KEYS, BLOCKS, CHUNK_WORDS // BLOCKS])
    return gl.convert_layout(raw, chunk_layout(CHUNK, CACHE.scale_block, LANES))


@gluon.jit
def dequantize_half(
    rows, keys, tiles, scales, SIDE: gl.constexpr, CACHE: gl.constexpr, LANES: gl.constexpr
):
    """Dequantize the left (SIDE 0) or right (1) half of a block's latent columns into its
    `ColumnTiles`: all are loaded before the first is stored. scales: what `scales_ahead` returned.
    """
    stage = stage_of(tiles.left)
    tile = tiles.left if SIDE == 0 else tiles.right
    HALF: gl.constexpr = tile.shape[1]
    COUNT: gl.constexpr = HALF // CHUNK
    GROUP: gl.constexpr = group_columns(CACHE.scale_block)
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
    """Dequantize rope that is e4m3. It is loaded when it is wanted: there are no registers to load
    it before."""
    FIRST: gl.constexpr = DIMS.latent
    raw = load_raw(rows, keys, FIRST, DIMS.rope, CACHE, LANES)
    tile.store(dequantized(raw, load_scales(rows, keys, FIRST, DIMS.rope, CACHE, LANES)))


@gluon.jit
def physical(source, entry):
    """Physical rows of 64 keys, -1 where there is none."""
    return gl.where((entry >= 0) & (entry < source.pool_rows), entry, -1)


@gluon.jit
def block_tiles(tiles, number):
    """The `ColumnTiles` of a block."""
    return ColumnTiles(
        left=tiles.left.index(number),
        right=tiles.right.index(number),
        rope=tiles.rope.index(number),
    )


@gluon.jit
def fp8_producer(
    info,
    source,
    rows,
    counts,
    q_descs,
    smem,
    bars,
    ST: gl.constexpr,
    DIMS: gl.constexpr,
    CACHE: gl.constexpr,
    LANES: gl.constexpr,
    REQUESTS: gl.constexpr,
):
    """Load and dequantize every work item of this program, as rows.producer loads plain rows.
    CACHE: the `CacheFormat` of `CacheRows`. REQUESTS: how many are numbered together."""
    KL: gl.constexpr = key_layout(CHUNK, CACHE.scale_block, LANES)
    ROPE: gl.constexpr = DIMS.rope > 0 and rows.rope_ptr is not None
    E4M3: gl.constexpr = DIMS.rope > 0 and rows.rope_ptr is None
    k_ready, k_empty = bars.k_ready, bars.k_empty
    turn = gl.program_id(0) * 0
    it = turn  # steps so far, over all work items
    found, item, steps = first_work_item(turn, info, source, counts, bars, REQUESTS)
    keys0 = physical(source, entries(source, item.first_entry, item.stop, item.skipped, KL))
    entry = entries(source, item.first_entry, item.stop, item.skipped + KEYS, KL)
    scales0 = scales_ahead(rows, keys0, DIMS, CACHE, LANES)
    copy_bytes(rows, keys0, smem.k.left.index(0), CACHE, LANES)
    async_copy.commit_group()
    while steps > 0:
        found = find_work(found, source, True, REQUESTS)
        next_item, next_steps = work_item(found, source, counts)
        publish_work_item(info, bars, turn + 1, next_item.tile, next_steps, source)
        mbarrier.wait(bars.q_empty, (turn & 1) ^ 1)
        load_queries(q_descs, smem.q, bars.q_ready, item.box, DIMS)
        for j in range(0, steps):
            b = it % ST * 2
            phase = ((it // ST) & 1) ^ 1
            last = j == steps - 1
            ahead = gl.where(last, next_item.skipped, item.skipped + (j + 1) * STEP)
            ahead_first = gl.where(last, next_item.first_entry, item.first_entry)
            ahead_stop = gl.where(last, next_item.stop, item.stop)
            keys1 = physical(source, entry)
            entry = entries(source, ahead_first, ahead_stop, ahead, KL)
            mbarrier.wait(k_empty.index(2 * b + 1), phase)
            if ROPE:
                copy_rope(rows, keys0, smem.k.rope.index(b), CACHE, LANES)
            async_copy.commit_group()
            async_copy.wait_group(1)  # all but the last: the bytes of block 0 are there
            validity = validity_of(smem.validity, b)
            put_validity(validity, keys0 >= 0, bars.valid_ready.index(b), LANES)
            tiles0 = block_tiles(smem.k, b)
            dequantize_half(rows, keys0, tiles0, scales0, 1, CACHE, LANES)
            if E4M3:
                dequantize_rope(rows, keys0, tiles0.rope, DIMS, CACHE, LANES)
            async_copy.wait_group(0)
            mbarrier.arrive(k_ready.index(2 * b + 1), count=THREADS)
            scales1 = scales_ahead(rows, keys1, DIMS, CACHE, LANES)
            mbarrier.wait(k_empty.index(2 * b + 2), phase)
            copy_bytes(rows, keys1, smem.k.left.index(b + 1), CACHE, LANES)
            if ROPE:
                copy_rope(rows, keys1, smem.k.rope.index(b + 1), CACHE, LANES)
            async_copy.commit_group()
            dequantize_half(rows, keys0, tiles0, scales0, 0, CACHE, LANES)
            mbarrier.arrive(k_ready.index(2 * b), count=THREADS)
            keys0 = physical(source, entry)
            mbarrier.wait(k_empty.index(2 * b + 3), phase)
            async_copy.wait_group(0)
            b += 1
            validity = validity_of(smem.validity, b)
            put_validity(validity, keys1 >= 0, bars.valid_ready.index(b), LANES)
            tiles1 = block_tiles(smem.k, b)
            dequantize_half(rows, keys1, tiles1, scales1, 1, CACHE, LANES)
            mbarrier.arrive(k_ready.index(2 * b + 1), count=THREADS)
            dequantize_half(rows, keys1, tiles1, scales1, 0, CACHE, LANES)
            if E4M3:
                dequantize_rope(rows, keys1, tiles1.rope, DIMS, CACHE, LANES)
            mbarrier.arrive(k_ready.index(2 * b), count=THREADS)
            it += 1
            b = it % ST * 2
            scales0 = scales_ahead(rows, keys0, DIMS, CACHE, LANES)
            mbarrier.wait(k_empty.index(2 * b), ((it // ST) & 1) ^ 1)
            copy_bytes(rows, keys0, smem.k.left.index(b), CACHE, LANES)
            async_copy.commit_group()
            entry = entries(source, ahead_first, ahead_stop, ahead + KEYS, KL)
        turn += 1
        item = next_item
        steps = next_steps
    async_copy.wait_group(0)
