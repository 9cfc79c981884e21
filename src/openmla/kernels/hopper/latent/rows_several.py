"""The producer of the latent kernel over sources of bf16 rows, or of these and DeepSeek-V4's.

It takes the place of rows.producer, with the same tiles and barriers; listing.py says which rows a
block has. The rows of a block are of one source, and so of one format:

| rows | a block is |
|---|---|
| bf16 | copied (cp.async), the left half as soon as left is empty, then the right |
| V4's | dequantized as in rows_v4.py, its chunks loaded while the block before is filled |

Every thread arrives when its copies have arrived, one for all 128 when V4's rows are written. Where
a source has V4's rows, the warp-group that waits for a tile fences it, whoever wrote it
(`wait_tile` of signals.py).
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
from openmla.kernels.hopper.latent.records import SourceRows
from openmla.kernels.hopper.latent.rows import (
    arrive_copied,
    first_work_item,
    load_queries,
    put_validity,
    validity_of,
)
from openmla.kernels.hopper.latent.rows_v4 import LANES, WARPS, fill, first_chunks
from openmla.kernels.hopper.latent.signals import publish_work_item
from openmla.kernels.hopper.latent.source import KEYS, STEP, find_work, work_item

HALF_WORDS = gl.constexpr(128)  # of half of the columns


@gluon.jit
def source_rows_at(source, rows, listed, is_second, PLAIN: gl.constexpr):
    """The `SourceRows` of what `look_up` returned; scales are on their way."""
    is_plain = gl.program_id(0) * 0
    if source.second_keys is None:
        places = places_of(rows, in_pool(source, listed))
        is_plain += PLAIN.first
    elif is_second != 0:
        places = places_of(rows.second, in_pool(source.second, listed))
        is_plain += PLAIN.second
    else:
        places = places_of(rows, in_pool(source, listed))
        is_plain += PLAIN.first
    return SourceRows(places=places, scales=load_scales(places), is_plain=is_plain)


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
def fill_with(block, chunks, after, smem, b, phase, bars, PLAIN: gl.constexpr):
    """Fill the tiles of block b with `SourceRows`. Returns the first chunks of the block `after`,
    of which bf16 rows have none."""
    if PLAIN.first and PLAIN.second:
        copy_block(block, smem.k, smem.validity, b, phase, bars)
        return chunks
    else:
        if block.is_plain != 0:
            copy_block(block, smem.k, smem.validity, b, phase, bars)
            chunks = first_chunks(after)
        else:
            chunks = fill(block, chunks, after, smem.k, smem.validity, b, phase, bars)
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
    PLAIN: gl.constexpr,
):
    """Load every work item of this program, as rows.producer does. PLAIN: `Plain`."""
    KL: gl.constexpr = key_layout(LANES, WARPS)
    turn = gl.program_id(0) * 0
    it = turn  # steps so far, over all work items
    found, item, steps = first_work_item(turn, info, source, counts, bars, 0)
    listing = listing_of(source, item, item.tile)
    listed, is_second = look_up(source, listing, item.skipped, KEYS, KL)
    block = source_rows_at(source, rows, listed, is_second, PLAIN)
    listed, is_second = look_up(source, listing, item.skipped + KEYS, KEYS, KL)
    chunks = turn
    if not (PLAIN.first and PLAIN.second):
        chunks = first_chunks(block)
    while steps > 0:
        found = find_work(found, source, True, 0)
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
                after = source_rows_at(source, rows, listed, is_second, PLAIN)
                listed, is_second = look_up(source, here, place + i * KEYS, KEYS, KL)
                chunks = fill_with(block, chunks, after, smem, b + i, phase, bars, PLAIN)
                block = after
            it += 1
        turn += 1
        item = next_item
        listing = next_listing
        steps = next_steps
