# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""The correction group: keeps the accumulators in step with the reference maxima, then stores.

For every block of a query tile a softmax group tells the new reference of each row. Where one of
the 128 moved, the accumulator is multiplied; otherwise it is left alone. Either way the MMA warp
hears from here, and from the softmax group, before it adds the next product. After the last block
the row row_sums come the same way, and the accumulator becomes rows of out and lse.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

from openmla.kernels.blackwell.dense.columns import REFERENCE, TOTAL, row_registers, told
from openmla.kernels.blackwell.dense.softmax import rescale_of
from openmla.kernels.gluon.compat import reinterpret
from openmla.kernels.gluon.scores import MINUS_INF, normalize

Q_ROWS = gl.constexpr(128)
STEP = gl.constexpr(32)  # columns of the accumulator in registers at a time
STORED = gl.constexpr(32)  # columns that go through shared memory at a time
VECTOR = gl.constexpr(8)  # out's strides come in units of 16 bytes


@gluon.jit
def rescale(tmem, out: gl.constexpr, old, new, TMEM: gl.constexpr):
    """Multiply accumulator `out` by what its rows' references moved; not at all if none did."""
    REGS: gl.constexpr = row_registers(gl.float32, STEP)
    if gl.max(gl.where(old == new, 0, 1), 0) > 0:
        rescale = rescale_of(old, new)[:, None]
        for i in gl.static_range(TMEM[5] // STEP):
            part = tmem.slice(TMEM[2 + out] + i * STEP, STEP)
            part.store(part.load(REGS) * rescale)


@gluon.jit
def correct(
    tmem, bars, row_max, tile: gl.constexpr, out: gl.constexpr, turn, j, TMEM: gl.constexpr
):
    """Bring accumulator `out` to the reference of block j, the turn-th in score tile `tile`."""
    p_full, o_full, c_full, _t_full = bars
    ROW: gl.constexpr = row_max.type.layout
    mbarrier.wait(c_full.index(tile), turn & 1)
    new_max = told(tmem, tile, REFERENCE, ROW, TMEM)
    if j > 0:
        mbarrier.wait(o_full.index(out), (j - 1) & 1)
        rescale(tmem, out, row_max, new_max, TMEM)
    mbarrier.arrive(p_full.index(tile), count=1)
    return new_max


@gluon.jit
def write_rows(tmem, stage, out: gl.constexpr, inverse, empty, work, results, TMEM: gl.constexpr):
    """Normalize and round an accumulator, and store it with 16 bytes per thread.

    A thread holds a row; neighbors must write neighboring columns. So the values change hands in
    the shared memory that held the query tile.
    """
    head, token, rows = work[0], work[1], work[2]
    out_ptr, stride_t, stride_h = results
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    REGS: gl.constexpr = row_registers(gl.float32, STORED)
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    SHAPE: gl.constexpr = (Q_ROWS, STORED)
    box = reinterpret(stage, DTYPE, SHAPE, TILE)
    row = gl.arange(0, Q_ROWS, gl.SliceLayout(1, BL))
    column = gl.arange(0, STORED, gl.SliceLayout(0, BL))
    step = stride_t.to(gl.int64) * VECTOR
    first = out_ptr + ((token + out * Q_ROWS) * step + head * (stride_h.to(gl.int64) * VECTOR))
    here = (first + row * step)[:, None] + column[None, :]
    exists = (row + out * Q_ROWS < rows)[:, None]
    for i in gl.static_range(TMEM[5] // STORED):
        O = tmem.slice(TMEM[2 + out] + i * STORED, STORED).load(REGS)
        scale = gl.convert_layout(inverse, gl.SliceLayout(1, REGS))[:, None]
        nothing = gl.convert_layout(empty, gl.SliceLayout(1, REGS))[:, None]
        box.store(gl.where(nothing, 0.0, O * scale).to(DTYPE))
        gl.store(here + i * STORED, box.load(BL), mask=exists)


@gluon.jit
def finish(
    tmem, stage, bars, row_max, out: gl.constexpr, work, results, sink_ptr,
    BIAS: gl.constexpr, TMEM: gl.constexpr,
):  # fmt: skip
    """Rows of out and lse from accumulator `out`, once the last product is in it."""
    _p_full, o_full, _c_full, t_full = bars
    out_rows, lse_rows = results
    head, token, rows, blocks = work[0], work[1], work[2], work[6]
    ROW: gl.constexpr = row_max.type.layout
    mbarrier.wait(t_full.index(out), 0)
    row_sum = told(tmem, out, TOTAL, ROW, TMEM)
    inverse, lse, empty = normalize(row_max - BIAS, row_sum, sink_ptr, head)
    lse_ptr, stride_t, stride_h = lse_rows
    if lse_ptr is not None:
        row = gl.arange(0, Q_ROWS, ROW) + out * Q_ROWS
        step = stride_t.to(gl.int64)
        here = lse_ptr + (token * step + head * stride_h.to(gl.int64)) + row * step
        gl.store(here, lse, mask=row < rows)
    mbarrier.wait(o_full.index(out), (blocks - 1) & 1)
    write_rows(tmem, stage, out, inverse, empty, work, out_rows, TMEM)


@gluon.jit
def correct_two(
    tmem, q_smem, bars, work, results, sink_ptr, BIAS: gl.constexpr, TMEM: gl.constexpr
):
    """Both query tiles."""
    blocks = work[6]
    ROW: gl.constexpr = gl.SliceLayout(1, row_registers(gl.float32, STEP))
    row_max0 = gl.full([Q_ROWS], MINUS_INF, gl.float32, ROW)
    row_max1 = gl.full([Q_ROWS], MINUS_INF, gl.float32, ROW)
    for j in range(0, blocks):
        row_max0 = correct(tmem, bars, row_max0, 0, 0, j, j, TMEM)
        row_max1 = correct(tmem, bars, row_max1, 1, 1, j, j, TMEM)
    if blocks > 0:
        finish(tmem, q_smem.index(0), bars, row_max0, 0, work, results, sink_ptr, BIAS, TMEM)
        finish(tmem, q_smem.index(1), bars, row_max1, 1, work, results, sink_ptr, BIAS, TMEM)


@gluon.jit
def correct_one(
    tmem, q_smem, bars, work, results, sink_ptr, BIAS: gl.constexpr, TMEM: gl.constexpr
):
    """One query tile, one accumulator; block j speaks through score tile j % 2."""
    blocks = work[6]
    ROW: gl.constexpr = gl.SliceLayout(1, row_registers(gl.float32, STEP))
    row_max = gl.full([Q_ROWS], MINUS_INF, gl.float32, ROW)
    for pair in range(0, (blocks + 1) // 2):
        for tile in gl.static_range(2):
            if 2 * pair + tile < blocks:
                row_max = correct(tmem, bars, row_max, tile, 0, pair, 2 * pair + tile, TMEM)
    if blocks > 0:
        finish(tmem, q_smem.index(0), bars, row_max, 0, work, results, sink_ptr, BIAS, TMEM)


@gluon.jit
def correction(given, QUERIES: gl.constexpr, BIAS: gl.constexpr, TMEM: gl.constexpr):
    """QUERIES as in multiply.py; q_smem: main columns of Q, reused to change the layout of out."""
    tmem, q_smem, bars, work, results, sink_ptr = given
    if QUERIES == 1:
        correct_one(tmem, q_smem, bars, work, results, sink_ptr, BIAS, TMEM)
    elif QUERIES == 2:
        correct_two(tmem, q_smem, bars, work, results, sink_ptr, BIAS, TMEM)
    else:
        if work[2] > Q_ROWS:
            correct_two(tmem, q_smem, bars, work, results, sink_ptr, BIAS, TMEM)
        else:
            correct_one(tmem, q_smem, bars, work, results, sink_ptr, BIAS, TMEM)
