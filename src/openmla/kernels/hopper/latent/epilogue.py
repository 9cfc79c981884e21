# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""From the sums of a latent tile to rows of out, lse and max_logits, or of the workspace.

Each warp-group stores its half of the columns; the right one also stores what is one per row, and
turns back the last columns where results are turned back: a thread has both columns of a pair. The
rows of a range that is not all of its request's keys go to the workspace as they are, for merge.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.scores import LN_2, normalize, opaque_zero
from openmla.kernels.gluon.turning import cos_sin, turned
from openmla.kernels.hopper.accumulator import VECTOR, wide
from openmla.kernels.hopper.latent.records import LISTED, HeadsOfToken, RowRange

PART = gl.constexpr(64)  # columns that are exchanged and stored together


@gluon.jit
def place_of(tile, heads, MASK: gl.constexpr, SPLIT: gl.constexpr):
    """Where the rows of a tile are written: `HeadsOfToken` for a `ListedTile`, else a `RowRange`.

    A place is two numbers, few enough to be kept while the next tile is worked on.
    """
    if MASK == LISTED:
        return HeadsOfToken(token=tile.token, first_head=tile.first_head)
    elif SPLIT:
        slot = tile.slot
        parted = slot >= 0
        begin = gl.where(parted, -2 - slot, tile.first_token * heads + tile.first_row)
        part_end = slot + tile.rows - tile.first_row
        return RowRange(
            begin=begin, end=gl.where(parted, part_end, tile.first_token * heads + tile.rows)
        )
    else:
        return RowRange(
            begin=tile.first_token * heads + tile.first_row,
            end=tile.first_token * heads + tile.rows,
        )


@gluon.jit
def nowhere(tile, MASK: gl.constexpr):
    """The place before the first tile. Its values are computed from the tile: Triton's loops do not
    carry a variable that begins as the very value that the body assigns to it."""
    if MASK == LISTED:
        return HeadsOfToken(token=tile.token * 0 - 1, first_head=tile.first_head * 0)
    else:
        return RowRange(begin=tile.first_token * 0 - 1, end=tile.first_row * 0)


@gluon.jit
def is_somewhere(place, MASK: gl.constexpr):
    """Whether a place is one of a tile, and not the one before the first."""
    if MASK == LISTED:
        return place.token != -1
    else:
        return place.begin != -1


@gluon.jit
def rows_of(place, heads, MASK: gl.constexpr, LAYOUT: gl.constexpr):
    """(token, head, whether it exists) of the 64 rows of a tile, by its place."""
    if MASK == LISTED:
        head = gl.arange(0, 64, LAYOUT) + (opaque_zero() + place.first_head)
        return place.token, head, head < heads
    else:
        row = gl.arange(0, 64, LAYOUT) + (opaque_zero() + place.begin)
        return row // heads, row % heads, row < place.end


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
    """Store columns FIRST … of rows that begin at `start`, 64 at a time: the first stores are on
    their way while the other columns are still being exchanged."""
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
    """Normalize, round, and store columns FIRST … of a tile to an `Output`, 16 bytes per thread;
    zeros where `inverse` is 0, whatever O holds."""
    OL: gl.constexpr = O.type.layout
    RL: gl.constexpr = gl.SliceLayout(1, quad_layout(PART))
    factors = gl.convert_layout(inverse, gl.SliceLayout(1, OL))[:, None]
    result = gl.where(factors == 0.0, 0.0, O * factors).to(out.base.dtype.element_ty)
    token, head, ok = rows_of(place, heads, MASK, RL)
    start = token * (wide(out.token_stride) * VECTOR) + head * (wide(out.head_stride) * VECTOR)
    write_part(result, out.base + start, ok, FIRST)


@gluon.constexpr_function
def pair_layout(columns):
    """[64, columns / 2]: the even or the odd columns of 64 rows of a wgmma accumulator."""
    registers = [[0, 4 << i] for i in range((columns // 8).bit_length() - 1)]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        [*registers, [8, 0]], lanes, [[16, 0], [32, 0]], [], [64, columns // 2]
    )


@gluon.jit
def write_turned(part, inverse, cos, sin, out, start, ok, FIRST: gl.constexpr, STILL: gl.constexpr):
    """`write_part` of sums that are still to be divided, turned from column STILL on, and rounded;
    cos, sin: of the pairs of PART columns."""
    if part.shape[1] > PART:
        HALF: gl.constexpr = part.shape[1] // 2
        low, high = gl.split(gl.permute(gl.reshape(part, [64, 2, HALF]), (0, 2, 1)))
        write_turned(low, inverse, cos, sin, out, start, ok, FIRST, STILL)
        write_turned(high, inverse, cos, sin, out, start, ok, FIRST + HALF, STILL)
    else:
        factors = gl.convert_layout(inverse, gl.SliceLayout(1, part.type.layout))[:, None]
        result = part * factors
        if FIRST >= STILL:
            PL: gl.constexpr = pair_layout(PART)
            a, b = gl.split(gl.reshape(result, [64, PART // 2, 2]))
            a, b = turned(
                gl.convert_layout(a, PL), gl.convert_layout(b, PL), cos[None, :], sin[None, :]
            )
            pairs = gl.reshape(gl.join(a, b), [64, PART])
            result = gl.convert_layout(pairs, result.type.layout)
        result = gl.where(factors == 0.0, 0.0, result).to(out.base.dtype.element_ty)
        write_part(result, out.base + start, ok, FIRST)


@gluon.jit
def write_half_turned(O, inverse, results, place, heads, FIRST: gl.constexpr, HOW: gl.constexpr):
    """`write_half` of the last columns, of which the last PART are turned back: all rows are of one
    token. Its angles are on their way while other columns are stored."""
    RL: gl.constexpr = gl.SliceLayout(1, quad_layout(PART))
    out = results.out
    token, head, ok = rows_of(place, heads, HOW.mask, RL)
    pair = gl.arange(0, PART // 2, gl.SliceLayout(0, pair_layout(PART)))
    cos, sin = cos_sin(results.angles, token, pair, HOW.turned)
    start = token * (wide(out.token_stride) * VECTOR) + head * (wide(out.head_stride) * VECTOR)
    STILL: gl.constexpr = FIRST + O.shape[1] - PART
    write_turned(O, inverse, cos, sin, out, start, ok, FIRST, STILL)


@gluon.jit
def write_sums(O, parts, place, FIRST: gl.constexpr):
    """Store columns FIRST … of a range of keys to the workspace (`Parts`), unnormalized."""
    OL: gl.constexpr = O.type.layout
    row = gl.arange(0, 64, gl.SliceLayout(1, OL)) + (opaque_zero() - 2 - place.begin)
    column = gl.arange(0, O.shape[1], gl.SliceLayout(0, OL)) + FIRST
    start = parts.sums + row.to(gl.int64) * (2 * O.shape[1])
    here = (row < place.end)[:, None]
    gl.store(start[:, None] + column[None, :], O, mask=here, eviction_policy="evict_last")


@gluon.jit
def write_state(row_max, row_sum, parts, place):
    """Store the reference of each row of a range, and the sum of its weights, to `Parts`."""
    row = gl.arange(0, 64, row_max.type.layout) + (opaque_zero() - 2 - place.begin)
    start = parts.state + row.to(gl.int64) * 2
    gl.store(start, row_max, mask=row < place.end)
    gl.store(start + 1, row_sum, mask=row < place.end)


@gluon.jit
def write_left(O, inverse, results, place, heads, HOW: gl.constexpr):
    """Write the left half of a tile, to `Results`."""
    if HOW.is_split:
        if place.begin < 0:
            write_sums(O, results.parts, place, 0)
        else:
            write_half(O, inverse, results.out, place, heads, 0, HOW.mask)
    else:
        write_half(O, inverse, results.out, place, heads, 0, HOW.mask)


@gluon.jit
def write_stat(stat, output, place, heads, MASK: gl.constexpr):
    """Store one fp32 value per row to an `Output`."""
    RL: gl.constexpr = stat.type.layout
    token, head, ok = rows_of(place, heads, MASK, RL)
    start = token * wide(output.token_stride) + head * wide(output.head_stride)
    gl.store(output.base + start, stat, mask=ok)


@gluon.jit
def divisors(row_max, row_sum, place, heads, sink_ptr, MASK: gl.constexpr, SPLIT: gl.constexpr):
    """(1 / denominator, or 0 where no key was seen; lse) of a tile's rows."""
    RL: gl.constexpr = row_max.type.layout
    _token, head, _ok = rows_of(place, heads, MASK, RL)
    head = gl.where(head < heads, head, 0)
    if SPLIT:
        head = gl.maximum(head, 0)  # a range has no head here, and its divisors are not used
    inverse, lse, empty = normalize(row_max, row_sum, sink_ptr, head)
    return gl.where(empty, 0.0, inverse), lse


@gluon.jit
def write_right(O, row_max, row_sum, highest, place, heads, results, HOW: gl.constexpr):
    """Write the right half of a tile that sees all keys, and what is one per row, to `Results`."""
    inverse, lse = divisors(row_max, row_sum, place, heads, results.sink, HOW.mask, HOW.is_split)
    if HOW.turned > 0:
        write_half_turned(O, inverse, results, place, heads, O.shape[1], HOW)
    else:
        write_half(O, inverse, results.out, place, heads, O.shape[1], HOW.mask)
    if results.lse.base is not None:
        write_stat(lse, results.lse, place, heads, HOW.mask)
    if results.max_logits.base is not None:
        write_stat(highest * LN_2, results.max_logits, place, heads, HOW.mask)


@gluon.jit
def finish_right(O, row_max, row_sum, highest, place, heads, results, HOW: gl.constexpr):
    """Write the right half of a tile, and what is one per row, to `Results`. `highest`: the largest
    score of each row, in log2 units."""
    if HOW.is_split:
        if place.begin < 0:
            write_sums(O, results.parts, place, O.shape[1])
            write_state(row_max, row_sum, results.parts, place)
        else:
            write_right(O, row_max, row_sum, highest, place, heads, results, HOW)
    else:
        write_right(O, row_max, row_sum, highest, place, heads, results, HOW)
