# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""Online softmax of the sparse kernel: 64 rows of scores in tensor memory, in log2 units.

| state per row | meaning | before the first step |
|---|---|---|
| row_max | reference maximum: at most THRESHOLD below the true one | -inf |
| row_sum | sum(exp2(s - row_max)) | 0 |
| highest | the true maximum, which only max_logits needs | -inf |
| O, in tensor memory | sum(exp2(s - row_max) * v) | not yet written |

References move, and O is multiplied, only in a step where the maximum of some row grew by more than
THRESHOLD: O is 64 x 512 values in tensor memory. Weights then reach 2^6 instead of 1.

MAP, TMEM and REGS are TmemMap, TmemLayouts and RegisterLayouts.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    fence_async_shared,
    mbarrier,
    tma,
)

from openmla.kernels.blackwell.sparse.mma import output, scores
from openmla.kernels.blackwell.sparse.plan import RESCALE_THRESHOLD
from openmla.kernels.blackwell.sparse.records import SoftmaxState
from openmla.kernels.blackwell.sparse.rows import wait_for_step
from openmla.kernels.gluon.compat import reinterpret, thread_barrier, tma_store
from openmla.kernels.gluon.scores import LN_2, MINUS_INF, normalize
from openmla.kernels.gluon.turning import turned_last

THRESHOLD = gl.constexpr(RESCALE_THRESHOLD)


@gluon.jit
def hide_invalid(s, bits, B_TOPK: gl.constexpr):
    """Scores of keys that do not count become -inf; `bits` holds one bit per key."""
    L: gl.constexpr = s.type.layout
    ROWS: gl.constexpr = s.shape[0]
    by_byte = gl.reshape(s, [ROWS, B_TOPK // 8, 8])
    L3: gl.constexpr = by_byte.type.layout
    valid = bits.load(gl.SliceLayout(0, gl.SliceLayout(2, L3))).to(gl.int32)
    bit = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, L3)))
    counts = (valid[None, :][:, :, None] >> bit[None, :][:, None, :]) & 1
    by_byte = gl.where(counts != 0, by_byte, MINUS_INF)
    return gl.convert_layout(gl.reshape(by_byte, [ROWS, B_TOPK]), L)


@gluon.jit
def scaled(factor, q_scale_ptr, token):
    """What the scores of a token are multiplied by: e4m3 queries may have a scale for each."""
    if q_scale_ptr is not None:
        factor = factor * gl.load(q_scale_ptr + token)
    return factor


@gluon.jit
def rescale_rows(O, rescale, ATOMS: gl.constexpr, REGS: gl.constexpr):
    """ATOMS of O times rescale, row by row, REGS.output_columns columns at a time."""
    COLUMNS: gl.constexpr = REGS.output
    WIDTH: gl.constexpr = REGS.output_columns
    factor = gl.convert_layout(rescale, gl.SliceLayout(1, COLUMNS))[:, None]
    for i in gl.static_range(ATOMS * 256 // WIDTH):
        part = columns_of(O, i, WIDTH)
        part.store(part.load(COLUMNS) * factor)


@gluon.jit
def columns_of(O, PART: gl.constexpr, WIDTH: gl.constexpr):
    """Columns PART * WIDTH … of O, which is two atoms of 256."""
    return O[PART * WIDTH // 256].slice(PART * WIDTH % 256, WIDTH)


@gluon.jit
def softmax(
    tmem,
    smem,
    bars,
    steps,
    factor,
    HOW: gl.constexpr,
    MAP: gl.constexpr,
    TMEM: gl.constexpr,
    REGS: gl.constexpr,
):
    """Weights of every step; returns the SoftmaxState after the last.

    Tiles `smem`, Barriers `bars`, records.How `HOW`; factor = scale * log2 e.
    """
    p_smem = smem.p
    ATOMS: gl.constexpr = smem.v.shape[0] // 2
    B_TOPK: gl.constexpr = HOW.b_topk
    NB: gl.constexpr = HOW.num_mbars
    S = scores(tmem, MAP, TMEM, B_TOPK)
    O = (output(tmem, 0, MAP, TMEM), output(tmem, 1, MAP, TMEM))
    BY_ROW: gl.constexpr = gl.SliceLayout(1, REGS.scores)
    ROWS: gl.constexpr = p_smem.shape[0]
    row_max = gl.full([ROWS], MINUS_INF, gl.float32, BY_ROW)
    highest = row_max
    row_sum = gl.zeros([ROWS], gl.float32, BY_ROW)
    for k in range(0, steps):
        slot = k % NB
        wait_for_step(bars.qk_ts_done, k, NB)
        s = S.load(REGS.scores) * factor
        mbarrier.arrive(bars.p_free.index(slot), count=1)
        wait_for_step(bars.k_valid_ready, k, NB)
        s = hide_invalid(s, smem.is_k_valid.index(slot), B_TOPK)
        mbarrier.arrive(bars.k_valid_free.index(slot), count=1)
        here = gl.max(s, 1)
        highest = gl.maximum(highest, here)
        grew = gl.max(gl.where(here > row_max + THRESHOLD, 1, 0), 0)
        new_max = gl.where(grew > 0, gl.maximum(row_max, here), row_max)
        shift = gl.where(new_max == MINUS_INF, 0.0, new_max)
        weights = gl.exp2(s - shift[:, None])
        rescale = gl.exp2(row_max - shift)
        row_sum = row_sum * rescale + gl.sum(weights, 1)
        row_max = new_max
        wait_for_step(bars.sv_p1_done, k - 1, NB)  # both the last weights and O are free now
        p_smem.store(weights.to(p_smem.dtype))
        if (k > 0) & (grew > 0):
            rescale_rows(O, rescale, ATOMS, REGS)
        fence_async_shared()
        mbarrier.arrive(bars.so_ready.index(slot), count=1)
    wait_for_step(bars.sv_p1_done, steps - 1, NB)
    return SoftmaxState(row_max=row_max, row_sum=row_sum, highest=highest)


@gluon.jit
def write_row_values(values, out, token, head, heads):
    """One fp32 per head of a token, to HeadRows `out`."""
    first = out.base + token.to(gl.int64) * out.token_stride
    here = first + head.to(gl.int64) * out.head_stride
    gl.store(here, values, mask=head < heads)


@gluon.jit
def finish(
    tmem,
    v_smem,
    state,
    results,
    sink_ptr,
    work,
    MAP: gl.constexpr,
    TMEM: gl.constexpr,
    REGS: gl.constexpr,
    TILE: gl.constexpr,
    TURNED: gl.constexpr,
):
    """Normalize, turn the last TURNED columns back, and store to Results `results`; rows past the
    last head are dropped. The output passes through V's buffer. SoftmaxState `state`, WorkItem
    `work`."""
    token, first_head, heads = work.token, work.first_head, work.heads
    row_max, row_sum, highest = state
    out_desc, lse, max_logits = results.out, results.lse, results.max_logits
    O = (output(tmem, 0, MAP, TMEM), output(tmem, 1, MAP, TMEM))
    ROWS: gl.constexpr = row_max.shape[0]
    WIDTH: gl.constexpr = REGS.output_columns
    head = first_head + gl.arange(0, ROWS, row_max.type.layout)
    inverse, row_lse, empty = normalize(row_max, row_sum, sink_ptr, gl.minimum(head, heads - 1))
    if lse.base is not None:
        write_row_values(row_lse, lse, token, head, heads)
    if max_logits.base is not None:
        write_row_values(highest * LN_2, max_logits, token, head, heads)
    scale = gl.convert_layout(inverse, gl.SliceLayout(1, REGS.output))[:, None]
    nothing = gl.convert_layout(empty, gl.SliceLayout(1, REGS.output))[:, None]
    GROUPS: gl.constexpr = v_smem.shape[0] // 2 * 256 // WIDTH
    tiles = reinterpret(v_smem, out_desc.dtype, [GROUPS, ROWS, WIDTH], TILE)
    for i in gl.static_range(GROUPS):
        part = columns_of(O, i, WIDTH).load(REGS.output)
        if TURNED > 0:
            columns = turned_last(
                part * scale, results.angles, token, i * WIDTH, WIDTH, GROUPS * WIDTH, TURNED
            )
            tiles.index(i).store(gl.where(nothing, 0.0, columns).to(out_desc.dtype))
        else:
            tiles.index(i).store(gl.where(nothing, 0.0, part * scale).to(out_desc.dtype))
    fence_async_shared()
    thread_barrier()
    BOX: gl.constexpr = out_desc.block_shape
    LAYOUT: gl.constexpr = out_desc.layout
    for i in gl.static_range(GROUPS):
        box = reinterpret(tiles.index(i), out_desc.dtype, BOX, LAYOUT)
        tma_store(out_desc, [token, first_head, i * WIDTH], box)
    tma.store_wait(0)
