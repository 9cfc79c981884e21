"""The producer of the latent kernel over DeepSeek-V4's rows (`fp8_584`), from one cache or two.

It takes the place of rows.producer, with the same tiles and barriers. Columns are loaded into
registers, a chunk of 64 at a time and some chunks ahead, also across blocks and work items: memory
answers while earlier chunks are converted and stored, and nothing waits for a tile to be empty but
the store. (rows_fp8.py stages the bytes of a block in the tile that they will fill, so that a block
waits first for its tile and then for memory.)

| order | of a block |
|---|---|
| 1 | where the rows of the next block lie, and their scales; the list of the block after it |
| 2 | wait until left and right are empty; copy the bf16 tail to the end of right (cp.async) |
| 3 | chunks 0 to 3 to left, 4 to 6 to right; for each, load the one that comes AHEAD later |

Ordinary stores write the tiles that wgmma will read. One thread arrives for all 128 when a tile is
written, and the warp-group that waits for it fences it (`wait_tile` of signals.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from openmla.kernels.gluon.dequantize.v4_rows import (
    CHUNK,
    CHUNKS,
    copy_tail,
    dequantized_chunk,
    key_layout,
    load_chunk,
    load_scales,
    places_of,
    scale_of,
)
from openmla.kernels.hopper.latent.listing import either, in_pool, listing_of, look_up
from openmla.kernels.hopper.latent.records import BlockRows
from openmla.kernels.hopper.latent.rows import (
    first_work_item,
    load_queries,
    put_validity,
    validity_of,
)
from openmla.kernels.hopper.latent.signals import publish_work_item
from openmla.kernels.hopper.latent.source import KEYS, STEP, find_work, work_item

THREADS = gl.constexpr(128)
WARPS = gl.constexpr(4)
LANES = gl.constexpr(4)  # that hold the 64 bytes of a chunk of a row
# Chunks that are loaded before they are wanted: a block. With 4 it took 8 to 17 % longer (H200, two
# caches, 128 lists of 128 + 512 rows and of 128 + 1024, and 2048 lists; no register is spilled).
AHEAD = gl.constexpr(7)
HALF_CHUNKS = gl.constexpr(4)  # of the left half of the columns


@gluon.jit
def rows_at(source, rows, listed, is_second):
    """The `BlockRows` of what `look_up` returned; their scales are on their way."""
    if source.second_keys is None:
        places = places_of(rows, in_pool(source, listed))
    elif is_second != 0:
        places = places_of(rows.second, in_pool(source.second, listed))
    else:
        places = places_of(rows, in_pool(source, listed))
    return BlockRows(places=places, scales=load_scales(places))


@gluon.jit
def first_chunks(block):
    """The first AHEAD chunks of `BlockRows`."""
    chunks = ()
    for c in gl.static_range(AHEAD):
        chunks += (load_chunk(block.places, c, LANES, WARPS),)
    return chunks


@gluon.jit
def fill(block, chunks, after, tiles, validity, b, phase, bars):
    """Fill the tiles of block b with `BlockRows`, whose first chunks are loaded. Returns the first
    chunks of the block `after`."""
    left, right = tiles.left.index(b), tiles.right.index(b)
    mbarrier.wait(bars.k_empty.index(2 * b), phase)
    mbarrier.wait(bars.k_empty.index(2 * b + 1), phase)
    copy_tail(block.places, right, LANES, WARPS)
    async_copy.commit_group()
    ready = bars.valid_ready.index(b)
    put_validity(validity_of(validity, b), block.places.is_there, ready, LANES)
    for c in gl.static_range(CHUNKS):
        columns = dequantized_chunk(chunks[c], scale_of(block.scales, c))
        tile = left if c < HALF_CHUNKS else right
        tile.slice(c % HALF_CHUNKS * CHUNK, CHUNK, dim=1).store(columns)
        if c + AHEAD < CHUNKS:
            chunks += (load_chunk(block.places, c + AHEAD, LANES, WARPS),)
        else:
            chunks += (load_chunk(after.places, c + AHEAD - CHUNKS, LANES, WARPS),)
        if c == HALF_CHUNKS - 1:
            mbarrier.arrive(bars.k_ready.index(2 * b), count=THREADS)
    async_copy.wait_group(0)
    mbarrier.arrive(bars.k_ready.index(2 * b + 1), count=THREADS)
    loaded = ()
    for c in gl.static_range(AHEAD):
        loaded += (chunks[CHUNKS + c],)
    return loaded


@gluon.jit
def v4_producer(
    info,
    source,
    rows,
    counts,
    q_descs,
    smem,
    bars,
    ST: gl.constexpr,
    DIMS: gl.constexpr,
    REQUESTS: gl.constexpr,
):
    """Load and dequantize every work item of this program, as rows.producer loads plain rows.
    REQUESTS: how many are numbered together."""
    KL: gl.constexpr = key_layout(LANES, WARPS)
    turn = gl.program_id(0) * 0
    it = turn  # steps so far, over all work items
    found, item, steps = first_work_item(turn, info, source, counts, bars, REQUESTS)
    listing = listing_of(source, item, item.tile)
    listed, is_second = look_up(source, listing, item.skipped, KEYS, KL)
    block = rows_at(source, rows, listed, is_second)
    listed, is_second = look_up(source, listing, item.skipped + KEYS, KEYS, KL)
    chunks = first_chunks(block)
    while steps > 0:
        found = find_work(found, source, True, REQUESTS)
        next_item, next_steps = work_item(found, source, counts)
        publish_work_item(info, bars, turn + 1, next_item.tile, next_steps, source)
        next_listing = listing_of(source, next_item, next_item.tile)
        mbarrier.wait(bars.q_empty, (turn & 1) ^ 1)
        load_queries(q_descs, smem.q, bars.q_ready, item.box, DIMS)
        for j in range(0, steps):
            b = it % ST * 2
            phase = ((it // ST) & 1) ^ 1
            last = j == steps - 1
            place = gl.where(last, next_item.skipped, item.skipped + (j + 1) * STEP)
            here = either(last, next_listing, listing)
            for i in gl.static_range(2):
                after = rows_at(source, rows, listed, is_second)
                listed, is_second = look_up(source, here, place + i * KEYS, KEYS, KL)
                chunks = fill(block, chunks, after, smem.k, smem.validity, b + i, phase, bars)
                block = after
            it += 1
        turn += 1
        item = next_item
        listing = next_listing
        steps = next_steps
