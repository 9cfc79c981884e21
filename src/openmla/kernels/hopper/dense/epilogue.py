# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""From the sums of a finished tile to rows of out and lse, or to a split request's workspace."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.scores import normalize, opaque_zero
from openmla.kernels.hopper.accumulator import VECTOR, wide


@gluon.jit
def write_rows(O, inverse, empty, out, tile, WHO: gl.constexpr, whole):
    """Normalize, round, and store with 16 bytes per thread: a change of layout inside each warp.

    out: Output, tile: OutputTile.
    """
    OL: gl.constexpr = O.type.layout
    BL: gl.constexpr = gl.BlockedLayout([2, 8], [8, 4], [4, 1], [1, 0])
    scaled = O * gl.convert_layout(inverse, gl.SliceLayout(1, OL))[:, None]
    nothing = gl.convert_layout(empty, gl.SliceLayout(1, OL))[:, None]
    result = gl.where(nothing, 0.0, scaled).to(out.base.dtype.element_ty)
    result = gl.convert_layout(result, BL)
    row = gl.arange(0, 64, gl.SliceLayout(1, BL)) + (opaque_zero() + WHO * 64)
    column = gl.arange(0, O.shape[1], gl.SliceLayout(0, BL))
    step = wide(out.stride_t) * VECTOR
    first = out.base + (tile.token * step + tile.head * (wide(out.stride_h) * VECTOR))
    here = (first + row * step)[:, None] + column[None, :]
    gl.store(here, result, mask=((row < tile.rows) & whole)[:, None])


@gluon.jit
def write_lse(lse, out, tile, WHO: gl.constexpr, whole):
    """Store one value per row. out: Output, tile: OutputTile."""
    row = gl.arange(0, 64, lse.type.layout) + (opaque_zero() + WHO * 64)
    step = wide(out.stride_t)
    here = out.base + (tile.token * step + tile.head * wide(out.stride_h)) + row * step
    gl.store(here, lse, mask=(row < tile.rows) & whole)


@gluon.jit
def write_part(O, row_max, row_sum, results, tile, WHO: gl.constexpr, NC: gl.constexpr):
    """Store the bare sums of a range, its row_max and row_sum, for merge.py.

    results: Results, tile: OutputTile.
    """
    OL: gl.constexpr = O.type.layout
    D_V: gl.constexpr = O.shape[1]
    row = gl.arange(0, 64, gl.SliceLayout(1, OL)) + opaque_zero()
    column = gl.arange(0, D_V, gl.SliceLayout(0, OL))
    number = tile.slot.to(gl.int64) * NC + WHO
    here = (results.part_sums + number * (64 * D_V)) + (row[:, None] * D_V + column[None, :])
    gl.store(here, O, mask=((row + WHO * 64 < tile.rows) & (tile.slot >= 0))[:, None])
    row1 = gl.arange(0, 64, row_max.type.layout) + opaque_zero()
    ok = (row1 + WHO * 64 < tile.rows) & (tile.slot >= 0)
    gl.store(results.part_state + number * 128 + row1, row_max, mask=ok)
    gl.store(results.part_state + number * 128 + 64 + row1, row_sum, mask=ok)


@gluon.jit
def finish(
    O, row_max, quads, tile, results, WHO: gl.constexpr, NC: gl.constexpr, SPLIT: gl.constexpr
):
    """Write an OutputTile to the Results; quads: row sums, one per thread of a quad.

    No branches: a product of the next tile is in flight meanwhile.
    """
    row_sum = gl.convert_layout(gl.sum(quads, 1), row_max.type.layout)
    inverse, lse, empty = normalize(row_max, row_sum, results.sink, tile.head)
    whole = True
    if SPLIT > 0:
        write_part(O, row_max, row_sum, results, tile, WHO, NC)
        whole = tile.slot < 0
    write_rows(O, inverse, empty, results.out, tile, WHO, whole)
    if results.lse.base is not None:
        write_lse(lse, results.lse, tile, WHO, whole)
