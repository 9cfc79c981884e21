"""Rows of lists for few queries: where they lie, and their columns as bf16 tiles.

Rows are read as dequantize/rows.py reads them, but by 8 warps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.compat import cp_async
from openmla.kernels.gluon.dequantize.rows import (
    FP32S,
    WORDS,
    blocks_of,
    rope_start,
    start_of_row,
)
from openmla.kernels.hopper.latent.source import count_of, range_of

KEYS = gl.constexpr(64)  # of a block
STEP = gl.constexpr(128)  # keys of a step: two blocks
WARPS = gl.constexpr(8)
VECTOR = gl.constexpr(8)  # elements of 16 bytes
# Arguments that say how many rows a query sees, where it sees spans or a second source.
MORE_COUNTS = ["requests", "second_topk", "second_requests"]
MORE_LENGTHS = [
    "request_ptr",
    "begin_ptr",
    "second_lengths_ptr",
    "second_request_ptr",
    "second_begin_ptr",
]


@gluon.constexpr_function
def word_layout(width, block):
    """Layout of [keys, blocks of columns that share a scale, words]: a thread has 8 neighboring
    columns."""
    blocks = blocks_of(width, block)
    inside = width // blocks // 8
    return gl.BlockedLayout(
        [1, 1, 2], [32 // (blocks * inside), blocks, inside], [WARPS, 1, 1], [2, 1, 0]
    )


@gluon.constexpr_function
def copy_layout(width):
    """Layout of [keys, columns]: a thread has 8 neighboring columns."""
    lanes = min(8, width // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def key_layout(width, block):
    """Layout of one value per key, for chunks of `width` columns. block: columns that share a
    scale; 0: rows are copied."""
    if block == 0:
        return gl.SliceLayout(1, copy_layout(width))
    return gl.SliceLayout(1, gl.SliceLayout(2, word_layout(width, block)))


@gluon.jit
def list_length(lengths_ptr, query, topk):
    """The valid length of a query's list."""
    if lengths_ptr is not None:
        return gl.minimum(gl.load(lengths_ptr + query), topk)
    else:
        return topk


@gluon.jit
def places_of_query(source, query):
    """Places of a query's list; of both, where the `Source` has a second (latent/listing.py)."""
    if source.begin is None and source.second_keys is None:
        return list_length(source.lengths, query, source.most_keys)
    else:
        return count_of(source, range_of(source, query), query)


@gluon.jit
def steps_of(count):
    """Steps of 128 keys; at least one."""
    return gl.maximum((count + (STEP - 1)) // STEP, 1)


@gluon.jit
def listed(source, query, count, first, NUMBER: gl.constexpr, LAYOUT: gl.constexpr):
    """Physical rows of entries from `first` on of a query's list (`Source`), -1 where there is no
    key."""
    at = gl.arange(0, NUMBER, LAYOUT) + first
    start = source.table + query.to(gl.int64) * source.table_stride
    index = gl.load(start + at, mask=at < count, other=-1)
    return gl.where((index >= 0) & (index < source.pool_rows), index, -1)


@gluon.jit
def copied(tile, rows, keys, chunk, CACHE: gl.constexpr):
    """Start copying columns of plain rows (`CacheRows`); zeros where there is no key."""
    WIDTH: gl.constexpr = tile.shape[1]
    L: gl.constexpr = copy_layout(WIDTH)
    keys = gl.convert_layout(keys, gl.SliceLayout(1, L))
    start = start_of_row(keys, rows.page_stride, rows.row_stride, rows.pages) * VECTOR
    start = rows.data_ptr + start
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, L)) + chunk * WIDTH
    cp_async(tile, start[:, None] + column[None, :], mask=(keys >= 0)[:, None])


@gluon.jit
def copied_rope(tile, rows, keys, CACHE: gl.constexpr):
    """Start copying rope that rows of an FP8 cache (`CacheRows`) store as bf16."""
    L: gl.constexpr = copy_layout(tile.shape[1])
    keys = gl.convert_layout(keys, gl.SliceLayout(1, L))
    column = gl.arange(0, tile.shape[1], gl.SliceLayout(0, L))
    start = rope_start(rows, keys, CACHE)
    cp_async(tile, start[:, None] + column[None, :], mask=(keys >= 0)[:, None])


@gluon.jit
def words(rows, keys, chunk, WIDTH: gl.constexpr, CACHE: gl.constexpr):
    """Words of a chunk of e4m3 columns, [keys, blocks, words]; 0 where there is no key."""
    L: gl.constexpr = word_layout(WIDTH, CACHE.scale_block)
    BLOCKS: gl.constexpr = blocks_of(WIDTH, CACHE.scale_block)
    IN: gl.constexpr = WIDTH // BLOCKS // 4
    keys = gl.convert_layout(keys, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    block = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(2, L))) * IN
    inside = gl.arange(0, IN, gl.SliceLayout(0, gl.SliceLayout(1, L))) + chunk * (WIDTH // 4)
    start = start_of_row(keys, rows.page_stride, rows.row_stride, rows.pages) * WORDS
    start = rows.data_ptr + start
    word = block[None, :, None] + inside[None, None, :]
    return gl.load(start[:, None, None] + word, mask=(keys >= 0)[:, None, None], other=0)


@gluon.jit
def scales(rows, keys, chunk, WIDTH: gl.constexpr, CACHE: gl.constexpr):
    """Scales of a chunk of e4m3 columns, [keys, blocks]; 0 where there is no key.

    They lie in the row where rope is bf16, else in a tensor of their own.
    """
    L: gl.constexpr = gl.SliceLayout(2, word_layout(WIDTH, CACHE.scale_block))
    keys = gl.convert_layout(keys, gl.SliceLayout(1, L))
    block = gl.arange(0, blocks_of(WIDTH, CACHE.scale_block), gl.SliceLayout(0, L))
    block += chunk * WIDTH // CACHE.scale_block
    if rows.rope_ptr is None:
        start = start_of_row(keys, rows.scale_page_stride, rows.scale_row_stride, rows.pages)
    else:
        start = start_of_row(keys, rows.page_stride, rows.row_stride, rows.pages) * FP32S
    start = rows.scale_ptr + start
    return gl.load(start[:, None] + block[None, :], mask=(keys >= 0)[:, None], other=0.0)


@gluon.jit
def write_stat(stat, output, query, first, heads):
    """Store one fp32 value for each of 64 heads of a query to an `Output`."""
    head = gl.arange(0, 64, stat.type.layout) + first
    start = output.base + query.to(gl.int64) * output.token_stride.to(gl.int64)
    gl.store(start + head * output.head_stride.to(gl.int64), stat, mask=head < heads)
