"""Reading rows that have scales of one byte, DeepSeek-V4.1's and vLLM's: their bf16 values.

| format | 512 columns | share a scale | scales | rope |
|---|---|---|---|---|
| fp8_528_v41, fp8_528_v41_split | 512 bytes, e4m3 | 32 bytes | 16, ue8m0 | – |
| fp4_288, fp4_288_split | 256 bytes, two e2m1 in each | 8 bytes | 32, e4m3 | – |
| nvfp4_352 | the same | 8 bytes | 32, e4m3, transposed | 64 bytes, e4m3 without a scale |

Column 2i of e2m1 is the low half of byte i. Scales have an address and strides of their own, in
bytes: they lie in the row, or behind all rows of a page. A value is bf16(fp32(element) * scale),
rounded once, as everywhere; a product of e2m1 and e4m3 needs no rounding. Scales that are
transposed have those of blocks b, b + 4, b + 8 … side by side.

`rows` is a CacheRows, CACHE a CacheFormat whose `scale_block` counts bytes, SCALES the type of the
scales: "ue8m0" of e4m3 columns, "e4m3" of e2m1 ones, "e4m3 by 4" if they are transposed. Registers
hold words of four bytes as rows.py holds them, [keys, blocks of bytes that share a scale, words of
a block]; a word has eight columns of e2m1.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.dequantize.rows import (
    blocks_of,
    chunk_layout,
    dequantized,
    load_raw,
    start_of_row,
)

SMALLEST = gl.constexpr(0x00400000)  # 2^-127 in fp32
QUIET_NAN = gl.constexpr(0x7FC00000)
# Twice the magnitude of e2m1 number n: bits 4n … 4n + 3 of 0xC8643210.
MAGNITUDES = gl.constexpr(0xC8643210 - (1 << 32))


@gluon.constexpr_function
def row_bytes(columns, scales):
    """Bytes of so many columns with scales of this type."""
    return columns if scales == "ue8m0" else columns // 2


@gluon.constexpr_function
def lanes_of(scales):
    """Blocks whose scales are the first of a line each, where they are transposed; else 1."""
    return int(scales.split(" by ")[1]) if " by " in scales else 1


@gluon.jit
def factors(
    rows,
    row,
    BYTES: gl.constexpr,
    CACHE: gl.constexpr,
    SCALES: gl.constexpr,
    LANES: gl.constexpr,
):
    """fp32 scales of rows of BYTES bytes, [keys, blocks]; where there is no key, of no matter."""
    BLOCK: gl.constexpr = CACHE.scale_block
    L: gl.constexpr = gl.SliceLayout(2, chunk_layout(BYTES, BLOCK, LANES))
    row = gl.convert_layout(row, gl.SliceLayout(1, L))
    block = gl.arange(0, blocks_of(BYTES, BLOCK), gl.SliceLayout(0, L))
    at = start_of_row(row, rows.scale_page_stride, rows.scale_row_stride, rows.pages)
    SCALE_LANES: gl.constexpr = lanes_of(SCALES)
    IN_LINE: gl.constexpr = blocks_of(BYTES, BLOCK) // SCALE_LANES
    if SCALE_LANES > 1:
        block = block % SCALE_LANES * IN_LINE + block // SCALE_LANES
    at = (rows.scale_ptr + at)[:, None] + block[None, :]
    stored = gl.load(at, mask=(row >= 0)[:, None], other=0)
    if SCALES == "ue8m0":
        exponent = stored.to(gl.int32)
        bits = gl.where(exponent == 0, SMALLEST, exponent << 23)
        return gl.where(exponent == 255, QUIET_NAN, bits).to(gl.float32, bitcast=True)
    else:
        return stored.to(gl.float8e4nv, bitcast=True).to(gl.float32)


@gluon.jit
def e2m1(words, halves, N: gl.constexpr):
    """Column N of the eight of each word, bf16. halves: half of their scales."""
    code = words >> (4 * N)
    signed = gl.where((code & 8) != 0, 0.0 - halves, halves)
    return (((MAGNITUDES >> ((code & 7) * 4)) & 15).to(gl.float32) * signed).to(gl.bfloat16)


@gluon.jit
def dequantized_e2m1(words, scales):
    """bf16 [keys, columns] of rows and their scales."""
    words, halves = gl.broadcast(words, (scales * 0.5)[:, :, None])
    even = gl.join(
        gl.join(e2m1(words, halves, 0), e2m1(words, halves, 4)),
        gl.join(e2m1(words, halves, 2), e2m1(words, halves, 6)),
    )
    odd = gl.join(
        gl.join(e2m1(words, halves, 1), e2m1(words, halves, 5)),
        gl.join(e2m1(words, halves, 3), e2m1(words, halves, 7)),
    )
    eights = gl.join(even, odd)
    return eights.reshape([words.shape[0], words.shape[1] * words.shape[2] * 8])


@gluon.jit
def load_columns(
    rows,
    row,
    COLUMNS: gl.constexpr,
    CACHE: gl.constexpr,
    SCALES: gl.constexpr,
    LANES: gl.constexpr,
):
    """bf16 [keys, COLUMNS] of rows; zeros where there is no key."""
    BYTES: gl.constexpr = row_bytes(COLUMNS, SCALES)
    words = load_raw(rows, row, 0, BYTES, CACHE, LANES)
    scales = factors(rows, row, BYTES, CACHE, SCALES, LANES)
    if SCALES == "ue8m0":
        return dequantized(words, scales)
    else:
        return dequantized_e2m1(words, scales)


@gluon.jit
def load_tail(
    rows, row, FIRST: gl.constexpr, COLUMNS: gl.constexpr, CACHE: gl.constexpr, LANES: gl.constexpr
):
    """bf16 [keys, COLUMNS] of e4m3 columns without a scale, from byte FIRST of their rows on."""
    words = load_raw(rows, row, FIRST, COLUMNS, CACHE, LANES)
    ones = gl.full(
        [words.shape[0], words.shape[1]], 1.0, gl.float32, gl.SliceLayout(2, words.type.layout)
    )
    return dequantized(words, ones)
