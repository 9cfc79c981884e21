# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""From the transposed sums of a tile to rows of out."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.scores import opaque_zero
from openmla.kernels.hopper.accumulator import VECTOR, wide
from openmla.kernels.hopper.latent.records import LISTED

HEADS = gl.constexpr(8)  # that are stored together


@gluon.constexpr_function
def rows_layout():
    """Layout of [8 heads, 256 columns] in which the sums lie: 2 neighboring columns per thread."""
    return gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [0, 64], [0, 128]],
        [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]],
        [[0, 16], [0, 32]],
        [],
        [8, 256],
    )


@gluon.jit
def rows_left(place, heads, ROW: gl.constexpr, MASK: gl.constexpr):
    """How many rows there are from row ROW of a tile on, or fewer than 1. place: see place_of of
    latent/epilogue.py."""
    last = heads - place.first_head if MASK == LISTED else place.end - place.begin
    return last - ROW


@gluon.jit
def some_rows(place, heads, out, ROW: gl.constexpr, MASK: gl.constexpr, LAYOUT: gl.constexpr):
    """(where the first of HEADS rows begins in an `Output`, and how far from it each, whether it
    exists), from row ROW of a tile on. The first is one number for all threads, which takes none of
    their registers."""
    row = gl.arange(0, HEADS, LAYOUT)
    t, h = wide(out.token_stride) * VECTOR, wide(out.head_stride) * VECTOR
    if MASK == LISTED:
        head = place.first_head + (opaque_zero() + ROW)
        return out.base + (place.token * t + head * h), row * h, row < heads - head
    else:
        row += place.begin + (opaque_zero() + ROW)
        return out.base, row // heads * t + row % heads * h, row < place.end


@gluon.jit
def halves(x):
    """The left and the right half of the columns."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def write_heads(
    O, inverse, out, place, heads, ROW: gl.constexpr, FIRST: gl.constexpr, MASK: gl.constexpr
):
    """Store rows ROW … of a tile to an `Output`; values.py says which column a row of O^T is.

    Zeros where `inverse` is 0, whatever the sums hold. Rows of heads that do not exist are skipped,
    not masked alone: ptxas then does not compute the addresses of all rows at once.
    """
    o0, o1, o2, o3 = O
    if o0.shape[1] > HEADS:
        HALF: gl.constexpr = o0.shape[1] // 2
        low0, high0 = halves(o0)
        low1, high1 = halves(o1)
        low2, high2 = halves(o2)
        low3, high3 = halves(o3)
        low, high = (low0, low1, low2, low3), (high0, high1, high2, high3)
        write_heads(low, inverse, out, place, heads, ROW, FIRST, MASK)
        write_heads(high, inverse, out, place, heads, ROW + HALF, FIRST, MASK)
    elif rows_left(place, heads, ROW, MASK) > 0:
        L: gl.constexpr = rows_layout()
        four = gl.join(gl.join(o0, o1), gl.join(o2, o3))
        four = gl.reshape(four, [4, 2, 8, HEADS, 2, 2])  # w, h, g, head, i % 2, i // 2
        sums = gl.convert_layout(gl.reshape(gl.permute(four, (3, 5, 4, 0, 2, 1)), [HEADS, 256]), L)
        factors = inverse.slice(ROW, HEADS).load(gl.SliceLayout(1, L))[:, None]
        result = gl.where(factors == 0.0, 0.0, sums * factors).to(out.base.dtype.element_ty)
        first, start, ok = some_rows(place, heads, out, ROW, MASK, gl.SliceLayout(1, L))
        column = gl.arange(0, 256, gl.SliceLayout(0, L))
        gl.store(first + FIRST + start[:, None] + column[None, :], result, mask=ok[:, None])
