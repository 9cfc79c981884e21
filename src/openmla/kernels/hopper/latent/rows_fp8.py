"""The producer of the latent kernel over an FP8 cache: rows are dequantized to bf16 on their way.

It takes the place of rows.producer, with the same tiles and barriers. Columns are loaded into
registers a block ahead, also across work items: memory answers while the block before is converted
and stored, and nothing waits for a tile to be empty but the store.

| order | of a block |
|---|---|
| 1 | where the rows of the next block lie, and their scales; the entries of the block after it |
| 2 | wait until left is empty; validity; the left columns are stored, and the next block's loaded |
| 3 | wait until right is empty; the right columns likewise |

Rope that is bf16 is copied (cp.async) before the columns of its half, block 0's with the right
half, block 1's with the left.

Eight warps do it, with 64 registers each: four threads hold a row, so a thread has columns and
scales of one row. A half is converted and stored as one tensor, because the compiler puts a barrier
between two stores to the same tile: with one after each 64 columns, warps waited for one another
and for every conversion.

Ordinary stores write the tiles that wgmma will read. One thread arrives for all when a tile is
written, and the warp-group that waits for it fences it (`wait_tile` of signals.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from openmla.kernels.gluon.dequantize.rows import (
    CHUNK,
    FP32S,
    WORDS,
    blocks_of,
    chunk_layout,
    dequantized,
    key_layout,
    start_of_row,
)
from openmla.kernels.gluon.dequantize.v4_rows import chunk_layout as rope_layout
from openmla.kernels.gluon.dequantize.v4_rows import store_words
from openmla.kernels.hopper.latent.records import QuantizedRows
from openmla.kernels.hopper.latent.rows import (
    first_work_item,
    load_queries,
    put_validity,
    validity_of,
)
from openmla.kernels.hopper.latent.signals import publish_work_item
from openmla.kernels.hopper.latent.source import KEYS, STEP, entries, find_work, locate, work_item

LANES = gl.constexpr(4)  # that hold 16 neighboring words of a row
EACH = gl.constexpr(4)  # neighboring words of a thread


@gluon.jit
def load_words(
    rows, start, is_there, FIRST: gl.constexpr, WIDTH: gl.constexpr, CACHE: gl.constexpr
):
    """Words of columns FIRST … of rows, [keys, blocks, words]; 0 where there is no key."""
    L: gl.constexpr = chunk_layout(WIDTH, CACHE.scale_block, LANES, gl.num_warps(), EACH)
    BLOCKS: gl.constexpr = blocks_of(WIDTH, CACHE.scale_block)
    IN: gl.constexpr = WIDTH // BLOCKS // 4
    KL: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))
    number = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(2, L))) * IN + FIRST // 4
    inside = gl.arange(0, IN, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    first = rows.data_ptr + gl.convert_layout(start, KL) * WORDS
    is_there = gl.convert_layout(is_there, KL)
    at = first[:, None, None] + number[None, :, None] + inside[None, None, :]
    return gl.load(at, mask=is_there[:, None, None], other=0)


@gluon.jit
def load_scales(
    rows, start, is_there, FIRST: gl.constexpr, WIDTH: gl.constexpr, CACHE: gl.constexpr
):
    """Scales of columns FIRST …, [keys, blocks]. start: where those of a row are."""
    WL: gl.constexpr = chunk_layout(WIDTH, CACHE.scale_block, LANES, gl.num_warps(), EACH)
    L: gl.constexpr = gl.SliceLayout(2, WL)
    BLOCKS: gl.constexpr = blocks_of(WIDTH, CACHE.scale_block)
    number = gl.arange(0, BLOCKS, gl.SliceLayout(0, L)) + FIRST // CACHE.scale_block
    at = rows.scale_ptr + gl.convert_layout(start, gl.SliceLayout(1, L))
    is_there = gl.convert_layout(is_there, gl.SliceLayout(1, L))
    return gl.load(at[:, None] + number[None, :], mask=is_there[:, None], other=0.0)


@gluon.jit
def load_rope(rows, start, is_there, DIMS: gl.constexpr, CACHE: gl.constexpr):
    """Words of rope that is bf16, [keys, words]: it follows the scales of a row."""
    L: gl.constexpr = rope_layout(LANES, gl.num_warps())
    FIRST: gl.constexpr = DIMS.latent // 4 + DIMS.latent // CACHE.scale_block
    word = gl.arange(0, DIMS.rope // 2, gl.SliceLayout(0, L)) + FIRST
    at = rows.data_ptr + gl.convert_layout(start, gl.SliceLayout(1, L)) * WORDS
    is_there = gl.convert_layout(is_there, gl.SliceLayout(1, L))
    return gl.load(at[:, None] + word[None, :], mask=is_there[:, None], other=0)


@gluon.jit
def load_rows(rows, keys, DIMS: gl.constexpr, CACHE: gl.constexpr):
    """The `QuantizedRows` of physical rows, -1 where there is none, on their way."""
    PAGE: gl.constexpr = CACHE.page_size
    HALF: gl.constexpr = DIMS.latent // 2
    is_there = keys >= 0
    start = start_of_row(keys, rows.page_stride, rows.row_stride, PAGE)
    left = load_words(rows, start, is_there, 0, HALF, CACHE)
    right = load_words(rows, start, is_there, HALF, HALF, CACHE)
    rope = 0
    rope_scales = 0
    at = start * FP32S
    if rows.rope_ptr is None:
        at = start_of_row(keys, rows.scale_page_stride, rows.scale_row_stride, PAGE)
    if DIMS.rope > 0:
        if rows.rope_ptr is None:
            rope = load_words(rows, start, is_there, DIMS.latent, DIMS.rope, CACHE)
            rope_scales = load_scales(rows, at, is_there, DIMS.latent, DIMS.rope, CACHE)
        else:
            rope = load_rope(rows, start, is_there, DIMS, CACHE)
    left_scales = load_scales(rows, at, is_there, 0, HALF, CACHE)
    right_scales = left_scales
    if CACHE.scale_block < DIMS.latent:
        right_scales = load_scales(rows, at, is_there, HALF, HALF, CACHE)
    return QuantizedRows(
        is_there=is_there,
        left=left,
        right=right,
        rope=rope,
        left_scales=left_scales,
        right_scales=right_scales,
        rope_scales=rope_scales,
    )


@gluon.jit
def store_rope(rows, block, tile, DIMS: gl.constexpr):
    """Store the rope of `QuantizedRows`, if they have any."""
    if DIMS.rope > 0:
        if rows.rope_ptr is None:
            tile.store(dequantized(block.rope, block.rope_scales))
        else:
            store_words(tile, block.rope)


@gluon.jit
def fill(
    rows,
    block,
    smem,
    bars,
    b,
    phase,
    NUMBER: gl.constexpr,
    IS_LISTED: gl.constexpr,
    DIMS: gl.constexpr,
):
    """Fill the tiles of block b with `QuantizedRows`. NUMBER: of the block in its step; its rope
    comes with right in block 0, with left in block 1."""
    rope = smem.k.rope.index(b)
    if IS_LISTED:
        put_validity(validity_of(smem.validity, b), block.is_there, LANES)
    smem.k.left.index(b).store(dequantized(block.left, block.left_scales))
    if NUMBER == 1:
        store_rope(rows, block, rope, DIMS)
    mbarrier.arrive(bars.k_ready.index(2 * b), count=32 * gl.num_warps())
    mbarrier.wait(bars.k_empty.index(2 * b + 1), phase)
    smem.k.right.index(b).store(dequantized(block.right, block.right_scales))
    if NUMBER == 0:
        store_rope(rows, block, rope, DIMS)
    mbarrier.arrive(bars.k_ready.index(2 * b + 1), count=32 * gl.num_warps())


@gluon.jit
def physical(source, entry, PAGE: gl.constexpr):
    """Physical rows of 64 keys, -1 where there is none."""
    page, place, ok = locate(source, entry, PAGE)
    if PAGE > 0:
        place += page * PAGE
    return gl.where(ok, place, -1)


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
    REQUESTS: gl.constexpr,
):
    """Load and dequantize every work item of this program, as rows.producer loads plain rows.
    CACHE: the `CacheFormat` of `CacheRows`. REQUESTS: how many are numbered together."""
    PAGE: gl.constexpr = CACHE.page_size
    KL: gl.constexpr = key_layout(CHUNK, CACHE.scale_block, LANES, gl.num_warps(), EACH)
    turn = gl.program_id(0) * 0
    it = turn  # steps so far, over all work items
    found, item, steps = first_work_item(turn, info, source, counts, bars, REQUESTS)
    entry = entries(source, item.first_entry, item.stop, item.skipped, KL)
    block = load_rows(rows, physical(source, entry, PAGE), DIMS, CACHE)
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
            last = j == steps - 1
            ahead = gl.where(last, next_item.skipped, item.skipped + (j + 1) * STEP)
            first = gl.where(last, next_item.first_entry, item.first_entry)
            stop = gl.where(last, next_item.stop, item.stop)
            for i in gl.static_range(2):
                mbarrier.wait(bars.k_empty.index(2 * (b + i)), phase)
                next_entry = entries(source, first, stop, ahead + i * KEYS, KL)
                fill(
                    rows, block, smem, bars, b + i, phase, i, source.sequences is None, DIMS
                )
                block = load_rows(rows, physical(source, entry, PAGE), DIMS, CACHE)
                entry = next_entry
            it += 1
        turn += 1
        item = next_item
        steps = next_steps
