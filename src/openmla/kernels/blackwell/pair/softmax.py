# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""Online softmax of a pair: 64 rows of scores a CTA in tensor memory, in log2 units.

The state per row is that of sparse/softmax.py. The CTAs of a pair have no branch that they take
together, so O is multiplied in every step, mostly by 1: the products of 256 keys hide it.

Weights of 8 bits come in two parts, as in dense/softmax.py, multiplied by 2^BIAS.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    fence_async_shared,
    mbarrier,
    tma,
)

from openmla.kernels.blackwell.pair.items import KEYS, ROWS, item_of, items_of, step_counts
from openmla.kernels.blackwell.sparse.records import SoftmaxState
from openmla.kernels.blackwell.sparse.rows import bits_layout, list_layout, wait_for_step
from openmla.kernels.blackwell.sparse.softmax import hide_invalid, scaled, write_row_values
from openmla.kernels.gluon.compat import reinterpret, thread_barrier, tma_store
from openmla.kernels.gluon.scores import LN_2, MINUS_INF, normalize
from openmla.kernels.gluon.turning import cos_sin, turned


@gluon.jit
def kv_valid_producer(is_k_valid, bars, lists, pool, INDEXING: gl.constexpr):
    """The kv_valid_producer partition: one bit per key of a step, eight to a byte: does its index
    count? Barriers `bars`, TokenLists `lists`, sparse.records.Pool `pool`."""
    L: gl.constexpr = bits_layout(2)
    FLAT: gl.constexpr = list_layout(2)
    bit = gl.arange(0, 8, gl.SliceLayout(0, L))[None, :]
    done = gl.program_id(0) * 0
    for number in range(gl.program_id(0), items_of(lists), gl.num_programs(0)):
        item = item_of(number, lists, INDEXING)
        for k in range(0, item.steps):
            step = done + k
            counts = step_counts(item, lists, pool, k, FLAT, INDEXING)
            grouped = gl.convert_layout(gl.reshape(counts, [KEYS // 8, 8]), L)
            wait_for_step(bars.valid_free, step - 2, 2)
            is_k_valid.index(step % 2).store(gl.sum(grouped << bit, 1).to(gl.uint8))
            mbarrier.arrive(bars.valid_full.index(step % 2), count=1)
        done += item.steps


@gluon.jit
def store_weights(p_smem, weights):
    """All weights of a step; 8-bit ones in two parts."""
    rounded = weights.to(p_smem.dtype)
    if p_smem.shape[1] == KEYS:
        p_smem.store(rounded)
    else:
        rest = (weights - rounded.to(gl.float32)).to(p_smem.dtype)
        p_smem.slice(0, KEYS, dim=1).store(rounded)
        p_smem.slice(KEYS, KEYS, dim=1).store(rest)


@gluon.jit
def multiply_rows(O, rescale, REGS: gl.constexpr):
    """Both atoms of O times rescale, row by row."""
    factor = gl.convert_layout(rescale, gl.SliceLayout(1, REGS))[:, None]
    for atom in gl.static_range(2):
        O[atom].store(O[atom].load(REGS) * factor)
        thread_barrier()  # or the next columns would be loaded too early, into no registers


@gluon.jit
def softmax(  # noqa: PLR0913
    tmem,
    smem,
    bars,
    lists,
    results,
    sink_ptr,
    heads,
    scale,
    INDEXING: gl.constexpr,
    WEIGHTS: gl.constexpr,
    REGS: gl.constexpr,
    OUT_TILE: gl.constexpr,
    TURNED: gl.constexpr,
):
    """The softmax partition: weights of every step of all items, and their results.

    TensorMemory `tmem`, Tiles `smem`, Barriers `bars`, TokenLists `lists`, sparse.records.Results
    `results`, WeightRange `WEIGHTS`, ScoreScale `scale`.
    """
    O = tmem.outputs
    THRESHOLD: gl.constexpr = WEIGHTS.threshold
    BIAS: gl.constexpr = WEIGHTS.bias
    BY_ROW: gl.constexpr = gl.SliceLayout(1, REGS)
    done = gl.program_id(0) * 0
    for number in range(gl.program_id(0), items_of(lists), gl.num_programs(0)):
        item = item_of(number, lists, INDEXING)
        factor = scaled(scale.factor, scale.q_scale, item.token)
        row_max = gl.full([ROWS], MINUS_INF, gl.float32, BY_ROW)
        highest = row_max
        row_sum = gl.zeros([ROWS], gl.float32, BY_ROW)
        for k in range(0, item.steps):
            step = done + k
            wait_for_step(bars.s_full, step, 2)
            s = tmem.scores.index(step % 2).load(REGS) * factor
            wait_for_step(bars.valid_full, step, 2)
            s = hide_invalid(s, smem.is_k_valid.index(step % 2), KEYS)
            mbarrier.arrive(bars.valid_free.index(step % 2), count=1)
            here = gl.max(s, 1)
            highest = gl.maximum(highest, here)
            new_max = gl.where(here > row_max + THRESHOLD, here, row_max)
            shift = gl.where(new_max == MINUS_INF, 0.0, new_max)
            weights = gl.exp2(s - (shift - BIAS)[:, None])
            rescale = gl.exp2(row_max - shift)
            row_sum = row_sum * rescale + gl.sum(weights, 1)
            row_max = new_max
            wait_for_step(bars.o_done, step - 1, 1)  # both the last weights and O are free now
            store_weights(smem.p, weights)
            if k > 0:
                multiply_rows(O, rescale, REGS)
            fence_async_shared()
            mbarrier.arrive(bars.p_full.index(0), count=1)
        done += item.steps
        wait_for_step(bars.o_done, done - 1, 1)
        state = SoftmaxState(row_max=row_max - BIAS, row_sum=row_sum, highest=highest)
        if results.parts is None:
            finish(O, smem.p, state, results, sink_ptr, item.token, heads, REGS, OUT_TILE, TURNED)
        else:
            finish_range(O, smem.p, state, results, sink_ptr, item, heads, REGS, OUT_TILE)


@gluon.jit
def finish_range(
    O,
    p_smem,
    state,
    results,
    sink_ptr,
    item,
    heads,
    REGS: gl.constexpr,
    OUT_TILE: gl.constexpr,
):
    """Write an Item of all keys of its token to the outputs, that of a range to the workspace."""
    if item.part < 0:
        finish(O, p_smem, state, results, sink_ptr, item.token, heads, REGS, OUT_TILE, 0)
    else:
        write_part(O, state, results.parts, item.part, heads, REGS)


@gluon.jit
def write_part(O, state, parts, first, heads, REGS: gl.constexpr):
    """Store a range of keys to the workspace (`Parts`), unnormalized: rows `first` … of it."""
    head = gl.arange(0, ROWS, state.row_max.type.layout)
    there, row = head < heads, first + head
    gl.store(parts.state + row * 2, state.row_max, mask=there)
    gl.store(parts.state + row * 2 + 1, state.row_sum, mask=there)
    for atom in gl.static_range(2):
        column = gl.arange(0, 256, gl.SliceLayout(0, REGS)) + atom * 256
        here = parts.sums + (row * 512)[:, None] + column[None, :]
        gl.store(here, O[atom].load(REGS), mask=there[:, None])
        thread_barrier()


@gluon.jit
def turned_half(part, angles, token, TURNED: gl.constexpr):
    """The last 256 columns of a token's results, the last TURNED of them turned back. Two threads
    have 128 columns of a row each: what turns is the last quarter, half of the second one's."""
    low, high = gl.split(gl.permute(gl.reshape(part, [ROWS, 2, 2, TURNED]), (0, 1, 3, 2)))
    a, b = gl.split(gl.reshape(high, [ROWS, 2, TURNED // 2, 2]))
    PL: gl.constexpr = gl.SliceLayout(0, a.type.layout)
    half = gl.arange(0, 2, gl.SliceLayout(1, PL))
    pair = gl.arange(0, TURNED // 2, gl.SliceLayout(0, PL))
    pair = pair[None, :] + (half[:, None] - 1) * (TURNED // 2)
    cos, sin = cos_sin(angles, token, pair, TURNED)
    turned_a, turned_b = turned(a, b, cos[None, :, :], sin[None, :, :])
    turns = (pair >= 0)[None, :, :]
    pairs = gl.join(gl.where(turns, turned_a, a), gl.where(turns, turned_b, b))
    high = gl.convert_layout(gl.reshape(pairs, [ROWS, 2, TURNED]), low.type.layout)
    both = gl.permute(gl.join(low, high), (0, 1, 3, 2))
    return gl.convert_layout(gl.reshape(both, [ROWS, 4 * TURNED]), part.type.layout)


@gluon.jit
def finish(
    O,
    p_smem,
    state,
    results,
    sink_ptr,
    token,
    heads,
    REGS: gl.constexpr,
    OUT_TILE: gl.constexpr,
    TURNED: gl.constexpr,
):
    """Normalize, turn the last TURNED columns back, and store to Results `results`; rows past the
    last head are dropped. Half of the output at a time passes through P's buffer."""
    row_max, row_sum, highest = state
    out_desc, lse, max_logits = results.out, results.lse, results.max_logits
    head = gl.arange(0, ROWS, row_max.type.layout)
    inverse, row_lse, empty = normalize(row_max, row_sum, sink_ptr, gl.minimum(head, heads - 1))
    if lse.base is not None:
        write_row_values(row_lse, lse, token, head, heads)
    if max_logits.base is not None:
        write_row_values(highest * LN_2, max_logits, token, head, heads)
    scale = gl.convert_layout(inverse, gl.SliceLayout(1, REGS))[:, None]
    nothing = gl.convert_layout(empty, gl.SliceLayout(1, REGS))[:, None]
    tile = reinterpret(p_smem, out_desc.dtype, [ROWS, 256], OUT_TILE)
    BOX: gl.constexpr = out_desc.block_shape
    LAYOUT: gl.constexpr = out_desc.layout
    for atom in gl.static_range(2):
        if TURNED > 0:
            part = O[atom].load(REGS) * scale
            if atom == 1:
                part = turned_half(part, results.angles, token, TURNED)
            tile.store(gl.where(nothing, 0.0, part).to(out_desc.dtype))
        else:
            tile.store(gl.where(nothing, 0.0, O[atom].load(REGS) * scale).to(out_desc.dtype))
        fence_async_shared()
        thread_barrier()
        tma_store(out_desc, [token, 0, atom * 256], reinterpret(tile, out_desc.dtype, BOX, LAYOUT))
        tma.store_wait(0)
        thread_barrier()
