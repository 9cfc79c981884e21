"""Reading rows of an FP8 cache: addresses, raw columns with their scales, and their bf16 values.

| rope | `data_ptr` | `scale_ptr` | `rope_ptr` |
|---|---|---|---|
| bf16 | words, of the e4m3 columns | fp32, scales in the row | bf16, in the row |
| e4m3 | words, latent and rope | fp32, a tensor of its own | None |

The value of an element is bf16(fp32(e4m3) * scale), rounded once, in every kernel that reads it.

`rows` is a CacheRows, CACHE a CacheFormat. A row is its number in the pool, or -1 where there is no
key.

A word is four e4m3 columns: a loop would carry one-byte values with a register for each. Registers
hold a chunk of columns as [keys, blocks of columns that share a scale, words of a block], so that a
scale is one value per thread and block: 64 columns with scales of 32 are [64, 2, 8]. Eight
neighboring columns belong to a thread, which stores them with 16 bytes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.pages import divided
from openmla.kernels.gluon.scores import opaque_zero

WORDS = gl.constexpr(4)  # in 16 bytes; strides come in this unit
FP32S = gl.constexpr(4)
BF16S = gl.constexpr(8)
CHUNK = gl.constexpr(64)  # columns that are read at a time
# Four values of a word times a scale. The simulator knows this string.
WIDEN = gl.constexpr(
    "{ .reg .b16 a, b, h<4>; .reg .b32 p, q; .reg .f32 f<4>; mov.b32 {a, b}, $4; "
    "cvt.rn.f16x2.e4m3x2 p, a; cvt.rn.f16x2.e4m3x2 q, b; "
    "mov.b32 {h0, h1}, p; mov.b32 {h2, h3}, q; "
    "cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1; cvt.f32.f16 f2, h2; cvt.f32.f16 f3, h3; "
    "mul.f32 f0, f0, $5; mul.f32 f1, f1, $5; mul.f32 f2, f2, $5; mul.f32 f3, f3, $5; "
    "cvt.rn.bf16x2.f32 p, f1, f0; cvt.rn.bf16x2.f32 q, f3, f2; "
    "mov.b32 {$0, $1}, p; mov.b32 {$2, $3}, q; }"
)
FOUR = gl.constexpr((gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16))


@gluon.constexpr_function
def blocks_of(width, block):
    """The number of scales of a chunk of `width` columns, `block` columns each."""
    return max(1, width // block)


@gluon.constexpr_function
def chunk_layout(width, block, lanes):
    """`lanes` threads hold neighboring columns of a row, 8 in 2 words each."""
    across = max(1, lanes * 8 * blocks_of(width, block) // width)
    return gl.BlockedLayout([1, 1, 2], [32 // lanes, across, lanes // across], [4, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def key_layout(width, block, lanes):
    """One value per row of a chunk; the same layout for all widths and blocks."""
    return gl.SliceLayout(1, gl.SliceLayout(2, chunk_layout(width, block, lanes)))


@gluon.jit
def start_of_row(row, stride_page, stride_row, pages):
    """Where physical rows begin, in units of their strides; row 0 for -1. See `CacheRows`."""
    # An opaque zero, or the 64-bit offsets of a block of keys would be computed once and spilled.
    row = gl.maximum(row, 0) + opaque_zero()
    if stride_page is not None:
        page, place = divided(row, pages)
        start = page.to(gl.int64) * stride_page.to(gl.int64)
        return start + place.to(gl.int64) * stride_row.to(gl.int64)
    else:
        return row.to(gl.int64) * stride_row.to(gl.int64)


@gluon.jit
def load_scales(
    rows, row, FIRST: gl.constexpr, WIDTH: gl.constexpr, CACHE: gl.constexpr, LANES: gl.constexpr
):
    """Scales of columns FIRST … FIRST + WIDTH - 1, [keys, blocks]; 0 where there is no key."""
    BLOCK: gl.constexpr = CACHE.scale_block
    L: gl.constexpr = gl.SliceLayout(2, chunk_layout(WIDTH, BLOCK, LANES))
    row = gl.convert_layout(row, gl.SliceLayout(1, L))
    block = gl.arange(0, blocks_of(WIDTH, BLOCK), gl.SliceLayout(0, L)) + FIRST // BLOCK
    if rows.rope_ptr is None:
        at = start_of_row(row, rows.scale_page_stride, rows.scale_row_stride, rows.pages)
    else:
        at = start_of_row(row, rows.page_stride, rows.row_stride, rows.pages) * FP32S
    start = rows.scale_ptr + at
    return gl.load(start[:, None] + block[None, :], mask=(row >= 0)[:, None], other=0.0)


@gluon.jit
def load_raw(
    rows, row, FIRST: gl.constexpr, WIDTH: gl.constexpr, CACHE: gl.constexpr, LANES: gl.constexpr
):
    """Words of columns FIRST … of a chunk, [keys, blocks, words]; 0 where there is no key."""
    L: gl.constexpr = chunk_layout(WIDTH, CACHE.scale_block, LANES)
    BLOCKS: gl.constexpr = blocks_of(WIDTH, CACHE.scale_block)
    IN: gl.constexpr = WIDTH // BLOCKS // 4
    row = gl.convert_layout(row, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    block = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(2, L))) * IN + FIRST // 4
    inside = gl.arange(0, IN, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    at = start_of_row(row, rows.page_stride, rows.row_stride, rows.pages)
    start = rows.data_ptr + at * WORDS
    word = block[None, :, None] + inside[None, None, :]
    return gl.load(start[:, None, None] + word, mask=(row >= 0)[:, None, None], other=0)


@gluon.jit
def rope_start(rows, row, CACHE: gl.constexpr):
    """Pointers to the rope columns of rows that store them as bf16."""
    at = start_of_row(row, rows.page_stride, rows.row_stride, rows.pages)
    return rows.rope_ptr + at * BF16S


@gluon.jit
def widened(words, factors):
    """The four columns of each word times its factor, bf16 [..., 2, 2]."""
    a, b, c, d = gl.inline_asm_elementwise(
        WIDEN, "=h,=h,=h,=h,r,f", [words, factors], dtype=FOUR, is_pure=True, pack=1
    )
    return gl.join(gl.join(a, c), gl.join(b, d))  # a b, c d


@gluon.jit
def dequantized(words, scales):
    """bf16 [keys, columns] of a chunk and its scales."""
    words, factors = gl.broadcast(words, scales[:, :, None])
    fours = widened(words, factors)
    return fours.reshape([words.shape[0], words.shape[1] * words.shape[2] * 4])
