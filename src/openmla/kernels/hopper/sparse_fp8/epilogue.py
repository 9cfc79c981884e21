# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""From the transposed sums of a tile to rows of out."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.scores import opaque_zero
from openmla.kernels.hopper.dense.epilogue import VECTOR, wide

HEADS = gl.constexpr(16)  # that are stored together: of more, addresses would be spilled


@gluon.constexpr_function
def panel_layout():
    """[16 heads, 128 columns] as the sums lie: 2 neighboring columns per thread."""
    return gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [8, 0], [0, 64]],
        [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]],
        [[0, 16], [0, 32]], [], [16, 128],
    )  # fmt: skip


@gluon.jit
def some_rows(place, heads, ROW: gl.constexpr, MASK: gl.constexpr, LAYOUT: gl.constexpr):
    """(token, head, whether it exists) of HEADS rows of a tile, from row ROW on."""
    row = gl.arange(0, HEADS, LAYOUT) + (opaque_zero() + ROW)
    if MASK == 0:
        head = row + place[1]
        return place[0], head, head < heads
    else:
        row += place[0]
        return row // heads, row % heads, row < place[1]


@gluon.jit
def halves(x):
    """The left and the right half of the columns."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def write_panel(low, high, inverse, out, place, heads, ROW: gl.constexpr, FIRST: gl.constexpr,
                MASK: gl.constexpr):  # fmt: skip
    """Columns FIRST … FIRST + 127 of rows ROW …; values.py says which row of a tile is which.

    Zeros where `inverse` is 0, whatever the sums hold.
    """
    if low.shape[1] > HEADS:
        HALF: gl.constexpr = low.shape[1] // 2
        low0, low1 = halves(low)
        high0, high1 = halves(high)
        write_panel(low0, high0, inverse, out, place, heads, ROW, FIRST, MASK)
        write_panel(low1, high1, inverse, out, place, heads, ROW + HALF, FIRST, MASK)
    else:
        out_ptr, stride_t, stride_h = out
        L: gl.constexpr = panel_layout()
        both = gl.reshape(gl.join(low, high), [4, 2, 8, HEADS, 2])  # w, h, g, head, i
        sums = gl.convert_layout(gl.reshape(gl.permute(both, (3, 4, 0, 2, 1)), [HEADS, 128]), L)
        factors = inverse.slice(ROW, HEADS).load(gl.SliceLayout(1, L))[:, None]
        result = gl.where(factors == 0.0, 0.0, sums * factors).to(out_ptr.dtype.element_ty)
        token, head, ok = some_rows(place, heads, ROW, MASK, gl.SliceLayout(1, L))
        start = token * (wide(stride_t) * VECTOR) + head * (wide(stride_h) * VECTOR)
        column = gl.arange(0, 128, gl.SliceLayout(0, L)) + FIRST
        gl.store(out_ptr + start[:, None] + column[None, :], result, mask=ok[:, None])


@gluon.jit
def write_half(O, inverse, out, place, heads, FIRST: gl.constexpr, MASK: gl.constexpr):
    """Half of the columns, from column FIRST on; inverse: 64 factors in shared memory."""
    write_panel(O[0], O[1], inverse, out, place, heads, 0, FIRST, MASK)
    write_panel(O[2], O[3], inverse, out, place, heads, 0, FIRST + 128, MASK)
