# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""From the transposed sums of a tile to rows of out."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.scores import opaque_zero
from openmla.kernels.hopper.dense.epilogue import VECTOR, wide

HEADS = gl.constexpr(8)  # that are stored together


@gluon.constexpr_function
def rows_layout():
    """[8 heads, 256 columns] as the sums lie: 2 neighboring columns per thread."""
    return gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [0, 64], [0, 128]],
        [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]],
        [[0, 16], [0, 32]], [], [8, 256],
    )  # fmt: skip


@gluon.jit
def rows_left(place, heads, ROW: gl.constexpr, MASK: gl.constexpr):
    """How many rows there are from row ROW of a tile on, or fewer than 1."""
    last = heads - place[1] if MASK == 0 else place[1] - place[0]
    return last - ROW


@gluon.jit
def some_rows(place, heads, out, ROW: gl.constexpr, MASK: gl.constexpr, LAYOUT: gl.constexpr):
    """(where the first of HEADS rows begins in out, and how far from it each, whether it exists),
    from row ROW of a tile on. One number for all threads takes none of their registers."""
    out_ptr, stride_t, stride_h = out
    row = gl.arange(0, HEADS, LAYOUT)
    t, h = wide(stride_t) * VECTOR, wide(stride_h) * VECTOR
    if MASK == 0:
        head = place[1] + (opaque_zero() + ROW)
        return out_ptr + (place[0] * t + head * h), row * h, row < heads - head
    else:
        row += place[0] + (opaque_zero() + ROW)
        return out_ptr, row // heads * t + row % heads * h, row < place[1]


@gluon.jit
def halves(x):
    """The left and the right half of the columns."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def write_heads(O, inverse, out, place, heads, ROW: gl.constexpr, FIRST: gl.constexpr,
                MASK: gl.constexpr):  # fmt: skip
    """Rows ROW … of a tile; values.py says which column a row of O^T is.

    Zeros where `inverse` is 0, whatever the sums hold. Heads that nobody has are passed over; where
    the others' addresses are computed, ptxas then does not compute all at once.
    """
    if O[0].shape[1] > HEADS:
        HALF: gl.constexpr = O[0].shape[1] // 2
        low0, high0 = halves(O[0])
        low1, high1 = halves(O[1])
        low2, high2 = halves(O[2])
        low3, high3 = halves(O[3])
        low, high = (low0, low1, low2, low3), (high0, high1, high2, high3)
        write_heads(low, inverse, out, place, heads, ROW, FIRST, MASK)
        write_heads(high, inverse, out, place, heads, ROW + HALF, FIRST, MASK)
    elif rows_left(place, heads, ROW, MASK) > 0:
        L: gl.constexpr = rows_layout()
        four = gl.join(gl.join(O[0], O[1]), gl.join(O[2], O[3]))
        four = gl.reshape(four, [4, 2, 8, HEADS, 2, 2])  # w, h, g, head, i % 2, i // 2
        sums = gl.convert_layout(gl.reshape(gl.permute(four, (3, 5, 4, 0, 2, 1)), [HEADS, 256]), L)
        factors = inverse.slice(ROW, HEADS).load(gl.SliceLayout(1, L))[:, None]
        result = gl.where(factors == 0.0, 0.0, sums * factors).to(out[0].dtype.element_ty)
        first, start, ok = some_rows(place, heads, out, ROW, MASK, gl.SliceLayout(1, L))
        column = gl.arange(0, 256, gl.SliceLayout(0, L))
        gl.store(first + FIRST + start[:, None] + column[None, :], result, mask=ok[:, None])
