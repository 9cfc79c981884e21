"""Ordered sums of partial gradients: rope rows over heads, sinks over tiles of queries.

Parts are added in the order of their numbers, each column by one thread, so that bits are the same
every time. Eight parts are loaded at once: one after the other, every addition would wait for
memory.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.call import Call

AT_ONCE = gl.constexpr(8)
SUM_BLOCK = 512  # columns of a program: four for each thread of 32 lanes, two for each of 64


def summed(part: Tensor, result: Tensor, lanes: int = 32) -> Call:
    """The ordered sum of parts [parts, …], contiguous, into a result of the shape of one. lanes:
    those of a warp of the chip."""
    columns = result.numel()
    arguments = {"part_ptr": part, "sum_ptr": result, "parts": len(part), "columns": columns}
    arguments |= {"BLOCK": SUM_BLOCK, "LANES": lanes, "num_warps": 4}
    return Call(sum_kernel, -(-columns // SUM_BLOCK), arguments)


@gluon.jit
def ordered_sum(part_ptr, column, ok, parts, stride):
    """The sum of columns of part [parts, stride], in fp32."""
    total = gl.zeros_like(column).to(gl.float32)
    for first in range(0, parts, AT_ONCE):
        here = part_ptr + gl.cast(first, gl.int64) * stride + column
        loaded = ()
        for i in gl.static_range(AT_ONCE):
            more = ok & (first + i < parts)
            loaded = loaded + (gl.load(here + i * stride, mask=more, other=0.0),)  # noqa: RUF005
        for i in gl.static_range(AT_ONCE):
            total += loaded[i]
    return total


@gluon.jit(do_not_specialize=["parts", "columns"])
def sum_kernel(part_ptr, sum_ptr, parts, columns, BLOCK: gl.constexpr, LANES: gl.constexpr):
    """sum [columns] of part [parts, columns], fp32, rounded once. LANES: of a warp."""
    L: gl.constexpr = gl.BlockedLayout([1], [LANES], [4], [0])
    column = gl.program_id(0).to(gl.int64) * BLOCK + gl.arange(0, BLOCK, L)
    ok = column < columns
    total = ordered_sum(part_ptr, column, ok, parts, columns.to(gl.int64))
    # + 0: a sum of negative zeros, of what nobody sees, is +0.
    gl.store(sum_ptr + column, (total + 0.0).to(sum_ptr.dtype.element_ty), mask=ok)
