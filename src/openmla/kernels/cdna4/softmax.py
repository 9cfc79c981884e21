# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""Online softmax over tiles of scores, in log2 units, and the rows it ends in.

Per row, with s the scores times factor (= scale * log2 e):

| state | meaning | before the first key |
|---|---|---|
| shift | max(s) - BIAS | -inf |
| row_sum | sum(exp2(s - shift)) | 0 |
| O | sum(exp2(s - shift) * v) | 0 |
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.cdna4.mma_op import exp2_inplace_range
from openmla.kernels.gluon.scores import MINUS_INF, normalize, signed


@gluon.jit
def opaque_zero():
    """A zero the compiler cannot see through: indices made of it are not kept in registers."""
    return gl.inline_asm_elementwise(
        "s_mov_b32 $0, 0", "=s", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def signed_tiles(tiles, TILES: gl.constexpr, SIGN: gl.constexpr):
    """Scores as if the scale were positive."""
    done = ()
    for i in gl.static_range(TILES):
        done = done + (signed(tiles[i], SIGN),)  # noqa: RUF005
    return done


@gluon.jit
def softmax(tiles, shift, row_sum, factor, TILES: gl.constexpr, BIAS: gl.constexpr):
    """Weights, the new shift and row_sum, and by how much O rescales. A row that has seen no key
    yet is shifted by 0, not by -inf."""
    highest = tiles[0]
    for i in gl.static_range(1, TILES):
        highest = gl.maximum(highest, tiles[i])
    new_shift = gl.maximum(shift, gl.max(highest, 1) * factor - BIAS)
    safe = gl.where(new_shift == MINUS_INF, 0.0, new_shift)
    rescale = gl.exp2(shift - safe)
    weights = exp2_inplace_range(tiles, safe, factor, 0, TILES, TILES)
    sums = weights[0]
    for i in gl.static_range(1, TILES):
        sums = sums + weights[i]
    return weights, new_shift, row_sum * rescale + gl.sum(sums, 1), rescale


@gluon.jit
def row_place(row, places, strides):
    """Strides to a row of a tile. `places`: number of the tile's first row, and how many rows a
    token has; `strides`: of tokens, and of a token's rows."""
    first, per_token = places
    at = row + first
    return (at // per_token).to(gl.int64) * strides[0] + (at % per_token).to(gl.int64) * strides[1]


@gluon.jit
def finish(O, shift, row_sum, out, lse, sink_ptr, head, rows, places, PARTS: gl.constexpr):
    """Normalize, round and store the rows that exist: PARTS tiles of columns side by side.

    `out` is a pointer and strides in pieces of 16 bytes, `lse` a pointer or None and strides;
    `head` is that of the block, or one per row.
    """
    out_ptr, out_strides = out
    lse_ptr, lse_strides = lse
    OL: gl.constexpr = O[0].type.layout
    COLUMNS: gl.constexpr = O[0].shape[1]
    PIECE: gl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth
    inverse, row_lse, empty = normalize(shift, row_sum, sink_ptr, head)
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, OL))[:, None]
    nothing = gl.convert_layout(empty, gl.SliceLayout(1, OL))[:, None]
    row = gl.arange(0, O[0].shape[0], gl.SliceLayout(1, OL))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, OL))
    pointers = (out_ptr + row_place(row, places, out_strides) * PIECE)[:, None] + column[None, :]
    for d in gl.static_range(PARTS):
        values = gl.where(nothing, 0.0, O[d] * inverse).to(out_ptr.dtype.element_ty)
        gl.store(pointers + d * COLUMNS, values, mask=(row < rows)[:, None])
    if lse_ptr is not None:
        row = gl.arange(0, O[0].shape[0], shift.type.layout)
        gl.store(lse_ptr + row_place(row, places, lse_strides), row_lse, mask=row < rows)
