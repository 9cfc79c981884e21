"""Tensor memory of both passes; records.QueryColumns and KeyColumns have the first columns.

Every tile has 128 lanes, which are rows of what the pass owns, and a thread of a group of four
warps holds one of them. Two groups share the columns of a tile: group 0 has the left half, group 1
the right one. Tiles of 16 bits have two values in a column.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import allocate_tensor_memory

from openmla.kernels.blackwell.dense.columns import columns_layout, row_registers, weights_at

LANES = gl.constexpr(128)


@gluon.jit
def allocate(COLUMNS: gl.constexpr, TMEM: gl.constexpr):
    """One allocation; the plan's columns are offsets into it."""
    LAYOUT: gl.constexpr = columns_layout(TMEM.widest, TMEM.ctas)
    return allocate_tensor_memory(gl.float32, [LANES, COLUMNS], LAYOUT)


@gluon.jit
def half_of(tmem, column: gl.constexpr, WIDTH: gl.constexpr, WHO: gl.constexpr):
    """The columns of group WHO of a tile of fp32, in registers."""
    HALF: gl.constexpr = WIDTH // 2
    REGS: gl.constexpr = row_registers(gl.float32, HALF, 1)
    return tmem.slice(column + WHO * HALF, HALF).load(REGS)


@gluon.jit
def store_half(
    tmem, values, column: gl.constexpr, DTYPE: gl.constexpr, WHO: gl.constexpr, TMEM: gl.constexpr
):
    """Round what group WHO has of a tile, and store it."""
    HALF: gl.constexpr = values.shape[1]
    REGS: gl.constexpr = row_registers(DTYPE, HALF, TMEM.ctas)
    first: gl.constexpr = column + WHO * HALF * DTYPE.primitive_bitwidth // 32
    half = weights_at(tmem, first, HALF, DTYPE, TMEM)
    half.store(gl.convert_layout(values.to(DTYPE), REGS))
