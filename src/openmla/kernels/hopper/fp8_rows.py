# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Reading rows of an FP8 cache: addresses, raw columns with their scales, and their bf16 values.

| format | `data_ptr` | `scale_ptr` | `rope_ptr` |
|---|---|---|---|
| fp8_656 | e4m3, 512 of a row's 656 bytes | fp32, 4 scales in the row | bf16, 64 in the row |
| fp8_block32/64/128, fp8_token | e4m3, latent and rope | fp32, a tensor of its own | None |

The value of an element is bf16(fp32(e4m3) * scale), rounded once, whoever reads it.

Registers hold a chunk of columns as [keys, blocks of columns that share a scale, columns of a
block], so that a scale is one value per thread and block: 64 columns with scales of 32 are
[64, 2, 32]. Eight neighboring columns belong to a thread, which stores them with 16 bytes.

CACHE is (rows of a page, or 0 where pages lie end to end; columns that share a scale). A row is its
number in the pool, or -1 where there is no key.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.scores import opaque_zero

BYTES = gl.constexpr(16)  # of a vector; strides come in this unit
FP32S = gl.constexpr(4)
BF16S = gl.constexpr(8)
CHUNK = gl.constexpr(64)  # columns that are read at a time


@gluon.constexpr_function
def blocks_of(width, block):
    """Scales that a chunk of `width` columns has."""
    return max(1, width // block)


@gluon.constexpr_function
def chunk_layout(width, block, lanes):
    """`lanes` threads hold neighboring columns of a row, 8 each."""
    across = max(1, lanes * 8 * blocks_of(width, block) // width)
    return gl.BlockedLayout([1, 1, 8], [32 // lanes, across, lanes // across], [4, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def key_layout(width, block, lanes):
    """One value per row of such a chunk. Rows are held alike whatever the width and the block."""
    return gl.SliceLayout(1, gl.SliceLayout(2, chunk_layout(width, block, lanes)))


@gluon.jit
def start_of_row(row, stride_page, stride_row, PAGE: gl.constexpr):
    """Where physical rows begin, in units of their strides; row 0 for one that is not there."""
    # Made of a hidden zero, or the 64-bit offsets of a block of keys would be computed once and
    # kept in registers that are not there.
    row = gl.maximum(row, 0) + opaque_zero()
    if PAGE > 0:
        page = (row // PAGE).to(gl.int64) * stride_page.to(gl.int64)
        return page + (row % PAGE).to(gl.int64) * stride_row.to(gl.int64)
    else:
        return row.to(gl.int64) * stride_row.to(gl.int64)


@gluon.jit
def load_scales(
    rows, row, FIRST: gl.constexpr, WIDTH: gl.constexpr, CACHE: gl.constexpr, LANES: gl.constexpr
):
    """Scales of columns FIRST … FIRST + WIDTH - 1, [keys, blocks]; 0 where there is no key."""
    _data, stride_page, stride_row, scale_ptr, scale_page, scale_row, rope_ptr = rows
    L: gl.constexpr = gl.SliceLayout(2, chunk_layout(WIDTH, CACHE[1], LANES))
    row = gl.convert_layout(row, gl.SliceLayout(1, L))
    block = gl.arange(0, blocks_of(WIDTH, CACHE[1]), gl.SliceLayout(0, L)) + FIRST // CACHE[1]
    if rope_ptr is None:
        start = scale_ptr + start_of_row(row, scale_page, scale_row, CACHE[0])
    else:
        start = scale_ptr + start_of_row(row, stride_page, stride_row, CACHE[0]) * FP32S
    return gl.load(start[:, None] + block[None, :], mask=(row >= 0)[:, None], other=0.0)


@gluon.jit
def load_raw(
    rows, row, FIRST: gl.constexpr, WIDTH: gl.constexpr, CACHE: gl.constexpr, LANES: gl.constexpr
):
    """e4m3 columns FIRST … FIRST + WIDTH - 1, [keys, blocks, columns]; 0 where there is no key."""
    L: gl.constexpr = chunk_layout(WIDTH, CACHE[1], LANES)
    BLOCKS: gl.constexpr = blocks_of(WIDTH, CACHE[1])
    IN: gl.constexpr = WIDTH // BLOCKS
    row = gl.convert_layout(row, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    block = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(2, L))) * IN + FIRST
    inside = gl.arange(0, IN, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    start = rows[0] + start_of_row(row, rows[1], rows[2], CACHE[0]) * BYTES
    column = block[None, :, None] + inside[None, None, :]
    return gl.load(start[:, None, None] + column, mask=(row >= 0)[:, None, None], other=0.0)


@gluon.jit
def rope_start(rows, row, CACHE: gl.constexpr):
    """Pointers to the rope columns of rows that store them as bf16."""
    return rows[6] + start_of_row(row, rows[1], rows[2], CACHE[0]) * BF16S


@gluon.jit
def widened(raw, scales):
    """bf16 [keys, columns] of a chunk and its scales."""
    value = (raw.to(gl.float32) * scales[:, :, None]).to(gl.bfloat16)
    return value.reshape([raw.shape[0], raw.shape[1] * raw.shape[2]])
