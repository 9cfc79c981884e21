"""A kernel whose inline assembly is an argument."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def two_operands(x_ptr, o_ptr, TEXT: gl.constexpr, CONSTRAINTS: gl.constexpr):
    i = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    x, y = gl.load(x_ptr + i), gl.load(x_ptr + 128 + i)
    z = gl.inline_asm_elementwise(TEXT, CONSTRAINTS, [x, y], dtype=gl.int32, is_pure=True, pack=1)
    gl.store(o_ptr + i, z)
