"""From accumulators to rows of gradients."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.gradients.rows import VECTOR, wide
from openmla.kernels.gluon.scores import opaque_zero


@gluon.jit
def write_gradient(acc, scale, kept, rows, item, COLUMN: gl.constexpr, WHO: gl.constexpr):
    """Scale, round and store 64 rows with 16 bytes per thread: a change of layout in each warp.

    Rows that are not `kept` ([64, 1] in the layout of acc, or a scalar) are written as +0, whatever
    was summed. rows: Rows, with strides in units of 8 elements, item: WorkItem.
    """
    BL: gl.constexpr = gl.BlockedLayout([2, 8], [8, 4], [4, 1], [1, 0])
    # A sum of zeros times a negative scale is -0; + 0 makes it +0.
    scaled = gl.where(kept, acc * scale + 0.0, 0.0).to(rows.base.dtype.element_ty)
    scaled = gl.convert_layout(scaled, BL)
    row = gl.arange(0, 64, gl.SliceLayout(1, BL)) + (opaque_zero() + WHO * 64)
    column = gl.arange(0, acc.shape[1], gl.SliceLayout(0, BL)) + COLUMN
    step = wide(rows.stride_t) * VECTOR
    first = rows.base + (item.token * step + item.head * (wide(rows.stride_h) * VECTOR))
    gl.store((first + row * step)[:, None] + column[None, :], scaled, (row < item.rows)[:, None])


@gluon.jit
def write_part(acc, scale, kept, rows, item, WHO: gl.constexpr):
    """Store 64 rows of fp32 as they lie in registers. rows: Rows, item: WorkItem."""
    L: gl.constexpr = acc.type.layout
    row = gl.arange(0, 64, gl.SliceLayout(1, L)) + (opaque_zero() + WHO * 64)
    column = gl.arange(0, acc.shape[1], gl.SliceLayout(0, L))
    step = wide(rows.stride_t)
    first = rows.base + (item.token * step + item.head * wide(rows.stride_h))
    scaled = gl.where(kept, acc * scale + 0.0, 0.0)
    gl.store((first + row * step)[:, None] + column[None, :], scaled, (row < item.rows)[:, None])
