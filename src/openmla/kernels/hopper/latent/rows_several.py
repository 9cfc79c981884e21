"""The producer of the latent kernel over rows of DeepSeek-V4 and V4.1, from one source or two, over
two sources of bf16 rows, and over sources of both.

It takes the place of rows.producer, with the same tiles and barriers; listing.py says which rows a
block has. The rows of a block are of one source, and so of one format:

| rows | a block is |
|---|---|
| bf16 | copied (cp.async), the left half as soon as left is empty, then the right |
| quantized | dequantized as in rows_v4.py, its chunks loaded while the block before is filled |

Every thread arrives when its copies have arrived, one for all 128 when quantized rows are written.
Where a source has such rows, the warp-group that waits for a tile fences it, whichever thread wrote
it (`wait_tile` of signals.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from openmla.kernels.gluon.dequantize.v4_rows import (
    copy_words,
    key_layout,
    load_scales,
    places_of,
)
from openmla.kernels.hopper.latent.listing import either, in_pool, listing_of, look_up
from openmla.kernels.hopper.latent.records import BlockRows, SourceRows
from openmla.kernels.hopper.latent.rows import (
    arrive_copied,
    first_work_item,
    load_queries,
    put_validity,
    validity_of,
)
from openmla.kernels.hopper.latent.rows_v4 import (
    LANES,
    WARPS,
    fill,
    first_chunks,
    way_of,
    ways_of,
    words_ahead,
)
from openmla.kernels.hopper.latent.signals import publish_work_item
from openmla.kernels.hopper.latent.source import KEYS, STEP, find_work, work_item

HALF_WORDS = gl.constexpr(128)  # of half of the columns


@gluon.constexpr_function
def copies_all(stored):
    """Whether all rows are bf16."""
    return ways_of(stored)[0] == "bf16"


@gluon.constexpr_function
def copies_some(stored):
    """Whether way 1 copies rows."""
    return ways_of(stored)[1] == "bf16"


@gluon.constexpr_function
def has_one_way(stored):
    """Whether all rows are quantized in one format."""
    first, second = ways_of(stored)
    return first == second != "bf16"


@gluon.jit
def rows_at(source, rows, listed, is_second, STORED: gl.constexpr):
    """The `SourceRows` of what `look_up` returned, or its `BlockRows` where rows are read in one
    way; scales are on their way."""
    way = gl.program_id(0) * 0
    if source.second_keys is None:
        places = places_of(rows, in_pool(source, listed))
        way += way_of(STORED, False)
    elif is_second != 0:
        places = places_of(rows.second, in_pool(source.second, listed))
        if not has_one_way(STORED):
            way += way_of(STORED, True)
    else:
        places = places_of(rows, in_pool(source, listed))
        if not has_one_way(STORED):
            way += way_of(STORED, False)
    scales = ()
    if words_ahead(STORED) == 0:
        scales = load_scales(places)
    if has_one_way(STORED):
        return BlockRows(places=places, scales=scales)
    else:
        return SourceRows(places=places, scales=scales, way=way)


@gluon.jit
def copy_block(block, tiles, validity, b, phase, bars):
    """Fill the tiles of block b with bf16 rows."""
    mbarrier.wait(bars.k_empty.index(2 * b), phase)
    ready = bars.valid_ready.index(b)
    put_validity(validity_of(validity, b), block.places.is_there, ready, LANES)
    copy_words(block.places, tiles.left.index(b), 0, HALF_WORDS, LANES, WARPS)
    arrive_copied(bars.k_ready.index(2 * b))
    mbarrier.wait(bars.k_empty.index(2 * b + 1), phase)
    copy_words(block.places, tiles.right.index(b), HALF_WORDS, HALF_WORDS, LANES, WARPS)
    arrive_copied(bars.k_ready.index(2 * b + 1))


@gluon.jit
def fill_with(block, chunks, after, smem, b, phase, bars, STORED: gl.constexpr):
    """Fill the tiles of block b with its rows. Returns the first chunks of the block `after`, of
    which bf16 rows have none."""
    if copies_all(STORED):
        copy_block(block, smem.k, smem.validity, b, phase, bars)
        return chunks
    elif has_one_way(STORED):
        return fill(block, chunks, after, smem.k, smem.validity, b, phase, bars, 0, STORED)
    else:
        if block.way != 0:
            if copies_some(STORED):
                copy_block(block, smem.k, smem.validity, b, phase, bars)
                chunks = first_chunks(after, STORED)
            else:
                chunks = fill(
                    block, chunks, after, smem.k, smem.validity, b, phase, bars, 1, STORED
                )
        else:
            chunks = fill(block, chunks, after, smem.k, smem.validity, b, phase, bars, 0, STORED)
        return chunks


@gluon.jit
def several_producer(
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
    STORED: gl.constexpr,
):
    """Load every work item of this program, as rows.producer does. REQUESTS: how many are numbered
    together. STORED: `Stored`."""
    KL: gl.constexpr = key_layout(LANES, WARPS)
    turn = gl.program_id(0) * 0
    it = turn  # steps so far, over all work items
    found, item, steps = first_work_item(turn, info, source, counts, bars, REQUESTS)
    listing = listing_of(source, item, item.tile)
    listed, is_second = look_up(source, listing, item.skipped, KEYS, KL)
    block = rows_at(source, rows, listed, is_second, STORED)
    listed, is_second = look_up(source, listing, item.skipped + KEYS, KEYS, KL)
    chunks = turn
    if not copies_all(STORED):
        chunks = first_chunks(block, STORED)
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
                after = rows_at(source, rows, listed, is_second, STORED)
                listed, is_second = look_up(source, here, place + i * KEYS, KEYS, KL)
                chunks = fill_with(block, chunks, after, smem, b + i, phase, bars, STORED)
                block = after
            it += 1
        turn += 1
        item = next_item
        listing = next_listing
        steps = next_steps
