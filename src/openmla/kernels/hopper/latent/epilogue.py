# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""From the sums of a latent tile to rows of out, lse and max_logits, or of the workspace.

Each warp-group stores its half of the columns; the right one also stores what is one per row. The
rows of a range that is not all of its request's keys go to the workspace as they are, for merge.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.scores import LN_2, normalize, opaque_zero
from openmla.kernels.hopper.dense.epilogue import VECTOR, wide

PART = gl.constexpr(64)  # columns that are exchanged and stored together


@gluon.jit
def place_of(tile, heads, MASK: gl.constexpr, SPLIT: gl.constexpr):
    """Where the rows of a tile belong, in two numbers that are kept when the next tile has begun.

    MASK 0 (see kernel.py): the token and its first head. Else rows are heads of several tokens: the
    first row and the first that is not there, counted from the first head of the first token; or of
    a range, -2 - the first row in the workspace and the first that is not there.
    """
    if MASK == 0:
        return tile[0], tile[1]
    elif SPLIT:
        slot = tile[6]
        parted = slot >= 0
        first = gl.where(parted, -2 - slot, tile[0] * heads + tile[1])
        return first, gl.where(parted, slot + tile[2] - tile[1], tile[0] * heads + tile[2])
    else:
        return tile[0] * heads + tile[1], tile[0] * heads + tile[2]


@gluon.jit
def nowhere(tile):
    """The place before the first tile: token -1. Its values must be its own: what begins a loop as
    the same value that the body assigns to it is not carried by Triton's loops."""
    return tile[0] * 0 - 1, tile[1] * 0


@gluon.jit
def rows_of(place, heads, MASK: gl.constexpr, LAYOUT: gl.constexpr):
    """(token, head, whether it exists) of the 64 rows of a tile."""
    if MASK == 0:
        head = gl.arange(0, 64, LAYOUT) + (opaque_zero() + place[1])
        return place[0], head, head < heads
    else:
        row = gl.arange(0, 64, LAYOUT) + (opaque_zero() + place[0])
        return row // heads, row % heads, row < place[1]


@gluon.constexpr_function
def quad_layout(columns):
    """[64, columns] with the rows of a wgmma accumulator and 8 neighboring columns per thread: only
    the four threads that share a row exchange values."""
    registers = [[0, 1], [0, 2], [0, 4]]
    registers += [[0, 32 << i] for i in range((columns // 32).bit_length() - 1)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        [*registers, [8, 0]], lanes, [[16, 0], [32, 0]], [], [64, columns]
    )


@gluon.jit
def write_part(part, start, ok, FIRST: gl.constexpr):
    """Columns FIRST … of rows that begin at `start`, 64 at a time: the first stores are on their
    way while the other columns are still being exchanged."""
    if part.shape[1] > PART:
        HALF: gl.constexpr = part.shape[1] // 2
        low, high = gl.split(gl.permute(gl.reshape(part, [64, 2, HALF]), (0, 2, 1)))
        write_part(low, start, ok, FIRST)
        write_part(high, start, ok, FIRST + HALF)
    else:
        LAYOUT: gl.constexpr = quad_layout(part.shape[1])
        column = gl.arange(0, part.shape[1], gl.SliceLayout(0, LAYOUT)) + FIRST
        part = gl.convert_layout(part, LAYOUT)
        gl.store(start[:, None] + column[None, :], part, mask=ok[:, None])


@gluon.jit
def write_half(O, inverse, out, place, heads, FIRST: gl.constexpr, MASK: gl.constexpr):
    """Normalize, round, and store with 16 bytes per thread; zeros where `inverse` is 0, whatever O
    holds."""
    out_ptr, stride_t, stride_h = out
    OL: gl.constexpr = O.type.layout
    RL: gl.constexpr = gl.SliceLayout(1, quad_layout(PART))
    factors = gl.convert_layout(inverse, gl.SliceLayout(1, OL))[:, None]
    result = gl.where(factors == 0.0, 0.0, O * factors).to(out_ptr.dtype.element_ty)
    token, head, ok = rows_of(place, heads, MASK, RL)
    start = token * (wide(stride_t) * VECTOR) + head * (wide(stride_h) * VECTOR)
    write_part(result, out_ptr + start, ok, FIRST)


@gluon.jit
def write_sums(O, parts, place, FIRST: gl.constexpr):
    """Columns FIRST … of a range, as they are."""
    OL: gl.constexpr = O.type.layout
    row = gl.arange(0, 64, gl.SliceLayout(1, OL)) + (opaque_zero() - 2 - place[0])
    column = gl.arange(0, O.shape[1], gl.SliceLayout(0, OL)) + FIRST
    start = parts[0] + row.to(gl.int64) * (2 * O.shape[1])
    gl.store(start[:, None] + column[None, :], O, mask=(row < place[1])[:, None])


@gluon.jit
def write_state(row_max, row_sum, parts, place):
    """The reference of each row of a range, and the sum of its weights."""
    row = gl.arange(0, 64, row_max.type.layout) + (opaque_zero() - 2 - place[0])
    start = parts[1] + row.to(gl.int64) * 2
    gl.store(start, row_max, mask=row < place[1])
    gl.store(start + 1, row_sum, mask=row < place[1])


@gluon.jit
def write_left(O, inverse, results, place, heads, HOW: gl.constexpr):
    """The left half of a tile."""
    out, parts = results[0], results[4]
    if HOW[5]:
        if place[0] < 0:
            write_sums(O, parts, place, 0)
        else:
            write_half(O, inverse, out, place, heads, 0, HOW[3])
    else:
        write_half(O, inverse, out, place, heads, 0, HOW[3])


@gluon.jit
def write_stat(values, stat, place, heads, MASK: gl.constexpr):
    """One fp32 value per row."""
    ptr, stride_t, stride_h = stat
    RL: gl.constexpr = values.type.layout
    token, head, ok = rows_of(place, heads, MASK, RL)
    gl.store(ptr + (token * wide(stride_t) + head * wide(stride_h)), values, mask=ok)


@gluon.jit
def divisors(row_max, row_sum, place, heads, sink_ptr, HOW: gl.constexpr):
    """(1 / denominator, or 0 where no key was seen; lse) of a tile's rows."""
    RL: gl.constexpr = row_max.type.layout
    _token, head, _ok = rows_of(place, heads, HOW[3], RL)
    head = gl.minimum(head, heads - 1)
    if HOW[5]:
        head = gl.maximum(head, 0)  # of a range: nobody asks
    inverse, lse, empty = normalize(row_max, row_sum, sink_ptr, head)
    return gl.where(empty, 0.0, inverse), lse


@gluon.jit
def write_right(O, row_max, row_sum, highest, place, heads, results, HOW: gl.constexpr):
    """The right half of a tile that sees all keys, and what is one per row."""
    out, lse_out, logits_out, sink_ptr, _parts = results
    MASK: gl.constexpr = HOW[3]
    inverse, lse = divisors(row_max, row_sum, place, heads, sink_ptr, HOW)
    write_half(O, inverse, out, place, heads, O.shape[1], MASK)
    if lse_out[0] is not None:
        write_stat(lse, lse_out, place, heads, MASK)
    if logits_out[0] is not None:
        write_stat(highest * LN_2, logits_out, place, heads, MASK)


@gluon.jit
def finish_right(O, row_max, row_sum, highest, place, heads, results, HOW: gl.constexpr):
    """Write the right half of a tile, and what is one per row. `highest`: the largest score of each
    row, in log2 units."""
    if HOW[5]:
        if place[0] < 0:
            write_sums(O, results[4], place, O.shape[1])
            write_state(row_max, row_sum, results[4], place)
        else:
            write_right(O, row_max, row_sum, highest, place, heads, results, HOW)
    else:
        write_right(O, row_max, row_sum, highest, place, heads, results, HOW)
