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
    """A zero that the compiler cannot see through: indices made of it are computed where they are
    used, instead of being kept in registers."""
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
def largest(tiles, TILES: gl.constexpr):
    """The elementwise maximum of the tiles."""
    for i in gl.static_range(TILES):
        if i == 0:
            highest = tiles[i]
        else:
            highest = gl.maximum(highest, tiles[i])
    return highest


@gluon.jit
def total(tiles, TILES: gl.constexpr):
    """The elementwise sum of the tiles."""
    for i in gl.static_range(TILES):
        if i == 0:
            sums = tiles[i]
        else:
            sums = sums + tiles[i]
    return sums


@gluon.jit
def softmax(tiles, shift, row_sum, factor, TILES: gl.constexpr, BIAS: gl.constexpr):
    """Weights, the new shift and row_sum, and by how much O rescales. A row that has seen no key
    yet is shifted by 0, not by -inf."""
    new_shift = gl.maximum(shift, gl.max(largest(tiles, TILES), 1) * factor - BIAS)
    safe = gl.where(new_shift == MINUS_INF, 0.0, new_shift)
    rescale = gl.exp2(shift - safe)
    weights = exp2_inplace_range(tiles, safe, factor, 0, TILES, TILES)
    sums = total(weights, TILES)
    return weights, new_shift, row_sum * rescale + gl.sum(sums, 1), rescale


@gluon.jit
def row_place(row, places, rows):
    """Strides to a row of a tile (Places) of TokenRows `rows`."""
    at = row + places.first
    token = (at // places.per_token).to(gl.int64)
    return token * rows.token_stride + (at % places.per_token).to(gl.int64) * rows.row_stride


@gluon.jit
def finish(
    O,
    shift,
    row_sum,
    out,
    lse,
    sink_ptr,
    head,
    rows,
    places,
    COLUMNS: gl.constexpr,
    PARTS: gl.constexpr,
    MMA: gl.constexpr,
):
    """Normalize, round and store the rows that exist: PARTS tiles of COLUMNS columns side by side.

    out, lse: TokenRows, the strides of `lse` in elements. head: that of the block, or one per row.
    rows: how many exist. places: Places.
    """
    OL: gl.constexpr = MMA.output
    BM: gl.constexpr = shift.shape[0]
    PIECE: gl.constexpr = 128 // out.ptr.dtype.element_ty.primitive_bitwidth
    inverse, row_lse, empty = normalize(shift, row_sum, sink_ptr, head)
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, OL))[:, None]
    nothing = gl.convert_layout(empty, gl.SliceLayout(1, OL))[:, None]
    row = gl.arange(0, BM, gl.SliceLayout(1, OL))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, OL))
    pointers = (out.ptr + row_place(row, places, out) * PIECE)[:, None] + column[None, :]
    for d in gl.static_range(PARTS):
        values = gl.where(nothing, 0.0, O[d] * inverse).to(out.ptr.dtype.element_ty)
        gl.store(pointers + d * COLUMNS, values, mask=(row < rows)[:, None])
    if lse.ptr is not None:
        row = gl.arange(0, BM, shift.type.layout)
        gl.store(lse.ptr + row_place(row, places, lse), row_lse, mask=row < rows)


@gluon.jit
def write_sums(O, shift, row_sum, parts, first, rows, MMA: gl.constexpr):
    """Store rows of a range of keys that exist to `Parts`, as they are; `first`: that of the tile's
    first row."""
    OL: gl.constexpr = MMA.output
    row = gl.arange(0, O.shape[0], gl.SliceLayout(1, OL))
    column = gl.arange(0, O.shape[1], gl.SliceLayout(0, OL))
    # The workspace has fewer than 2^31 elements.
    here = parts.sums + ((row + first) * O.shape[1])[:, None] + column[None, :]
    gl.store(here, O, mask=(row < rows)[:, None])
    row = gl.arange(0, O.shape[0], shift.type.layout)
    state = parts.state + (row + first) * 2
    gl.store(state, shift, mask=row < rows)
    gl.store(state + 1, row_sum, mask=row < rows)
