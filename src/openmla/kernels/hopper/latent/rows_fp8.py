"""The producer of the latent kernel over an FP8 cache: rows are dequantized to bf16 on their way.

It takes the place of rows.producer, with the same tiles and barriers. The e4m3 columns of a block,
64 x 512 bytes, take as much room as its left tile, which is empty first. So they are copied there
(cp.async) while the block before is dequantized, and from there through registers, half of them at
a time: the right columns to their tile; then the left columns, all of them loaded before the first
is stored, to where they came from.

| order | of a block |
|---|---|
| 1 | wait until right is empty; copy rope 0 |
| 2 | from bytes that have arrived to right |
| 3 | the bytes of left into registers |
| 4 | wait until left of the next block is empty; copy its bytes, and rope 1 |
| 5 | to left |

Scales are loaded when the bytes are copied, and so are the entries of the block after. These loads
go together: the compiler has one scoreboard for what crosses a loop, and whoever waits for one of
them waits for all. Rope that is e4m3 passes through registers too, and is not copied before.

Eight warps do it, with 64 registers each. A half is one tensor and one store, because the compiler
puts a barrier between two stores to the same tile, and warps would wait there for every conversion.

Ordinary stores write the tiles that wgmma will read. One thread arrives for all when a tile is
written, and the warp-group that waits for it fences it (`wait_tile` of signals.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from openmla.kernels.gluon.compat import cp_async, reinterpret
from openmla.kernels.gluon.dequantize.rows import (
    BF16S,
    CHUNK,
    FP32S,
    WORDS,
    blocks_of,
    chunk_layout,
    dequantized,
    key_layout,
    start_of_row,
)
from openmla.kernels.hopper.latent.records import QuantizedRows
from openmla.kernels.hopper.latent.rows import (
    copy,
    first_work_item,
    load_queries,
    put_validity,
    validity_of,
)
from openmla.kernels.hopper.latent.signals import publish_work_item
from openmla.kernels.hopper.latent.source import KEYS, STEP, entries, find_work, locate, work_item

EACH = gl.constexpr(2)  # neighboring words of a thread


@gluon.constexpr_function
def words_layout(lanes, warps):
    """[keys, words]: `lanes` threads hold neighboring words of a key, two each."""
    return gl.BlockedLayout([1, 2], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def stage_of(tile):
    """A tile of bf16 columns, reinterpreted as words of twice as many e4m3 columns of 64 keys. Two
    neighboring rows are read together, 64 bytes each: they lie in different halves of the banks."""
    L: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 2, order=[1, 0])
    return reinterpret(tile, gl.int32, [KEYS, tile.shape[1] // 2], L)


@gluon.jit
def load_scales(
    rows,
    keys,
    FIRST: gl.constexpr,
    WIDTH: gl.constexpr,
    CACHE: gl.constexpr,
    LANES: gl.constexpr,
):
    """Scales of columns FIRST … of rows, [keys, blocks]; 0 where there is no key."""
    PAGE: gl.constexpr = CACHE.page_size
    BLOCKS: gl.constexpr = blocks_of(WIDTH, CACHE.scale_block)
    WL: gl.constexpr = chunk_layout(WIDTH, CACHE.scale_block, LANES, gl.num_warps(), EACH)
    L: gl.constexpr = gl.SliceLayout(2, WL)
    keys = gl.convert_layout(keys, gl.SliceLayout(1, L))
    if rows.rope_ptr is None:
        at = start_of_row(keys, rows.scale_page_stride, rows.scale_row_stride, PAGE)
    else:
        at = start_of_row(keys, rows.page_stride, rows.row_stride, PAGE) * FP32S
    number = gl.arange(0, BLOCKS, gl.SliceLayout(0, L)) + FIRST // CACHE.scale_block
    at = (rows.scale_ptr + at)[:, None] + number[None, :]
    return gl.load(at, mask=(keys >= 0)[:, None], other=0.0)


@gluon.jit
def begin(rows, keys, tile, DIMS: gl.constexpr, CACHE: gl.constexpr, LANES: gl.constexpr):
    """Start copying the e4m3 columns of a block to its left tile, zeros where there is no key, and
    loading its scales: the `QuantizedRows`."""
    stage = stage_of(tile)
    HALF: gl.constexpr = DIMS.latent // 2
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    here = gl.convert_layout(keys, gl.SliceLayout(1, L))
    start = start_of_row(here, rows.page_stride, rows.row_stride, CACHE.page_size) * WORDS
    word = gl.arange(0, stage.shape[1], gl.SliceLayout(0, L))
    at = (rows.data_ptr + start)[:, None] + word[None, :]
    cp_async(stage, at, mask=(here >= 0)[:, None])
    left = load_scales(rows, keys, 0, HALF, CACHE, LANES)
    right = left
    if CACHE.scale_block < DIMS.latent:
        right = load_scales(rows, keys, HALF, HALF, CACHE, LANES)
    return QuantizedRows(keys=keys, left=left, right=right)


@gluon.jit
def copy_rope(rows, keys, tile, DIMS: gl.constexpr, CACHE: gl.constexpr, LANES: gl.constexpr):
    """Start copying rope that `CacheRows` store as bf16."""
    if DIMS.rope > 0 and rows.rope_ptr is not None:
        WARPS: gl.constexpr = gl.num_warps()
        L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
        keys = gl.convert_layout(keys, gl.SliceLayout(1, L))
        start = start_of_row(keys, rows.page_stride, rows.row_stride, CACHE.page_size)
        copy(tile, rows.rope_ptr + start * BF16S, keys >= 0, 0, L)


@gluon.jit
def staged(tile, SIDE: gl.constexpr, CACHE: gl.constexpr, LANES: gl.constexpr):
    """Words of the left (SIDE 0) or right (1) half of what was copied to a left tile."""
    HALF: gl.constexpr = tile.shape[1]
    BLOCKS: gl.constexpr = blocks_of(HALF, CACHE.scale_block)
    L: gl.constexpr = chunk_layout(HALF, CACHE.scale_block, LANES, gl.num_warps(), EACH)
    half = stage_of(tile).slice(SIDE * HALF // 4, HALF // 4, dim=1)
    raw = half.load(words_layout(LANES, gl.num_warps()))
    return gl.convert_layout(raw.reshape([KEYS, BLOCKS, HALF // 4 // BLOCKS]), L)


@gluon.jit
def dequantize_rope(rows, keys, tile, DIMS: gl.constexpr, CACHE: gl.constexpr, LANES: gl.constexpr):
    """Dequantize rope that is e4m3. It is loaded when it is wanted: there are no registers to load
    it before."""
    if DIMS.rope > 0 and rows.rope_ptr is None:
        FIRST: gl.constexpr = DIMS.latent
        L: gl.constexpr = chunk_layout(DIMS.rope, CACHE.scale_block, LANES, gl.num_warps(), EACH)
        BLOCKS: gl.constexpr = blocks_of(DIMS.rope, CACHE.scale_block)
        IN: gl.constexpr = DIMS.rope // BLOCKS // 4
        here = gl.convert_layout(keys, gl.SliceLayout(1, gl.SliceLayout(2, L)))
        number = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(2, L))) * IN + FIRST // 4
        inside = gl.arange(0, IN, gl.SliceLayout(0, gl.SliceLayout(1, L)))
        start = start_of_row(here, rows.page_stride, rows.row_stride, CACHE.page_size)
        at = (rows.data_ptr + start * WORDS)[:, None, None]
        at = at + number[None, :, None] + inside[None, None, :]
        raw = gl.load(at, mask=(here >= 0)[:, None, None], other=0)
        scales = load_scales(rows, keys, FIRST, DIMS.rope, CACHE, LANES)
        tile.store(dequantized(raw, scales))


@gluon.jit
def physical(source, entry, PAGE: gl.constexpr):
    """Physical rows of 64 keys, -1 where there is none."""
    page, place, ok = locate(source, entry, PAGE)
    if PAGE > 0:
        place += page * PAGE
    return gl.where(ok, place, -1)


@gluon.jit
def begin_block(
    rows,
    keys,
    smem,
    b,
    NUMBER: gl.constexpr,
    DIMS: gl.constexpr,
    CACHE: gl.constexpr,
    LANES: gl.constexpr,
):
    """What `begin` does for block b, number NUMBER of its step; block 1's rope tile is empty when
    its left tile is."""
    block = begin(rows, keys, smem.k.left.index(b), DIMS, CACHE, LANES)
    if NUMBER == 1:
        copy_rope(rows, keys, smem.k.rope.index(b), DIMS, CACHE, LANES)
    async_copy.commit_group()
    return block


@gluon.jit
def fill_right(
    rows,
    block,
    smem,
    bars,
    b,
    phase,
    NUMBER: gl.constexpr,
    IS_LISTED: gl.constexpr,
    DIMS: gl.constexpr,
    CACHE: gl.constexpr,
    LANES: gl.constexpr,
):
    """Wait for what `begin_block` copies to block b; validity, right and, in block 0, rope."""
    rope = smem.k.rope.index(b)
    mbarrier.wait(bars.k_empty.index(2 * b + 1), phase)
    if NUMBER == 0:
        copy_rope(rows, block.keys, rope, DIMS, CACHE, LANES)
        async_copy.commit_group()
    async_copy.wait_group(1 - NUMBER)  # rope may still be on its way
    if IS_LISTED:
        put_validity(validity_of(smem.validity, b), block.keys >= 0, LANES)
    words = staged(smem.k.left.index(b), 1, CACHE, LANES)
    smem.k.right.index(b).store(dequantized(words, block.right))
    if NUMBER == 0:
        dequantize_rope(rows, block.keys, rope, DIMS, CACHE, LANES)
        async_copy.wait_group(0)
    mbarrier.arrive(bars.k_ready.index(2 * b + 1), count=32 * gl.num_warps())


@gluon.jit
def fill_left(
    rows,
    block,
    words,
    smem,
    bars,
    b,
    NUMBER: gl.constexpr,
    DIMS: gl.constexpr,
    CACHE: gl.constexpr,
    LANES: gl.constexpr,
):
    """Left of block b and, in block 1, its rope. words: all that was copied for left."""
    smem.k.left.index(b).store(dequantized(words, block.left))
    if NUMBER == 1:
        dequantize_rope(rows, block.keys, smem.k.rope.index(b), DIMS, CACHE, LANES)
    mbarrier.arrive(bars.k_ready.index(2 * b), count=32 * gl.num_warps())


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
    PAGE: gl.constexpr = CACHE.page_size
    KL: gl.constexpr = key_layout(CHUNK, CACHE.scale_block, LANES, gl.num_warps(), EACH)
    IS_LISTED: gl.constexpr = source.sequences is None
    k_empty = bars.k_empty
    turn = gl.program_id(0) * 0
    it = turn  # steps so far, over all work items
    found, item, steps = first_work_item(turn, info, source, counts, bars, REQUESTS)
    entry = entries(source, item.first_entry, item.stop, item.skipped, KL)
    block = begin_block(rows, physical(source, entry, PAGE), smem, 0, 0, DIMS, CACHE, LANES)
    entry = entries(source, item.first_entry, item.stop, item.skipped + KEYS, KL)
    while steps > 0:
        found = find_work(found, source, True, REQUESTS)
        next_item, next_steps = work_item(found, source, counts)
        publish_work_item(info, bars, turn + 1, next_item.tile, next_steps, source)
        mbarrier.wait(bars.q_empty, (turn & 1) ^ 1)
        load_queries(q_descs, smem.q, bars.q_ready, item.box, DIMS)
        for j in range(0, steps):
            b = it % ST * 2
            phase = ((it // ST) & 1) ^ 1
            it += 1
            next_b = it % ST * 2
            next_phase = ((it // ST) & 1) ^ 1
            last = j == steps - 1
            ahead = gl.where(last, next_item.skipped, item.skipped + (j + 1) * STEP)
            first = gl.where(last, next_item.first_entry, item.first_entry)
            stop = gl.where(last, next_item.stop, item.stop)
            for i in gl.static_range(2):
                fill_right(rows, block, smem, bars, b + i, phase, i, IS_LISTED, DIMS, CACHE, LANES)
                words = staged(smem.k.left.index(b + i), 0, CACHE, LANES)
                keys = physical(source, entry, PAGE)
                after = b + 1 if i == 0 else next_b
                mbarrier.wait(k_empty.index(2 * after), phase if i == 0 else next_phase)
                following = begin_block(rows, keys, smem, after, 1 - i, DIMS, CACHE, LANES)
                entry = entries(source, first, stop, ahead + i * KEYS, KL)
                fill_left(rows, block, words, smem, bars, b + i, i, DIMS, CACHE, LANES)
                block = following
        turn += 1
        item = next_item
        steps = next_steps
    async_copy.wait_group(0)
