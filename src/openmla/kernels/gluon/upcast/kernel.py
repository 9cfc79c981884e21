"""V of 8 bits as bf16, before the kernel: e4m3 has three bits of fraction, bf16 seven.

FP8 products of weights and values would have to be transposed, since wgmma takes them along the
keys only, and summed block by block, since it keeps 13 bits of their sums. On an H200 that was as
fast as this copy and products of 16 bits, which are exact (docs/fp8.md).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(64)  # of a program
VECTOR = gl.constexpr(16)  # elements that a thread reads at once


@gluon.jit(do_not_specialize=["rows", "heads", "v_stride_t", "v_stride_h"])
def upcast_kernel(v_ptr, out_ptr, rows, heads, v_stride_t, v_stride_h, D_V: gl.constexpr):
    """v [tokens, heads, D_V] to out, which has no gaps; rows: of all tokens and heads. Strides are
    in units of VECTOR, so that the compiler knows where rows may begin."""
    LANES: gl.constexpr = D_V // VECTOR
    L: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // LANES, LANES], [4, 1], [1, 0])
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, L))
    column = gl.arange(0, D_V, gl.SliceLayout(0, L))
    token = (row // heads).to(gl.int64)
    here = (token * v_stride_t + (row % heads).to(gl.int64) * v_stride_h) * VECTOR
    own = (row < rows)[:, None]
    values = gl.load(v_ptr + here[:, None] + column[None, :], mask=own)
    there = row.to(gl.int64) * D_V
    gl.store(out_ptr + there[:, None] + column[None, :], values.to(gl.bfloat16), mask=own)
