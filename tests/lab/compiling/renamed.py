"""One kernel in three spellings: with numbered tuples, with names, and with another constant."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Rows(NamedTuple):
    """Where rows lie."""

    base: Any
    stride: Any


@gluon.jit
def _row(rows, number, L: gl.constexpr):
    return gl.load(rows[0] + number * rows[1] + gl.arange(0, 128, L))


@gluon.jit
def numbered(x_ptr, o_ptr, count, stride, WARPS: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    total = gl.zeros([128], gl.float32, L)
    for i in range(0, count):
        total += _row((x_ptr, stride), i, L)
    gl.store(o_ptr + gl.arange(0, 128, L), total)


@gluon.jit
def _named_row(rows, number, LAYOUT: gl.constexpr):
    return gl.load(rows.base + number * rows.stride + gl.arange(0, 128, LAYOUT))


@gluon.jit
def named(x_ptr, o_ptr, count, stride, WARPS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    rows = Rows(base=x_ptr, stride=stride)
    total = gl.zeros([128], gl.float32, LAYOUT)
    for i in range(0, count):
        total += _named_row(rows, i, LAYOUT)
    gl.store(o_ptr + gl.arange(0, 128, LAYOUT), total)


@gluon.jit
def other(x_ptr, o_ptr, count, stride, WARPS: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    total = gl.zeros([128], gl.float32, L)
    for i in range(1, count):
        total += _row((x_ptr, stride), i, L)
    gl.store(o_ptr + gl.arange(0, 128, L), total)
