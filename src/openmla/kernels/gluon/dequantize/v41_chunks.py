"""Rows of DeepSeek-V4.1 read chunk by chunk, where they lie, as v4_rows.py reads DeepSeek-V4's.

A chunk is 64 bytes of a row, 16 words, and has two halves of 8 words:

| format | chunks | a chunk holds | a half has | scales of a row |
|---|---|---|---|---|
| fp8_584 | 7, then a tail | 64 columns, e4m3 | the chunk's scale, ue8m0 | 7 bytes, 2 words |
| fp8_528_v41, fp8_528_v41_split | 8 | 64 columns, e4m3 | one scale, ue8m0 | 16 bytes, 4 words |
| fp4_288, fp4_288_split | 4 | 128 columns, e2m1 | four scales, e4m3 | 32 bytes, 8 words |

Scales in the row and behind the rows of a page differ by where their address and strides come from
alone. A thread has words of one half of every chunk, so it loads the scales of those halves: 4
words, whichever of V4.1's formats a row has. That is what lets two sources of different formats
share registers: chunks [keys, 16] and scales [keys, 2].

Values are bf16(fp32(element) * scale) as everywhere. e4m3 columns are widened as V4's are. A column
of e2m1 is exact in bf16, and so are an e4m3 scale and the product of both: at most 6 bits, from
2^-10 to 2688. The eight magnitudes of e2m1 are looked up, their low and their high bytes:

| code | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
|---|---|---|---|---|---|---|---|---|
| e2m1 | 0 | 0.5 | 1 | 1.5 | 2 | 3 | 4 | 6 |
| bf16 | 0000 | 3F00 | 3F80 | 3FC0 | 4000 | 4040 | 4080 | 40C0 |
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.dequantize.records import ChunkedRows
from openmla.kernels.gluon.dequantize.v4_rows import dequantized_words, doubled_power

HALVES = gl.constexpr(2)
HALF_WORDS = gl.constexpr(8)
BYTE = gl.constexpr(8)  # bits
# The lowest byte of a word, an e4m3 number, as bf16 in both halves of a word.
SCALE = gl.constexpr(
    "{ .reg .b16 a, b, h<2>; .reg .b32 p; mov.b32 {a, b}, $1; cvt.rn.f16x2.e4m3x2 p, a; "
    "mov.b32 {h0, h1}, p; cvt.f32.f16 p, h0; prmt.b32 $0, p, p, 0x3232; }"
)
# Eight columns of e2m1 times their scale, which is in both halves of a word. Four columns at a
# time: low bytes of their magnitudes, high bytes, signs; then the bytes of each pair of columns. Of
# 8 bytes, prmt takes those that the digits name: codes without their signs, or places.
EIGHT_OF_E2M1 = gl.constexpr(
    "{ .reg .b32 c, m, l, h, s, p, t<4>; "
    "mov.b32 t0, 0xC0800000; mov.b32 t1, 0xC0804000; "
    "mov.b32 t2, 0x3F3F3F00; mov.b32 t3, 0x40404040; "
    "and.b32 c, $8, 0x77777777; shl.b32 m, $8, 4; "
    "prmt.b32 l, t0, t1, c; prmt.b32 h, t2, t3, c; "
    "prmt.b32 s, $8, m, 0x1504; and.b32 s, s, 0x80808080; or.b32 h, h, s; "
    "prmt.b32 p, l, h, 0x5140; mul.rn.bf16x2 p, p, $9; mov.b32 {$0, $1}, p; "
    "prmt.b32 p, l, h, 0x7362; mul.rn.bf16x2 p, p, $9; mov.b32 {$2, $3}, p; "
    "shr.u32 c, c, 16; prmt.b32 l, t0, t1, c; prmt.b32 h, t2, t3, c; "
    "prmt.b32 s, $8, m, 0x3726; and.b32 s, s, 0x80808080; or.b32 h, h, s; "
    "prmt.b32 p, l, h, 0x5140; mul.rn.bf16x2 p, p, $9; mov.b32 {$4, $5}, p; "
    "prmt.b32 p, l, h, 0x7362; mul.rn.bf16x2 p, p, $9; mov.b32 {$6, $7}, p; }"
)
EIGHT = gl.constexpr((gl.bfloat16,) * 8)


@gluon.constexpr_function
def chunked_rows(name):
    """The `ChunkedRows` of a format; scales in the row or behind a page's rows have one name."""
    if name == "fp8_584":
        of_scales = {"scale_words": 2, "scale_step": 1, "scale_chunks": 4}
        return ChunkedRows(7, 64, "ue8m0 of a chunk", has_tail=True, **of_scales)
    if name == "fp8_528_v41":
        of_scales = {"scale_words": 4, "scale_step": 1, "scale_chunks": 2}
        return ChunkedRows(8, 64, "ue8m0 of a half", has_tail=False, **of_scales)
    of_scales = {"scale_words": 4, "scale_step": 2, "scale_chunks": 1}
    return ChunkedRows(4, 128, "e4m3", has_tail=False, **of_scales)


@gluon.constexpr_function
def halves_layout(lanes, warps):
    """[keys, halves, words of a half]: threads have the words that `chunk_layout` gives them."""
    return gl.BlockedLayout(
        [1, 1, 16 // lanes], [32 // lanes, 2, lanes // 2], [warps, 1, 1], [2, 1, 0]
    )


@gluon.jit
def load_half_scales(places, number, count, step, LANES: gl.constexpr, WARPS: gl.constexpr):
    """Word `number` of the scales of rows at `RowPlaces`, [keys, halves]; zeros from word `count`
    on. step: words from one to the next; where it is 2, the halves have words of their own."""
    L: gl.constexpr = gl.SliceLayout(2, halves_layout(LANES, WARPS))
    first = gl.convert_layout(places.scales, gl.SliceLayout(1, L))
    there = gl.convert_layout(places.is_quantized, gl.SliceLayout(1, L)) & (number < count)
    half = gl.arange(0, HALVES, gl.SliceLayout(0, L))
    at = first[:, None] + (half * (step - 1) + number * step)[None, :]
    return gl.load(at, mask=there[:, None], other=0)


@gluon.jit
def e4m3_scale(word):
    """The e4m3 number in the lowest byte of a word, bf16 in both of its halves."""
    return gl.inline_asm_elementwise(SCALE, "=r,r", [word], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def eights(words, factors):
    """Eight columns of each word of e2m1 times its factor, bf16 [..., 2, 2, 2]."""
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        EIGHT_OF_E2M1,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [words, factors],
        dtype=EIGHT,
        is_pure=True,
        pack=1,
    )
    even = gl.join(gl.join(a, e), gl.join(c, g))
    return gl.join(even, gl.join(gl.join(b, f), gl.join(d, h)))


@gluon.jit
def columns_of_chunk(
    words,
    scales,
    C: gl.constexpr,
    ROWS: gl.constexpr,
    LANES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """bf16 [keys, columns] of chunk C of rows. ROWS: `ChunkedRows`; scales: the word that
    `load_half_scales` loaded for it."""
    L: gl.constexpr = halves_layout(LANES, WARPS)
    KEYS: gl.constexpr = words.shape[0]
    halves = gl.convert_layout(words.reshape([KEYS, HALVES, HALF_WORDS]), L, assert_trivial=True)
    if ROWS.scale == "e4m3":
        of_words = gl.arange(0, HALF_WORDS, gl.SliceLayout(0, gl.SliceLayout(1, L))) // 2 * BYTE
        halves, own = gl.broadcast(halves, scales[:, :, None])
        columns = eights(halves, e4m3_scale(own >> of_words[None, None, :]))
    else:
        byte = scales >> (C % ROWS.scale_chunks * (4 // ROWS.scale_chunks) * BYTE)
        if ROWS.scale == "ue8m0 of a half":
            half = gl.arange(0, HALVES, gl.SliceLayout(0, gl.SliceLayout(2, L)))
            byte = byte >> (half * BYTE)[None, :]
        halves, factors = gl.broadcast(halves, doubled_power(byte & 255)[:, :, None])
        columns = dequantized_words(halves, factors)
    return columns.reshape([KEYS, ROWS.columns])
