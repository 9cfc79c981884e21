"""Results that are turned back: the last columns of a tile, before it is rounded.

Pairs of neighbors (a, b) of a row become a cos + b sin and b cos - a sin, in two products each, of
which the second is fused with the sum: so all kernels, whatever their tiles, give the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

COUNTS = ["angle_lines", "angles_stride"]
VECTORS = ["angles_ptr", "positions_ptr"]
SOURCES = {"angles_ptr": "turn_table", "positions_ptr": "turn_positions"}


class Angles(NamedTuple):
    """The angles by which results are turned back."""

    table: Any
    """A line of cosines, then sines, for each position; None: nothing is turned."""
    positions: Any
    """The line of the table that each token turns by."""
    lines: Any
    stride: Any
    """Elements from a line to the next."""


@gluon.jit
def cos_sin(angles, token, pair, TURNED: gl.constexpr):
    """Cosines and sines of some pairs of a token, by the numbers of the pairs: 1 and 0 for others,
    and where the table does not have the token's position."""
    position = gl.load(angles.positions + token)
    there = (position >= 0) & (position < angles.lines)
    line = angles.table + gl.where(there, position, 0).to(gl.int64) * angles.stride
    turns = there & (pair >= 0) & (pair < TURNED // 2)
    cos = gl.load(line + pair, mask=turns, other=1.0)
    sin = gl.load(line + (TURNED // 2) + pair, mask=turns, other=0.0)
    return cos, sin


@gluon.jit
def turned(a, b, cos, sin):
    """Pairs of columns [rows, pairs] turned back by an angle for each pair."""
    return gl.fma(a, cos, b * sin), gl.fma(b, cos, -(a * sin))


@gluon.jit
def turned_columns(rows, angles, token, first, D_V: gl.constexpr, TURNED: gl.constexpr):
    """Columns `first` … of results of a token, the last TURNED of D_V columns turned back."""
    ROWS: gl.constexpr = rows.shape[0]
    WIDTH: gl.constexpr = rows.shape[1]
    a, b = gl.split(gl.reshape(rows, [ROWS, WIDTH // 2, 2]))
    PL: gl.constexpr = gl.SliceLayout(0, a.type.layout)
    pair = gl.arange(0, WIDTH // 2, PL) + (first - (D_V - TURNED)) // 2
    cos, sin = cos_sin(angles, token, pair, TURNED)
    turned_a, turned_b = turned(a, b, cos[None, :], sin[None, :])
    turns = (pair >= 0)[None, :]
    both = gl.join(gl.where(turns, turned_a, a), gl.where(turns, turned_b, b))
    return gl.convert_layout(gl.reshape(both, [ROWS, WIDTH]), rows.type.layout)


@gluon.jit
def turned_last(
    rows,
    angles,
    token,
    FIRST: gl.constexpr,
    LEAST: gl.constexpr,
    D_V: gl.constexpr,
    TURNED: gl.constexpr,
):
    """`turned_columns` from column FIRST on, and only of those parts of LEAST columns that have
    some that turn. A part's columns are registers of a thread, or the split costs an exchange."""
    ROWS: gl.constexpr = rows.shape[0]
    HALF: gl.constexpr = rows.shape[1] // 2
    if FIRST + 2 * HALF <= D_V - TURNED:
        return rows
    elif 2 * HALF > LEAST:
        low, high = gl.split(gl.permute(gl.reshape(rows, [ROWS, 2, HALF]), (0, 2, 1)))
        low = turned_last(low, angles, token, FIRST, LEAST, D_V, TURNED)
        high = turned_last(high, angles, token, FIRST + HALF, LEAST, D_V, TURNED)
        both = gl.permute(gl.join(low, high), (0, 2, 1))
        return gl.convert_layout(gl.reshape(both, [ROWS, 2 * HALF]), rows.type.layout)
    else:
        return turned_columns(rows, angles, token, FIRST, D_V, TURNED)
