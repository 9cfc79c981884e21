# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""From the sums of a latent tile to rows of out, lse and max_logits.

Each warp-group stores its half of the columns; the right one also stores what is one per row. No
branches: the left one has a product of the next tile in flight meanwhile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.hopper.epilogue import VECTOR, wide
from openmla.kernels.scores import LN_2, normalize, opaque_zero


@gluon.jit
def rows_of(tile, heads, MASK: gl.constexpr, LAYOUT: gl.constexpr):
    """(token, head, whether it exists) of the 64 rows of a tile: heads of one token, or of several
    (MASK, see sparse.py)."""
    row = gl.arange(0, 64, LAYOUT) + (opaque_zero() + tile[1])
    if MASK == 0:
        return tile[0], row, row < heads
    else:
        return tile[0] + row // heads, row % heads, row < tile[2]


@gluon.jit
def write_half(O, inverse, empty, out, tile, heads, FIRST: gl.constexpr, MASK: gl.constexpr):
    """Normalize, round, and store with 16 bytes per thread: a change of layout inside each warp."""
    out_ptr, stride_t, stride_h = out
    OL: gl.constexpr = O.type.layout
    BL: gl.constexpr = gl.BlockedLayout([2, 8], [8, 4], [4, 1], [1, 0])
    RL: gl.constexpr = gl.SliceLayout(1, BL)
    scaled = O * gl.convert_layout(inverse, gl.SliceLayout(1, OL))[:, None]
    nothing = gl.convert_layout(empty, gl.SliceLayout(1, OL))[:, None]
    result = gl.where(nothing, 0.0, scaled).to(out_ptr.dtype.element_ty)
    result = gl.convert_layout(result, BL)
    token, head, ok = rows_of(tile, heads, MASK, RL)
    column = gl.arange(0, O.shape[1], gl.SliceLayout(0, BL)) + FIRST
    start = token * (wide(stride_t) * VECTOR) + head * (wide(stride_h) * VECTOR)
    gl.store((out_ptr + start)[:, None] + column[None, :], result, mask=ok[:, None])


@gluon.jit
def write_stat(values, stat, tile, heads, MASK: gl.constexpr):
    """One fp32 value per row."""
    ptr, stride_t, stride_h = stat
    RL: gl.constexpr = values.type.layout
    token, head, ok = rows_of(tile, heads, MASK, RL)
    gl.store(ptr + (token * wide(stride_t) + head * wide(stride_h)), values, mask=ok)


@gluon.jit
def finish(O, top, total, highest, tile, heads, results, RIGHT: gl.constexpr, MASK: gl.constexpr):
    """Write half a tile. `highest`: the largest score of each row, in log2 units."""
    out, lse_out, logits_out, sink_ptr = results
    HALF: gl.constexpr = O.shape[1]
    RL: gl.constexpr = top.type.layout
    _token, head, _ok = rows_of(tile, heads, MASK, RL)
    inverse, lse, empty = normalize(top, total, sink_ptr, gl.minimum(head, heads - 1))
    write_half(O, inverse, empty, out, tile, heads, HALF * RIGHT, MASK)
    if RIGHT:
        if lse_out[0] is not None:
            write_stat(lse, lse_out, tile, heads, MASK)
        if logits_out[0] is not None:
            write_stat(highest * LN_2, logits_out, tile, heads, MASK)
