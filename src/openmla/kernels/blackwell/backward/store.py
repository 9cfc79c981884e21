"""From accumulators in tensor memory to rows of gradients."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.blackwell.dense.columns import row_registers
from openmla.kernels.gluon.compat import reinterpret
from openmla.kernels.gluon.gradients.rows import VECTOR, wide

ROWS = gl.constexpr(128)


@gluon.constexpr_function
def stored_columns(width):
    """Columns that a group moves at a time, of an accumulator of `width` columns."""
    return min(int(width) // 2, 32)


@gluon.constexpr_function
def written_layout(columns, bits):
    """Rows of a gradient in registers: neighbors write neighboring 16 bytes of a row."""
    values = 128 // int(bits)
    threads = int(columns) // values
    return gl.BlockedLayout([1, values], [32 // threads, threads], [4, 1], [1, 0])


@gluon.constexpr_function
def staged_layout(columns, bits):
    """Shared memory layout of such rows on their way between two register layouts."""
    return gl.NVMMASharedLayout(
        swizzle_byte_width=int(columns) * int(bits) // 8, element_bitwidth=int(bits), rank=2
    )


@gluon.jit
def write_half(
    tmem,
    column: gl.constexpr,
    WIDTH: gl.constexpr,
    stage,
    scale,
    kept,
    rows,
    item,
    FIRST: gl.constexpr,
    WHO: gl.constexpr,
):
    """Scale, round and store the columns of group WHO of an accumulator that begins at `column`.

    A thread holds a row; neighbors must write neighboring columns, so values change threads through
    `stage`, a tile of shared memory that nobody reads any more. Rows that are not `kept`
    are written as +0, whatever was summed. Columns of the gradient begin at FIRST.
    rows: Rows, whose strides are in units of 8 elements, or of 1 in fp32; item: WorkItem.
    """
    DTYPE: gl.constexpr = rows.base.dtype.element_ty
    BITS: gl.constexpr = DTYPE.primitive_bitwidth
    STEP: gl.constexpr = stored_columns(WIDTH)
    REGS: gl.constexpr = row_registers(gl.float32, STEP, 1)
    BL: gl.constexpr = written_layout(STEP, BITS)
    SHAPE: gl.constexpr = (ROWS, STEP)
    LAYOUT: gl.constexpr = staged_layout(STEP, BITS)
    OWN: gl.constexpr = WHO * (WIDTH // 2)  # first column of the group
    box = reinterpret(stage, DTYPE, SHAPE, LAYOUT)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, BL))
    if BITS == 32:
        # Multiples of 4 as the compiler sees them: rows of a part begin at multiples of 16 bytes.
        step = wide(rows.stride_t) // 4 * 4
        of_head = wide(rows.stride_h) // 4 * 4
    else:
        step = wide(rows.stride_t) * VECTOR
        of_head = wide(rows.stride_h) * VECTOR
    first = rows.base + (item.token * step + item.head * of_head)
    here = (first + row * step)[:, None] + gl.arange(0, STEP, gl.SliceLayout(0, BL))[None, :]
    exists = (row < item.rows)[:, None]
    seen = gl.convert_layout(kept, gl.SliceLayout(1, REGS))[:, None]
    for i in gl.static_range(WIDTH // 2 // STEP):
        values = tmem.slice(column + (OWN + i * STEP), STEP).load(REGS) * scale
        # A sum of zeros times a negative scale is -0; + 0 makes it +0.
        box.store(gl.where(seen, values + 0.0, 0.0).to(DTYPE))
        gl.store(here + (FIRST + OWN + i * STEP), box.load(BL), mask=exists)
