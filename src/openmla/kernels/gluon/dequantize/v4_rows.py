"""Reading rows of DeepSeek-V4's cache (`fp8_584`): addresses, columns, scales and bf16 values.

A page holds all of its rows, and behind them 8 bytes of scales for each:

| bytes | hold |
|---|---|
| 0 … 447 of a row | 7 chunks of 64 e4m3 columns |
| 448 … 575 | the tail: 64 bf16 columns, as much V's as K's |
| 0 … 6 of its scales | the exponents of the chunks, ue8m0: 2^(x - 127), NaN for 255 |

A value is bf16(fp32(e4m3) * scale) as in rows.py. An e4m3 value is exact in bf16, and so is a power
of two, so here they are multiplied as bf16, two at a time, and rounded once; nothing is lost unless
the product is below 2^-133. That is 5 instructions for two values where fp32 takes 6, and one
conversion instead of two.

Rows of a page and all strides are run-time values: engines keep windows in pages of 64 rows and
compressed rows in pages of 2 to 256, and one kernel reads them all.

`rows` is a CacheRows; words hold four e4m3 columns or two bf16 ones. Registers hold the words of a
chunk as [keys, 16].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.compat import cp_async, reinterpret
from openmla.kernels.gluon.dequantize.records import RowPlaces, RowScales
from openmla.kernels.gluon.dequantize.rows import BF16S, FOUR, WORDS

CHUNK = gl.constexpr(64)  # columns that share a scale
CHUNKS = gl.constexpr(7)
CHUNK_WORDS = gl.constexpr(16)
TAIL_WORDS = gl.constexpr(32)
QUIET_NAN = gl.constexpr(0x7FC0)
SMALLEST = gl.constexpr(0x0040)  # 2^-127
BOTH = gl.constexpr(0x00010001)  # times a half word: it in both halves
# Four values of a word times a power of two that is in both halves of a word. The upper half of an
# fp32 number that bf16 can hold is that bf16 number.
WIDEN = gl.constexpr(
    "{ .reg .b16 a, b, h<4>; .reg .b32 p, q, f<4>; mov.b32 {a, b}, $4; "
    "cvt.rn.f16x2.e4m3x2 p, a; cvt.rn.f16x2.e4m3x2 q, b; "
    "mov.b32 {h0, h1}, p; mov.b32 {h2, h3}, q; "
    "cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1; cvt.f32.f16 f2, h2; cvt.f32.f16 f3, h3; "
    "prmt.b32 p, f0, f1, 0x7632; prmt.b32 q, f2, f3, 0x7632; "
    "mul.rn.bf16x2 p, p, $5; mul.rn.bf16x2 q, q, $5; "
    "mov.b32 {$0, $1}, p; mov.b32 {$2, $3}, q; }"
)


@gluon.constexpr_function
def chunk_layout(lanes, warps):
    """[keys, words of a chunk]: `lanes` threads hold the words of a key."""
    return gl.BlockedLayout([1, 16 // lanes], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def key_layout(lanes, warps):
    """One value per key, where `chunk_layout` has the key's words."""
    return gl.SliceLayout(1, chunk_layout(lanes, warps))


@gluon.jit
def places_of(rows, row):
    """`RowPlaces` of physical rows; -1: no key."""
    is_there = row >= 0
    is_quantized = is_there
    row = gl.maximum(row, 0)
    page = row // rows.page_rows
    inside = (row - page * rows.page_rows).to(gl.int64)
    page = page.to(gl.int64)
    start = page * rows.page_stride.to(gl.int64) + inside * rows.row_stride.to(gl.int64)
    words = rows.data_ptr + start * WORDS
    scales = words  # of bf16 rows: none is read
    if rows.scale_ptr is None:
        is_quantized = row < 0
    else:
        at = page * rows.scale_page_stride.to(gl.int64)
        at += inside * rows.scale_row_stride.to(gl.int64)
        scales = rows.scale_ptr + at
    return RowPlaces(
        words=words, scales=scales, is_there=is_there, is_quantized=is_quantized, start=start
    )


@gluon.jit
def load_tail(rows, places, LANES: gl.constexpr, WARPS: gl.constexpr):
    """The bf16 columns at the end of rows, [keys, 64]; zeros where there is no key."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    start = gl.convert_layout(places.start, gl.SliceLayout(1, L))
    there = gl.convert_layout(places.is_there, gl.SliceLayout(1, L))
    column = gl.arange(0, CHUNK, gl.SliceLayout(0, L))
    at = rows.rope_ptr + (start * BF16S)[:, None] + column[None, :]
    return gl.load(at, mask=there[:, None], other=0.0)


@gluon.jit
def load_chunk(places, C: gl.constexpr, LANES: gl.constexpr, WARPS: gl.constexpr):
    """Words of chunk C, [keys, 16]; 0 where there is no key."""
    L: gl.constexpr = chunk_layout(LANES, WARPS)
    word = gl.arange(0, CHUNK_WORDS, gl.SliceLayout(0, L)) + C * CHUNK_WORDS
    at = places.words[:, None] + word[None, :]
    return gl.load(at, mask=places.is_quantized[:, None], other=0)


@gluon.jit
def load_scales(places):
    """The `RowScales` of rows."""
    return RowScales(
        low=gl.load(places.scales, mask=places.is_quantized, other=0),
        high=gl.load(places.scales + 1, mask=places.is_quantized, other=0),
    )


@gluon.jit
def scale_of(scales, C: gl.constexpr):
    """The scale of chunk C of each row, bf16 in both halves of a word."""
    word = scales.low if C < 4 else scales.high
    return doubled_power((word >> (C % 4 * 8)) & 255)


@gluon.jit
def doubled_power(exponent):
    """2^(exponent - 127) of stored exponents, bf16 in both halves of a word; NaN for 255."""
    bits = gl.where(exponent == 0, SMALLEST, exponent << 7)
    return gl.where(exponent == 255, QUIET_NAN, bits) * BOTH


@gluon.jit
def dequantized_words(words, factors):
    """The four columns of each word of e4m3 times its factor, bf16 [..., 2, 2]."""
    a, b, c, d = gl.inline_asm_elementwise(
        WIDEN, "=h,=h,=h,=h,r,r", [words, factors], dtype=FOUR, is_pure=True, pack=1
    )
    return gl.join(gl.join(a, c), gl.join(b, d))  # a b, c d


@gluon.jit
def dequantized_chunk(words, scale):
    """bf16 [keys, 64] of a chunk and the scale of each key."""
    words, factors = gl.broadcast(words, scale[:, None])
    fours = dequantized_words(words, factors)
    return fours.reshape([words.shape[0], CHUNK])


@gluon.jit
def copy_words(
    places,
    tile,
    FIRST: gl.constexpr,
    NUMBER: gl.constexpr,
    LANES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Start copying words FIRST … of rows to the last NUMBER words of a tile of bf16 columns; zeros
    where there is no key."""
    L: gl.constexpr = chunk_layout(LANES, WARPS)
    SHAPE: gl.constexpr = [tile.shape[0], tile.shape[1] // 2]
    IN_WORDS: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=32, rank=2
    )
    words = reinterpret(tile, gl.int32, SHAPE, IN_WORDS)
    word = gl.arange(0, NUMBER, gl.SliceLayout(0, L)) + FIRST
    at = places.words[:, None] + word[None, :]
    last = words.slice(SHAPE[1] - NUMBER, NUMBER, dim=1)
    cp_async(last, at, mask=places.is_there[:, None])


@gluon.jit
def copy_tail(places, tile, LANES: gl.constexpr, WARPS: gl.constexpr):
    """Start copying the tails of rows to the end of a tile; zeros where there is no key."""
    copy_words(places, tile, CHUNKS * CHUNK_WORDS, TAIL_WORDS, LANES, WARPS)
