"""Tensor memory: where scores, weights and outputs lie, and how registers hold them.

TMEM, a records.TmemMap, has the first columns of the two score tiles and of the two output
accumulators, as planned, and their widths. With a pair each CTA holds 128 rows of every tile. The
weights alias the left half of the scores they were made from. Columns of the right half carry a
number per row from a softmax group to the correction group: the plan calls them C0 and C1.

| in a score tile | columns (BN 128) | lives |
|---|---|---|
| scores, fp32 | 0-127 | until the softmax group has them in registers |
| weights, 16 bits | 0-63 | until their product is done |
| factor that O is rescaled by | 64 | until the MMA warp may multiply the weights |
| row_sum, row_max of all blocks | 65, 66 | until the end |

A thread of a group of four warps holds one row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
)

from openmla.kernels.gluon.compat import pair_tmem_layout, reinterpret, tmem_reg_layout

RESCALE = gl.constexpr(0)
TOTAL = gl.constexpr(1)
REFERENCE = gl.constexpr(2)


@gluon.constexpr_function
def columns_layout(columns, ctas):
    """Layout of `columns` columns of one tile."""
    if ctas == 2:
        return pair_tmem_layout(128, int(columns))
    return TensorMemoryLayout([128, int(columns)], col_stride=1)


@gluon.constexpr_function
def row_registers(dtype, columns, ctas):
    """Register layout in which four warps of a CTA hold 128 rows of `columns` columns, a row per
    thread."""
    rows = 128 * int(ctas)
    return tmem_reg_layout(dtype, [rows, int(columns)], columns_layout(columns, ctas), 4)


@gluon.jit
def allocate(COLUMNS: gl.constexpr, TMEM: gl.constexpr):
    """One allocation per CTA; the plan's columns are offsets into it."""
    WIDEST: gl.constexpr = TMEM.d_v if TMEM.d_v > TMEM.keys else TMEM.keys
    return allocate_tensor_memory(
        gl.float32, [128 * TMEM.ctas, COLUMNS], columns_layout(WIDEST, TMEM.ctas)
    )


@gluon.jit
def scores(tmem, tile: gl.constexpr, TMEM: gl.constexpr):
    """Score tile 0 or 1."""
    return tmem.slice(TMEM.scores[tile], TMEM.keys)


@gluon.jit
def weights_at(
    tmem, column: gl.constexpr, KEYS: gl.constexpr, dtype: gl.constexpr, TMEM: gl.constexpr
):
    """Weights of KEYS keys from `column` on; a column of `tmem` holds 32 bits.

    All of tensor memory is reinterpreted and then sliced: Triton 3.8 does not reinterpret a slice.
    """
    LAYOUT: gl.constexpr = columns_layout(KEYS, TMEM.ctas)
    PER_COLUMN: gl.constexpr = 32 // dtype.primitive_bitwidth
    SHAPE: gl.constexpr = (128 * TMEM.ctas, tmem.shape[1] * PER_COLUMN)
    return reinterpret(tmem, dtype, SHAPE, LAYOUT).slice(column * PER_COLUMN, KEYS)


@gluon.jit
def weights(tmem, tile: gl.constexpr, dtype: gl.constexpr, TMEM: gl.constexpr):
    """The weights over score tile 0 or 1."""
    return weights_at(tmem, TMEM.scores[tile], TMEM.keys, dtype, TMEM)


@gluon.jit
def half_weights(
    tmem, tile: gl.constexpr, half: gl.constexpr, dtype: gl.constexpr, TMEM: gl.constexpr
):
    """Half of the columns of `weights`."""
    KEYS: gl.constexpr = TMEM.keys // 2
    WIDTH: gl.constexpr = KEYS * dtype.primitive_bitwidth // 32
    return weights_at(tmem, TMEM.scores[tile] + half * WIDTH, KEYS, dtype, TMEM)


@gluon.jit
def output(tmem, out: gl.constexpr, TMEM: gl.constexpr):
    """Output accumulator 0 or 1."""
    return tmem.slice(TMEM.outputs[out], TMEM.d_v)


@gluon.jit
def store_row_value(tmem, tile: gl.constexpr, what: gl.constexpr, value, TMEM: gl.constexpr):
    """Store one number per row beside the weights of a tile. what: RESCALE, TOTAL or REFERENCE."""
    REGS: gl.constexpr = row_registers(gl.float32, 1, TMEM.ctas)
    column = tmem.slice(TMEM.scores[tile] + TMEM.keys // 2 + what, 1)
    column.store(gl.convert_layout(value[:, None], REGS))


@gluon.jit
def load_row_value(tmem, tile: gl.constexpr, what: gl.constexpr, TMEM: gl.constexpr):
    """The number per row that `store_row_value` left beside the weights of a tile."""
    REGS: gl.constexpr = row_registers(gl.float32, 1, TMEM.ctas)
    column = tmem.slice(TMEM.scores[tile] + TMEM.keys // 2 + what, 1).load(REGS)
    return gl.max(column, 1)
