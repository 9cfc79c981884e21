"""Rows of a head in global memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.scores import opaque_zero

# Strides of rows that are read or written 16 bytes at a time come in units of 8 elements: the
# compiler then knows that rows begin at multiples of 16 bytes, whatever the strides are.
VECTOR = gl.constexpr(8)


@gluon.jit
def wide(stride):
    """A stride as int64, made where it is used: kept over a loop it would be spilled."""
    return (stride + opaque_zero()).to(gl.int64)
