"""How the latent kernel fills a block with rows of DeepSeek-V4 (`fp8_584`) or of V4.1 (the formats
of v41_chunks.py). The producer is that of rows_several.py.

Columns are loaded into registers, a chunk of 64 bytes at a time and some chunks ahead, also across
blocks and work items: memory answers while earlier chunks are converted and stored, and nothing
waits for a tile to be empty but the store. (rows_fp8.py stages the bytes of a block in the tile
that they will fill, so that a block waits first for its tile and then for memory.)

| order | of a block |
|---|---|
| 1 | where the rows of the next block lie, and their scales; the list of the block after it |
| 2 | wait until left and right are empty; copy a bf16 tail to the end of right (cp.async) |
| 3 | chunks of the left half to left, the others to right; load those that come AHEAD later |

Sources may have rows of different formats, as V4.1's window and its compressed rows do. Ahead are
then as many chunks as the shorter rows have; a block of longer ones loads its last chunks itself.

| a block of | loads, one when a chunk is stored |
|---|---|
| fp8_584 | 7 chunks of the next block |
| fp8_528_v41 | its own last three, 5 of the next block |
| fp8_528_v41 beside fp4_288 | its own last four, 4 of the next block |
| fp4_288 | 4 of the next block |

Scales of V4's rows are loaded with the places of rows. Of V4.1's there are twice as many: a word of
the next block is loaded when that of this block has been used, into the same registers.

Ordinary stores write the tiles that wgmma will read. One thread arrives for all 128 when a tile is
written, and the warp-group that waits for it fences it (`wait_tile` of signals.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from openmla.kernels.gluon.dequantize.v4_rows import (
    copy_tail,
    dequantized_chunk,
    load_chunk,
    scale_of,
)
from openmla.kernels.gluon.dequantize.v41_chunks import (
    chunked_rows,
    columns_of_chunk,
    load_half_scales,
)
from openmla.kernels.hopper.latent.rows import put_validity, validity_of

THREADS = gl.constexpr(128)
WARPS = gl.constexpr(4)
LANES = gl.constexpr(4)  # that hold the 64 bytes of a chunk of a row
# Chunks that are loaded before they are wanted: a block of V4's rows. With 4 it took 8 to 17 %
# longer (H200, two caches, 128 lists of 128 + 512 rows and of 128 + 1024, and 2048 lists; no
# register is spilled).
AHEAD = gl.constexpr(7)
# V4.1's rows: with 6 chunks, Triton 3.6 spills 15 registers (compiled, not run).
AHEAD_V41 = gl.constexpr(5)
HALF = gl.constexpr(256)  # columns of a tile


@gluon.constexpr_function
def ways_of(stored):
    """The formats of `Stored` as ways to read a block, 0 and 1: one format is both, and bf16 rows,
    which are copied, are way 1. (In Triton 3.6 the fields of a constant have no names here.)"""
    first, second = stored
    return (second, first) if first == "bf16" else (first, second)


@gluon.constexpr_function
def way_of(stored, is_second):
    """The way in which blocks of a source are read."""
    name = stored[1] if is_second else stored[0]
    return int(name == "bf16" or name != ways_of(stored)[0])


@gluon.constexpr_function
def rows_of(stored, way):
    """The `ChunkedRows` that are read in a way; way 0's where way 1 copies bf16 rows."""
    first, second = ways_of(stored)
    return chunked_rows(first if way == 0 or second == "bf16" else second)


@gluon.constexpr_function
def words_ahead(stored):
    """Words of scales that are loaded as v41_chunks.py has them, of V4's rows too where these lie
    beside V4.1's; 0 where there are none of V4.1's, and `load_scales` loads V4's."""
    if stored is None or all(name in ("bf16", "fp8_584") for name in stored):
        return 0
    return max(rows_of(stored, 0).scale_words, rows_of(stored, 1).scale_words)


@gluon.constexpr_function
def chunks_ahead(stored, most, most_v41):
    """Chunks of a block that are loaded while the block before it is filled."""
    most = most_v41 if words_ahead(stored) else most
    return min(most, rows_of(stored, 0).chunks, rows_of(stored, 1).chunks)


@gluon.constexpr_function
def last_chunk_of(word, rows):
    """The chunk of `ChunkedRows` after which a word of scales is not needed any more."""
    return min((word + 1) * rows.scale_chunks, rows.chunks) - 1


@gluon.jit
def word_ahead(block, number: gl.constexpr, STORED: gl.constexpr):
    """Word `number` of the scales of a block, as v41_chunks.py has them."""
    FIRST: gl.constexpr = rows_of(STORED, 0)
    SECOND: gl.constexpr = rows_of(STORED, 1)
    if FIRST == SECOND:
        count, step = FIRST.scale_words, FIRST.scale_step
    else:
        count = gl.where(block.way != 0, SECOND.scale_words, FIRST.scale_words)
        step = gl.where(block.way != 0, SECOND.scale_step, FIRST.scale_step)
    return load_half_scales(block.places, number, count, step, LANES, WARPS)


@gluon.jit
def first_chunks(block, STORED: gl.constexpr):
    """What is loaded of a block ahead: chunks, and then scales where they are as V4.1's."""
    chunks = ()
    for c in gl.static_range(chunks_ahead(STORED, AHEAD, AHEAD_V41)):
        chunks += (load_chunk(block.places, c, LANES, WARPS),)
    for i in gl.static_range(words_ahead(STORED)):
        chunks += (word_ahead(block, i, STORED),)
    return chunks


@gluon.jit
def fill(
    block,
    chunks,
    after,
    tiles,
    validity,
    b,
    phase,
    bars,
    WAY: gl.constexpr,
    STORED: gl.constexpr,
):
    """Fill the tiles of block b with quantized rows that are read in a way. chunks: what
    `first_chunks` loaded of it; returns the same of the block `after`."""
    ROWS: gl.constexpr = rows_of(STORED, WAY)
    CHUNKS: gl.constexpr = ROWS.chunks
    IN_HALF: gl.constexpr = HALF // ROWS.columns
    NEXT: gl.constexpr = chunks_ahead(STORED, AHEAD, AHEAD_V41)
    WORDS: gl.constexpr = words_ahead(STORED)
    left, right = tiles.left.index(b), tiles.right.index(b)
    mbarrier.wait(bars.k_empty.index(2 * b), phase)
    mbarrier.wait(bars.k_empty.index(2 * b + 1), phase)
    if ROWS.has_tail:
        copy_tail(block.places, right, LANES, WARPS)
        async_copy.commit_group()
    ready = bars.valid_ready.index(b)
    put_validity(validity_of(validity, b), block.places.is_there, ready, LANES)
    words = ()
    for i in gl.static_range(WORDS):
        words += (chunks[NEXT + i],)
    for c in gl.static_range(CHUNKS):
        chunk = chunks[c if c < NEXT else c + WORDS]
        if WORDS > 0:
            columns = columns_of_chunk(chunk, words[c // ROWS.scale_chunks], c, ROWS, LANES, WARPS)
        else:
            columns = dequantized_chunk(chunk, scale_of(block.scales, c))
        tile = left if c < IN_HALF else right
        tile.slice(c % IN_HALF * ROWS.columns, ROWS.columns, dim=1).store(columns)
        if c + NEXT < CHUNKS:
            chunks += (load_chunk(block.places, c + NEXT, LANES, WARPS),)
        else:
            chunks += (load_chunk(after.places, c + NEXT - CHUNKS, LANES, WARPS),)
        for i in gl.static_range(WORDS):
            if c == last_chunk_of(i, ROWS):
                words += (word_ahead(after, i, STORED),)
        if c == IN_HALF - 1:
            mbarrier.arrive(bars.k_ready.index(2 * b), count=THREADS)
    if ROWS.has_tail:
        async_copy.wait_group(0)
    mbarrier.arrive(bars.k_ready.index(2 * b + 1), count=THREADS)
    loaded = ()
    for c in gl.static_range(NEXT):
        loaded += (chunks[CHUNKS + WORDS + c],)
    for i in gl.static_range(WORDS):
        loaded += (words[WORDS + i],)
    return loaded
