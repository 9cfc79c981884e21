# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Reading rows of an FP8 cache: addresses, raw columns with their scales, and their bf16 values.

| format | `data_ptr` | `scale_ptr` | `rope_ptr` |
|---|---|---|---|
| fp8_656 | e4m3, 512 of the 656 bytes of a row | fp32, the 4 scales in the row | bf16, 64 in the row |
| fp8_block32/64/128, fp8_token | e4m3, latent and rope | fp32, a tensor of its own | None |

The value of an element is bf16(fp32(e4m3) * scale), rounded once, whoever reads it.

Registers hold a chunk of columns as [keys, blocks of columns that share a scale, columns of a
block], so that a scale is one value per thread and block: 64 columns with scales of 32 are
[64, 2, 32]. Eight neighboring columns belong to a thread, which stores them with 16 bytes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BYTES = gl.constexpr(16)  # of a vector; strides come in this unit
FP32S = gl.constexpr(4)
BF16S = gl.constexpr(8)


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
def offsets(rows, page, place, PAGE: gl.constexpr):
    """Where rows begin: in units of 16 bytes from the data, and in fp32 from the scales."""
    _data, stride_page, stride_row, _scales, scale_page, scale_row, rope_ptr = rows
    start = place.to(gl.int64) * stride_row.to(gl.int64)
    if PAGE > 0:
        start += page.to(gl.int64) * stride_page.to(gl.int64)
    scales = start * FP32S
    if rope_ptr is None:
        scales = place.to(gl.int64) * scale_row.to(gl.int64)
        if PAGE > 0:
            scales += page.to(gl.int64) * scale_page.to(gl.int64)
    return start, scales


@gluon.jit
def load_scales(
    rows, at, ok, FIRST: gl.constexpr, WIDTH: gl.constexpr, BLOCK: gl.constexpr, LANES: gl.constexpr
):
    """Scales of columns FIRST … FIRST + WIDTH - 1, [keys, blocks]; 0 where there is no key."""
    L: gl.constexpr = gl.SliceLayout(2, chunk_layout(WIDTH, BLOCK, LANES))
    block = gl.arange(0, blocks_of(WIDTH, BLOCK), gl.SliceLayout(0, L)) + FIRST // BLOCK
    start = rows[3] + gl.convert_layout(at[1], gl.SliceLayout(1, L))
    mask = gl.convert_layout(ok, gl.SliceLayout(1, L))
    return gl.load(start[:, None] + block[None, :], mask=mask[:, None], other=0.0)


@gluon.jit
def load_raw(
    rows, at, ok, FIRST: gl.constexpr, WIDTH: gl.constexpr, BLOCK: gl.constexpr, LANES: gl.constexpr
):
    """e4m3 columns FIRST … FIRST + WIDTH - 1, [keys, blocks, columns]; 0 where there is no key."""
    L: gl.constexpr = chunk_layout(WIDTH, BLOCK, LANES)
    BLOCKS: gl.constexpr = blocks_of(WIDTH, BLOCK)
    IN: gl.constexpr = WIDTH // BLOCKS
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))
    block = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(2, L))) * IN + FIRST
    inside = gl.arange(0, IN, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    start = rows[0] + gl.convert_layout(at[0], ROW) * BYTES
    mask = gl.convert_layout(ok, ROW)
    column = block[None, :, None] + inside[None, None, :]
    return gl.load(start[:, None, None] + column, mask=mask[:, None, None], other=0.0)


@gluon.jit
def widened(raw, scales):
    """bf16 [keys, columns] of a chunk and its scales."""
    value = (raw.to(gl.float32) * scales[:, :, None]).to(gl.bfloat16)
    return value.reshape([raw.shape[0], raw.shape[1] * raw.shape[2]])
