# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""The correction group: keeps the accumulators in step with the reference maxima, then stores.

For every block of a query tile a softmax group tells the factor that each row's sums are multiplied
by. If one of the 128 reference maxima moved, this group multiplies the accumulator by it; otherwise
it leaves the accumulator alone. In both cases it arrives at p_full, as the softmax group does,
before the MMA warp adds the next product. After the last block row_max and row_sum come through
tensor memory as well, and the accumulator becomes rows of out and lse.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

from openmla.kernels.blackwell.dense.columns import (
    REFERENCE,
    RESCALE,
    TOTAL,
    load_row_value,
    row_registers,
)
from openmla.kernels.gluon.compat import reinterpret
from openmla.kernels.gluon.scores import normalize

Q_ROWS = gl.constexpr(128)
STEP = gl.constexpr(32)  # columns of the accumulator in registers at a time
STORED_BYTES = gl.constexpr(64)  # of a row of out that go through shared memory at a time
VECTOR_BYTES = gl.constexpr(16)  # which out's strides come in units of


@gluon.jit
def multiply_rows(tmem, out: gl.constexpr, factor, TMEM: gl.constexpr):
    """Accumulator `out` times factor, row by row."""
    REGS: gl.constexpr = row_registers(gl.float32, STEP, TMEM.ctas)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, REGS))[:, None]
    for i in gl.static_range(TMEM.d_v // STEP):
        part = tmem.slice(TMEM.outputs[out] + i * STEP, STEP)
        part.store(part.load(REGS) * factor)


@gluon.jit
def rescale(tmem, out: gl.constexpr, factor, TMEM: gl.constexpr):
    """Accumulator `out` times factor; left alone if the factor is 1 in all rows.

    The CTAs of a pair have no branch that they take together, and always multiply.
    """
    # Decided at compile time for a pair: a maximum over both CTAs would need a cluster barrier.
    if TMEM.ctas == 2 or gl.max(gl.where(factor == 1.0, 0, 1), 0) > 0:
        multiply_rows(tmem, out, factor, TMEM)


@gluon.jit
def correct(tmem, bars, tile: gl.constexpr, out: gl.constexpr, turn, j, TMEM: gl.constexpr):
    """Bring accumulator `out` to the reference of block j, the turn-th in score tile `tile`."""
    mbarrier.wait(bars.c_full.index(tile), turn & 1)
    factor = load_row_value(tmem, tile, RESCALE, TMEM)
    if j > 0:
        mbarrier.wait(bars.o_full.index(out), (j - 1) & 1)
        rescale(tmem, out, factor, TMEM)
    mbarrier.arrive(bars.p_full.index(tile), count=1)


@gluon.constexpr_function
def written_layout(ctas, element):
    """Rows of out in registers, of so many bytes each element: four neighbors write 64 bytes."""
    halves = [[1, 0]] if ctas == 2 else []
    return gl.BlockedLayout([1, 16 // element], [8, 4], [4, 1], [1, 0], halves)


@gluon.constexpr_function
def staged_layout(ctas, element):
    """Shared memory layout of the rows of out on their way between two register layouts."""
    return gl.NVMMASharedLayout(
        swizzle_byte_width=64,
        element_bitwidth=8 * element,
        rank=2,
        cga_layout=[[1, 0]] if ctas == 2 else [],
    )


@gluon.jit
def write_rows(tmem, stage, tile: gl.constexpr, inverse, empty, work, out, TMEM: gl.constexpr):
    """Normalize and round accumulator `tile`, and store it to `out` with 16 bytes per thread.

    A thread holds a row; neighbors must write neighboring columns. So the values change threads
    through `stage`, the shared memory that held the query tile.
    """
    DTYPE: gl.constexpr = out.base.dtype.element_ty
    SIZE: gl.constexpr = DTYPE.primitive_bitwidth // 8
    STORED: gl.constexpr = STORED_BYTES // SIZE
    VECTOR: gl.constexpr = VECTOR_BYTES // SIZE
    REGS: gl.constexpr = row_registers(gl.float32, STORED, TMEM.ctas)
    ROWS: gl.constexpr = Q_ROWS * TMEM.ctas
    BL: gl.constexpr = written_layout(TMEM.ctas, SIZE)
    TILE: gl.constexpr = staged_layout(TMEM.ctas, SIZE)
    SHAPE: gl.constexpr = (ROWS, STORED)
    box = reinterpret(stage, DTYPE, SHAPE, TILE)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, BL))
    column = gl.arange(0, STORED, gl.SliceLayout(0, BL))
    step = out.token_stride.to(gl.int64) * VECTOR
    first = out.base + (
        (work.token + tile * ROWS) * step + work.head * (out.head_stride.to(gl.int64) * VECTOR)
    )
    here = (first + row * step)[:, None] + column[None, :]
    exists = (row + tile * ROWS < work.rows)[:, None]
    for i in gl.static_range(TMEM.d_v // STORED):
        O = tmem.slice(TMEM.outputs[tile] + i * STORED, STORED).load(REGS)
        scale = gl.convert_layout(inverse, gl.SliceLayout(1, REGS))[:, None]
        nothing = gl.convert_layout(empty, gl.SliceLayout(1, REGS))[:, None]
        box.store(gl.where(nothing, 0.0, O * scale).to(DTYPE))
        gl.store(here + i * STORED, box.load(BL), mask=exists)


@gluon.jit
def finish(
    tmem,
    stage,
    bars,
    out: gl.constexpr,
    products,
    work,
    results,
    sink_ptr,
    TMEM: gl.constexpr,
):
    """Rows of out and lse from accumulator `out`, once all products are in it."""
    mbarrier.wait(bars.t_full.index(out), 0)
    row_max = load_row_value(tmem, out, REFERENCE, TMEM)
    row_sum = load_row_value(tmem, out, TOTAL, TMEM)
    inverse, lse, empty = normalize(row_max, row_sum, sink_ptr, work.head)
    lse_rows = results.lse
    if lse_rows.base is not None:
        row = gl.arange(0, row_max.shape[0], row_max.type.layout) + out * row_max.shape[0]
        step = lse_rows.token_stride.to(gl.int64)
        first = work.token * step + work.head * lse_rows.head_stride.to(gl.int64)
        here = lse_rows.base + first + row * step
        gl.store(here, lse, mask=row < work.rows)
    mbarrier.wait(bars.o_full.index(out), (products - 1) & 1)
    write_rows(tmem, stage, out, inverse, empty, work, results.out, TMEM)


@gluon.jit
def correct_two(tmem, q_smem, bars, work, results, sink_ptr, TMEM: gl.constexpr):
    """Both query tiles."""
    blocks, skipped = work.blocks, work.skipped
    for j in range(0, blocks):
        if j >= skipped:
            correct(tmem, bars, 0, 0, j - skipped, j - skipped, TMEM)
        correct(tmem, bars, 1, 1, j, j, TMEM)
    if blocks > 0:
        own = blocks - skipped
        finish(tmem, q_smem.index(0), bars, 0, own, work, results, sink_ptr, TMEM)
        finish(tmem, q_smem.index(1), bars, 1, blocks, work, results, sink_ptr, TMEM)


@gluon.jit
def correct_one(tmem, q_smem, bars, work, results, sink_ptr, TMEM: gl.constexpr):
    """One query tile, one accumulator; the factors of block j are in score tile j % 2."""
    blocks = work.blocks
    for pair in range(0, (blocks + 1) // 2):
        for tile in gl.static_range(2):
            if 2 * pair + tile < blocks:
                correct(tmem, bars, tile, 0, pair, 2 * pair + tile, TMEM)
    if blocks > 0:
        finish(tmem, q_smem.index(0), bars, 0, blocks, work, results, sink_ptr, TMEM)


@gluon.jit
def correction(
    tmem,
    q_smem,
    bars,
    work,
    results,
    sink_ptr,
    QUERIES: gl.constexpr,
    TMEM: gl.constexpr,
):
    """The correction partition: Barriers `bars`, WorkItem `work`, Results `results`.

    q_smem: main columns of Q, reused to change the layout of out. QUERIES: as in multiply.py.
    """
    if QUERIES == 1:
        correct_one(tmem, q_smem, bars, work, results, sink_ptr, TMEM)
    elif QUERIES == 2:
        correct_two(tmem, q_smem, bars, work, results, sink_ptr, TMEM)
    else:
        if work.rows > Q_ROWS:
            correct_two(tmem, q_smem, bars, work, results, sink_ptr, TMEM)
        else:
            correct_one(tmem, q_smem, bars, work, results, sink_ptr, TMEM)
