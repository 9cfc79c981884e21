# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""From the sums of a finished tile to rows of out and lse, or to a split request's workspace."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.scores import normalize, opaque_zero

# Out's head and token strides come in units of 8 elements: the compiler then knows that rows begin
# at multiples of 16 bytes, whatever the strides are.
VECTOR = gl.constexpr(8)


@gluon.jit
def wide(stride):
    """A stride as int64, made where it is used: kept over the key loop it would be spilled."""
    return (stride + opaque_zero()).to(gl.int64)


@gluon.jit
def write_rows(O, inverse, empty, out, token, head, rows, WHO: gl.constexpr, whole):
    """Normalize, round, and store with 16 bytes per thread: a change of layout inside each warp."""
    out_ptr, stride_t, stride_h = out
    OL: gl.constexpr = O.type.layout
    BL: gl.constexpr = gl.BlockedLayout([2, 8], [8, 4], [4, 1], [1, 0])
    scaled = O * gl.convert_layout(inverse, gl.SliceLayout(1, OL))[:, None]
    nothing = gl.convert_layout(empty, gl.SliceLayout(1, OL))[:, None]
    result = gl.where(nothing, 0.0, scaled).to(out_ptr.dtype.element_ty)
    result = gl.convert_layout(result, BL)
    row = gl.arange(0, 64, gl.SliceLayout(1, BL)) + (opaque_zero() + WHO * 64)
    column = gl.arange(0, O.shape[1], gl.SliceLayout(0, BL))
    step = wide(stride_t) * VECTOR
    first = out_ptr + (token * step + head * (wide(stride_h) * VECTOR))
    here = (first + row * step)[:, None] + column[None, :]
    gl.store(here, result, mask=((row < rows) & whole)[:, None])


@gluon.jit
def write_lse(lse, lse_out, token, head, rows, WHO: gl.constexpr, whole):
    """One value per row."""
    lse_ptr, stride_t, stride_h = lse_out
    row = gl.arange(0, 64, lse.type.layout) + (opaque_zero() + WHO * 64)
    step = wide(stride_t)
    here = lse_ptr + (token * step + head * wide(stride_h)) + row * step
    gl.store(here, lse, mask=(row < rows) & whole)


@gluon.jit
def write_part(O, row_max, row_sum, parts, slot, rows, WHO: gl.constexpr, NC: gl.constexpr):
    """The bare sums of a range, for merge.py: [slot, 64, d_v], and row_max and row_sum [slot, 2,
    64].
    """
    sums_ptr, state_ptr = parts
    OL: gl.constexpr = O.type.layout
    D_V: gl.constexpr = O.shape[1]
    row = gl.arange(0, 64, gl.SliceLayout(1, OL)) + opaque_zero()
    column = gl.arange(0, D_V, gl.SliceLayout(0, OL))
    number = slot.to(gl.int64) * NC + WHO
    here = (sums_ptr + number * (64 * D_V)) + (row[:, None] * D_V + column[None, :])
    gl.store(here, O, mask=((row + WHO * 64 < rows) & (slot >= 0))[:, None])
    row1 = gl.arange(0, 64, row_max.type.layout) + opaque_zero()
    ok = (row1 + WHO * 64 < rows) & (slot >= 0)
    gl.store(state_ptr + number * 128 + row1, row_max, mask=ok)
    gl.store(state_ptr + number * 128 + 64 + row1, row_sum, mask=ok)


@gluon.jit
def finish(
    O, row_max, quads, work, results, WHO: gl.constexpr, NC: gl.constexpr, SPLIT: gl.constexpr
):
    """Write a tile. No branches: a product of the next tile is in flight meanwhile."""
    head, token, rows, slot = work
    out, lse_out, sink_ptr, parts = results
    row_sum = gl.convert_layout(gl.sum(quads, 1), row_max.type.layout)
    inverse, lse, empty = normalize(row_max, row_sum, sink_ptr, head)
    whole = True
    if SPLIT > 0:
        write_part(O, row_max, row_sum, parts, slot, rows, WHO, NC)
        whole = slot < 0
    write_rows(O, inverse, empty, out, token, head, rows, WHO, whole)
    if lse_out[0] is not None:
        write_lse(lse, lse_out, token, head, rows, WHO, whole)
