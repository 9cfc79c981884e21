# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""MLA prefill in latent form on Hopper: every head reads the same gathered rows. bf16 or fp16.

A program works on 64 rows of scores at a time and walks their keys in steps of two blocks of 64.
The rows are heads of one token that has its own list of keys, or heads of several tokens of a
sequence. V is the first columns of K. The output columns are split between two warp-groups, because
64 x 512 fp32 sums fill half of an SM's registers.

| partition | warps | registers | does |
|---|---|---|---|
| left (default) | 4 | 216 | scores of block 0; P0 · V0 and P1 · V1 for the left output columns |
| right | 4 | 216 | scores of block 1; the same for the right output columns |
| producer | 4 | 72 | loads Q, loads rows (rows.py), or dequantizes FP8 rows (rows_fp8.py) |

Where FP8 rows are dequantized the registers are 200, 200 and 104.

| barrier | number | completed by (count) | waited for by |
|---|---|---|---|
| q_ready | 1 | TMA bytes of Q (1) | left, right |
| q_free | 1 | left, right, after the last scores of a work item (2) | producer |
| ready | 4 ST | threads of the producer: block 0 left, right, block 1 left, right (128) | both |
| free | 4 ST | the only warp-group that multiplies V with it: left, right (1) | producer |
| valid | 2 ST | producer: validity of a block of a list is written (1) | left, right |
| t_ready | 2 | producer: a work item is described in `info` (1) | left, right |
| t_empty | 2 | left, right: it is read (2) | producer |
| bar 8 – 13 (named) | | see signals.py | left, right |

| shared memory | bytes (512 + 64, ST 1) |
|---|---|
| q_left, q_right, q_rope | 64 x (256 + 256 + 64) x 2 = 73728 |
| k_left, k_right, k_rope | 2 ST x 64 x (256 + 256 + 64) x 2 = 147456 |
| p | k_rope: scores are done with it. Narrower rope: 2 ST x 64 x 64 x 2 of its own |
| bias, flags (of lists) | 2 ST x 64 x 4, 2 ST x 4 x 4 |
| row_maxes, sums (and largest scores) | 2 x 64 x 4, 3 x 64 x 4 |
| info, barriers | 64 + 8 x (2 + 10 ST + 4) |
| epilogue's change of layout, warp states | 4096 + 8 |

A step, in time (see softmax.py for what the maxima mean):

    left   softmax 0 | P0 V0     | P1 V1         | scores 0 of the next step
    right  scores 1  | softmax 1 | P0 V0 | P1 V1 | wait for rows | scores 1 of the next step

A warp that issues wgmma is held up until the tensor core takes the instruction. So whatever the
other warp-group waits for is told first and multiplied after: the reference of block 0 as soon as
it is known, P0 and P1 as soon as they are written.

Where rows are dequantized (rows_fp8.py), block 1 comes late, and the right one multiplies P0 V0
before it scores block 1.

At the end of a work item each warp-group tells its sums under the last product. The right one then
stores its half of the output, while the next block 1 is being gathered. The left one first makes P0
of the next work item, which the right one will wait for; it stores its half while that makes P1.

Nothing is in flight on a loop's back edge, or ptxas would put waits between all wgmma. All buffers
are indexed by numbers made of `opaque_zero`, or their descriptors would be kept in registers that
are not there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openmla.kernels.gluon.barriers import barrier_pair, barriers
from openmla.kernels.gluon.compat import thread_barrier
from openmla.kernels.gluon.dependent import let_next_begin, wait_for_kernel_before
from openmla.kernels.gluon.scores import MINUS_INF, opaque_zero, signed
from openmla.kernels.hopper.dense.softmax import rescale_rows
from openmla.kernels.hopper.latent.epilogue import (
    divisors,
    finish_right,
    nowhere,
    place_of,
    write_left,
)
from openmla.kernels.hopper.latent.pages import hide_unseen
from openmla.kernels.hopper.latent.rows import producer
from openmla.kernels.hopper.latent.rows_fp8 import fp8_producer
from openmla.kernels.hopper.latent.signals import (
    signal_p0,
    signal_p1,
    signal_reference,
    signal_sums,
    trust_arrived_copies,
    wait_p0,
    wait_p1,
    wait_reference,
    wait_sums,
)
from openmla.kernels.hopper.latent.softmax import (
    first_sums,
    follow,
    max_of_rows,
    moved,
    rescaled,
    row_sums,
    weigh,
)
from openmla.kernels.hopper.latent.work_items import FIELDS, read_work_item

WARPS = gl.constexpr(4)


@gluon.jit
def wait_tile(barrier, phase, COPIED: gl.constexpr):
    """Wait for a tile. COPIED: by cp.async, whose arrival comes after its bytes are in place.

    PTX asks for a proxy fence between such a copy and wgmma, and here it would delay every score
    (4 to 5 % of the kernel). Like CUTLASS's cp.async main loop for Hopper, this kernel relies on
    the arrival instead. Tiles that ordinary stores wrote are fenced here, not by the producer: a
    fence waits for all loads of its thread, and the producer always has some on their way.
    """
    mbarrier.wait(barrier, phase)
    if COPIED:
        trust_arrived_copies()
    else:
        fence_async_shared()


@gluon.jit
def issue_scores(
    q_smem, k_smem, ready, b, phase, BLOCK: gl.constexpr, SL: gl.constexpr, DIMS: gl.constexpr,
    COPIED: gl.constexpr,
):  # fmt: skip
    """Start the scores of a block, part by part as its tiles arrive: 2 groups, 3 with rope."""
    q_left, q_right, q_rope = q_smem
    left, right, rope = k_smem
    z = opaque_zero()
    S = gl.zeros([64, 64], gl.float32, SL)
    wait_tile(ready.index(2 * b + 2 * BLOCK), phase, COPIED)
    k = left.index(z + b + BLOCK).permute((1, 0))
    S = warpgroup_mma(q_left.index(z), k, S, use_acc=False, is_async=True)
    if BLOCK == 1 and DIMS[1] > 0:
        k = rope.index(z + b + 1).permute((1, 0))
        S = warpgroup_mma(q_rope.index(z), k, S, is_async=True)
    wait_tile(ready.index(2 * b + 2 * BLOCK + 1), phase, COPIED)
    k = right.index(z + b + BLOCK).permute((1, 0))
    S = warpgroup_mma(q_right.index(z), k, S, is_async=True)
    if BLOCK == 0 and DIMS[1] > 0:
        S = warpgroup_mma(q_rope.index(z), rope.index(z + b).permute((1, 0)), S, is_async=True)
    return S


@gluon.jit
def any_missing(validity, valid, b, phase, MASK: gl.constexpr):
    """Whether block b of a list has a key that is not there. Asked while its scores are made."""
    if MASK == 0:
        ALL: gl.constexpr = gl.BlockedLayout([WARPS], [32], [WARPS], [0])  # every thread has all
        mbarrier.wait(valid.index(b), phase)
        return gl.max(validity[1].index(b).load(ALL), 0)
    else:
        return 0


@gluon.jit
def masked(S, missing, validity, b, tile, first, heads, MASK: gl.constexpr):
    """-inf for keys that are not there or not seen; nothing to do in a block without such keys.

    S holds the scores of block b, which are keys `first` … of the tile. MASK 0: keys of a list; 1:
    of a sequence, all of them seen; 2: causal.
    """
    if MASK == 0:
        SL: gl.constexpr = S.type.layout
        if missing != 0:
            S = S + validity[0].index(b).load(gl.SliceLayout(0, SL))[None, :]
        return S
    else:
        return hide_unseen(S, tile, first, heads, MASK == 2)


@gluon.jit
def higher(highest, S, factor, LOGITS: gl.constexpr):
    """The largest score so far, where somebody wants it."""
    if LOGITS:
        highest = gl.maximum(highest, max_of_rows(S) * factor)
    return highest


@gluon.jit
def own_sums(row_sum, row_max, highest, sums, SIDE: gl.constexpr, LOGITS: gl.constexpr):
    """Row sums over a warp-group's own block of all steps, which the other one is told."""
    own = row_sums(row_sum, row_max)
    sums.index(SIDE).store(own)
    if LOGITS and SIDE == 0:
        sums.index(2).store(highest)
    signal_sums(SIDE)
    return own


@gluon.jit
def both_sums(own, highest, sums, SIDE: gl.constexpr, LOGITS: gl.constexpr):
    """Row sums over both blocks, and for the right the largest scores of both."""
    RL: gl.constexpr = own.type.layout
    wait_sums(SIDE)
    if LOGITS and SIDE == 1:
        highest = gl.maximum(highest, sums.index(2).load(RL))
    return own + sums.index(1 - SIDE).load(RL), highest


@gluon.jit
def block_of(it, ST: gl.constexpr):
    """(block 0 of step number `it`, parity of its barriers)."""
    return it % ST * 2, (it // ST) & 1


@gluon.jit
def left_step(
    S, missing, state, ended, it, first, tile, smem, free, scale, HOW: gl.constexpr,
    PL: gl.constexpr,
):  # fmt: skip
    """From the scores of block 0 to the left columns, with P1 · V1 still in flight. HOW: SIGN,
    OVERLAY, LOGITS, MASK, COPIED, SPLIT.

    In the first step of a work item O still holds the work item that ended before. It is stored
    when the right warp-group has got all that it waits for.
    """
    O, row_max, row_sum, highest = state
    factor, heads = scale
    k_smem, p_smem, validity, stats = smem
    k_left, _, _ = k_smem
    row_maxes, _sums = stats
    RL: gl.constexpr = row_max.type.layout
    b, _phase = block_of(it, k_left.shape[0] // 2)
    z = opaque_zero()
    S = masked(signed(S, HOW[0]), missing, validity, b, tile, first, heads, HOW[3])
    highest = higher(highest, S, factor, HOW[2])
    row_max0 = moved(S, row_max, factor)
    row_maxes.index(0).store(row_max0)
    signal_reference()
    rescale = follow(row_max, row_max0)
    weights, row_sum = weigh(S, row_max0, rescaled(row_sum, rescale), factor)
    P = weights.to(k_left.dtype)
    if HOW[1]:
        thread_barrier()  # every warp has finished the scores, which read the rope tile
    p_smem.index(z + b).store(P)
    fence_async_shared()
    signal_p0(it)
    inverse, place, results = ended
    if (first == 0) & (place[0] != -1):
        write_left(O, inverse, results, place, heads, HOW)
        O = gl.zeros_like(O)
    O = rescale_rows(O, rescale)
    A = gl.convert_layout(P, PL)
    O_next = warpgroup_mma(A, k_left.index(z + b), O, is_async=True)
    O, A = warpgroup_mma_wait(0, deps=(O_next, A))
    mbarrier.arrive(free.index(2 * b), count=1)
    wait_p1()
    row_max = row_maxes.index(1).load(RL)
    rescale = follow(row_max0, row_max)
    row_sum = rescaled(row_sum, rescale)
    O = rescale_rows(O, rescale)
    O_next = warpgroup_mma(p_smem.index(z + b + 1), k_left.index(z + b + 1), O, is_async=True)
    return O_next, row_max, row_sum, highest


@gluon.jit
def left(info, q_smem, smem, bars, results, scale, HOW: gl.constexpr, DIMS: gl.constexpr):
    """Block 0 of every step, and the left output columns."""
    k_smem, _p, validity, stats = smem
    q_bars, ready, free, valid, t_bars = bars
    q_ready, q_free = q_bars
    sink_ptr = results[3]
    ST: gl.constexpr = k_smem[0].shape[0] // 2
    HALF: gl.constexpr = DIMS[0]
    MASK: gl.constexpr = HOW[3]
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OL, k_width=2)
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    # 4 x steps so far + work items so far modulo 4: in two registers, Triton 3.9 would spill one.
    count = gl.program_id(0) * 0
    tile, steps = read_work_item(info, t_bars, count, MASK, HOW[5])
    S = gl.zeros([64, 64], gl.float32, SL)
    missing = count * 0
    if steps > 0:
        mbarrier.wait(q_ready, 0)
        S_next = issue_scores(q_smem, k_smem, ready, count, 0, 0, SL, DIMS, HOW[4])
        missing += any_missing(validity, valid, 0, 0, MASK)
        S = warpgroup_mma_wait(0, deps=(S_next,))
    # A work item that has ended, and whose O is still to be divided and stored.
    O = gl.zeros([64, HALF], gl.float32, OL)
    inverse = gl.zeros([64], gl.float32, RL)
    place = nowhere(tile)
    while steps > 0:
        # S holds the scores of block 0 of the step.
        row_max = gl.full([64], MINUS_INF, gl.float32, RL)
        row_sum = first_sums(S)
        state = (O, row_max, row_sum, row_max)
        ended = (inverse, place, results)
        for j in range(0, steps - 1):
            O_next, row_max, row_sum, highest = left_step(
                S, missing, state, ended, count >> 2, j * 128, tile, smem, free, scale, HOW, PL
            )
            b, phase = block_of(count >> 2, ST)
            O = warpgroup_mma_wait(0, deps=(O_next,))
            mbarrier.arrive(free.index(2 * b + 2), count=1)
            state = (O, row_max, row_sum, highest)
            count += 4
            b, phase = block_of(count >> 2, ST)
            S_next = issue_scores(q_smem, k_smem, ready, b, phase, 0, SL, DIMS, HOW[4])
            missing = count * 0 + any_missing(validity, valid, b, phase, MASK)
            S = warpgroup_mma_wait(0, deps=(S_next,))
        mbarrier.arrive(q_free, count=1)
        O_next, row_max, row_sum, highest = left_step(
            S, missing, state, ended, count >> 2, (steps - 1) * 128, tile, smem, free, scale, HOW,
            PL,
        )  # fmt: skip
        b, phase = block_of(count >> 2, ST)
        own = own_sums(row_sum, row_max, highest, stats[1], 0, HOW[2])
        count = (count + 4) & -4 | (count + 1) & 3
        next_tile, steps = read_work_item(info, t_bars, count & 3, MASK, HOW[5])
        O = warpgroup_mma_wait(0, deps=(O_next,))
        mbarrier.arrive(free.index(2 * b + 2), count=1)
        S = gl.zeros([64, 64], gl.float32, SL)
        place = place_of(tile, scale[1], MASK, HOW[5])
        if steps > 0:
            b, phase = block_of(count >> 2, ST)
            mbarrier.wait(q_ready, count & 1)
            S_next = issue_scores(q_smem, k_smem, ready, b, phase, 0, SL, DIMS, HOW[4])
            missing = count * 0 + any_missing(validity, valid, b, phase, MASK)
            every, _most = both_sums(own, highest, stats[1], 0, HOW[2])
            inverse, _lse = divisors(row_max, every, place, scale[1], sink_ptr, HOW)
            S = warpgroup_mma_wait(0, deps=(S_next,))
        else:
            every, _most = both_sums(own, highest, stats[1], 0, HOW[2])
            inverse, _lse = divisors(row_max, every, place, scale[1], sink_ptr, HOW)
        tile = next_tile
    if place[0] != -1:
        write_left(O, inverse, results, place, scale[1], HOW)


@gluon.jit
def follow_left(row_max, row_maxes):
    """(factor of what is relative to `row_max`, the reference after block 0)."""
    wait_reference()
    row_max0 = row_maxes.index(0).load(row_max.type.layout)
    return follow(row_max, row_max0), row_max0


@gluon.jit
def product0(O, rescale, it, p_smem, k_right, free):
    """O with P0 · V0, after which the right tile of block 0 is free."""
    b, _phase = block_of(it, k_right.shape[0] // 2)
    z = opaque_zero()
    wait_p0(it)
    O = rescale_rows(O, rescale)
    O_next = warpgroup_mma(p_smem.index(z + b), k_right.index(z + b), O, is_async=True)
    O = warpgroup_mma_wait(0, deps=(O_next,))
    mbarrier.arrive(free.index(2 * b + 1), count=1)
    return O


@gluon.jit
def right_step(
    state, it, first, tile, q_smem, smem, bars, scale, HOW: gl.constexpr,
    LAST: gl.constexpr, LAYOUTS: gl.constexpr, DIMS: gl.constexpr,
):  # fmt: skip
    """A whole step for the right columns, with P1 · V1 (and P1, which it reads) still in flight."""
    O, row_max, row_sum, highest = state
    factor, heads = scale
    k_smem, p_smem, validity, stats = smem
    _, k_right, _ = k_smem
    row_maxes, _sums = stats
    q_free, ready, free, valid = bars
    SL: gl.constexpr = LAYOUTS[0]
    b, phase = block_of(it, k_right.shape[0] // 2)
    z = opaque_zero()
    if HOW[4]:
        S_next = issue_scores(q_smem, k_smem, ready, b, phase, 1, SL, DIMS, True)
        missing = any_missing(validity, valid, b + 1, phase, HOW[3])
        rescale, row_max0 = follow_left(row_max, row_maxes)
    else:
        # Rows are dequantized, and those of block 1 come late: block 0 is given back before.
        rescale, row_max0 = follow_left(row_max, row_maxes)
        O = product0(O, rescale, it, p_smem, k_right, free)
        S_next = issue_scores(q_smem, k_smem, ready, b, phase, 1, SL, DIMS, False)
        missing = any_missing(validity, valid, b + 1, phase, HOW[3])
    S = warpgroup_mma_wait(0, deps=(S_next,))
    if LAST:
        mbarrier.arrive(q_free, count=1)
    S = masked(signed(S, HOW[0]), missing, validity, b + 1, tile, first + 64, heads, HOW[3])
    highest = higher(highest, S, factor, HOW[2])
    row_max = moved(S, row_max0, factor)
    row_maxes.index(1).store(row_max)
    last_rescale = follow(row_max0, row_max)
    weights, row_sum = weigh(S, row_max, rescaled(row_sum, rescale * last_rescale), factor)
    P = weights.to(k_right.dtype)
    if HOW[1]:
        thread_barrier()  # every warp has finished the scores, which read the rope tile
    p_smem.index(z + b + 1).store(P)
    fence_async_shared()
    signal_p1()
    if HOW[4]:
        O = product0(O, rescale, it, p_smem, k_right, free)
    O = rescale_rows(O, last_rescale)
    A = gl.convert_layout(P, LAYOUTS[1])
    O_next = warpgroup_mma(A, k_right.index(z + b + 1), O, is_async=True)
    return O_next, A, row_max, row_sum, highest


@gluon.jit
def right(info, q_smem, smem, bars, results, scale, HOW: gl.constexpr, DIMS: gl.constexpr):
    """Block 1 of every step, the right output columns, and lse."""
    q_bars, ready, free, valid, t_bars = bars
    q_ready, q_free = q_bars
    HALF: gl.constexpr = DIMS[0]
    MASK: gl.constexpr = HOW[3]
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OL, k_width=2)
    LAYOUTS: gl.constexpr = (SL, PL)
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    step_bars = (q_free, ready, free, valid)
    ST: gl.constexpr = smem[0][1].shape[0] // 2
    turn = gl.program_id(0) * 0
    it = turn
    tile, steps = read_work_item(info, t_bars, turn, MASK, HOW[5])
    while steps > 0:
        row_max = gl.full([64], MINUS_INF, gl.float32, RL)
        row_sum = first_sums(gl.zeros([64, 64], gl.float32, SL))
        O = gl.zeros([64, HALF], gl.float32, OL)
        state = (O, row_max, row_sum, row_max)
        mbarrier.wait(q_ready, turn & 1)
        for j in range(0, steps - 1):
            O_next, A, row_max, row_sum, highest = right_step(
                state, it, j * 128, tile, q_smem, smem, step_bars, scale, HOW, False, LAYOUTS,
                DIMS,
            )  # fmt: skip
            b, _phase = block_of(it, ST)
            O, A = warpgroup_mma_wait(0, deps=(O_next, A))
            mbarrier.arrive(free.index(2 * b + 3), count=1)
            state = (O, row_max, row_sum, highest)
            it += 1
        O_next, A, row_max, row_sum, highest = right_step(
            state, it, (steps - 1) * 128, tile, q_smem, smem, step_bars, scale, HOW, True, LAYOUTS,
            DIMS,
        )  # fmt: skip
        b, _phase = block_of(it, ST)
        it += 1
        own = own_sums(row_sum, row_max, highest, smem[3][1], 1, HOW[2])
        turn += 1
        next_tile, steps = read_work_item(info, t_bars, turn, MASK, HOW[5])
        O, A = warpgroup_mma_wait(0, deps=(O_next, A))
        mbarrier.arrive(free.index(2 * b + 3), count=1)
        every, most = both_sums(own, highest, smem[3][1], 1, HOW[2])
        place = place_of(tile, scale[1], MASK, HOW[5])
        finish_right(O, row_max, every, most, place, scale[1], results, HOW)
        tile = next_tile


@gluon.jit
def column_tiles(
    NUMBER: gl.constexpr, DIMS: gl.constexpr, LAYOUTS: gl.constexpr, DTYPE: gl.constexpr
):
    """NUMBER tiles of 64 rows: left, right and rope columns. A missing rope stands for left."""
    left = gl.allocate_shared_memory(DTYPE, [NUMBER, 64, DIMS[0]], LAYOUTS[0])
    right = gl.allocate_shared_memory(DTYPE, [NUMBER, 64, DIMS[0]], LAYOUTS[0])
    rope = left
    if DIMS[1] > 0:
        rope = gl.allocate_shared_memory(DTYPE, [NUMBER, 64, DIMS[1]], LAYOUTS[1])
    return left, right, rope


@gluon.jit
def load(  # noqa: PLR0913
    info, source, rows, shape, descs, smem, bars, ST: gl.constexpr, DIMS: gl.constexpr,
    PAGE: gl.constexpr, LANES: gl.constexpr, SCALED: gl.constexpr, AFTER: gl.constexpr,
):  # fmt: skip
    """The producer for plain rows, or for rows of an FP8 cache."""
    if AFTER:
        wait_for_kernel_before()
    if SCALED > 0:
        CACHE: gl.constexpr = (PAGE, SCALED)
        fp8_producer(info, source, rows, shape, descs, smem, bars, ST, DIMS, CACHE, LANES)
    else:
        producer(info, source, rows[:3], shape, descs, smem, bars, ST, DIMS, PAGE, LANES)


COUNTS = [
    "capacity", "topk", "rows", "tiles", "head_blocks", "heads", "batch", "total_q", "rest_q",
    "part_rows", "factor",
]  # fmt: skip
STRIDES = [
    "indices_stride", "stride_page", "stride_row", "scale_page", "scale_row", "out_stride_t",
    "out_stride_h", "lse_stride_t", "lse_stride_h", "logits_stride_t", "logits_stride_h",
]  # fmt: skip
# Vectors of 4-byte elements, read and written one by one: a slice of a tensor is as good as all.
VECTORS = [
    "indices_ptr", "lengths_ptr", "cu_ptr", "lse_ptr", "logits_ptr", "sink_ptr", "scale_ptr",
    "total_ptr", "part_state_ptr", "counter_ptr",
]  # fmt: skip


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def sparse_kernel(  # noqa: PLR0913
    q_half_desc, q_rope_desc, k_half_desc, k_rope_desc, data_ptr, scale_ptr, rope_ptr, indices_ptr,
    lengths_ptr, cu_ptr, out_ptr, lse_ptr, logits_ptr, sink_ptr, total_ptr, part_sums_ptr,
    part_state_ptr, counter_ptr, capacity, factor, topk, rows, tiles, head_blocks, heads, batch,
    total_q, rest_q, part_rows, indices_stride, stride_page, stride_row, scale_page, scale_row,
    out_stride_t, out_stride_h, lse_stride_t, lse_stride_h, logits_stride_t, logits_stride_h,
    ST: gl.constexpr, DIMS: gl.constexpr, PAGE: gl.constexpr, PAGE_SIZE: gl.constexpr,
    MASK: gl.constexpr, SIGN: gl.constexpr, OVERLAY: gl.constexpr, LANES: gl.constexpr,
    SCALED: gl.constexpr, FITS: gl.constexpr, AFTER: gl.constexpr, REGISTERS: gl.constexpr,
    LAYOUTS: gl.constexpr,
):  # fmt: skip
    """k_half_desc, k_rope_desc: of pages whose blocks are boxes (see rows.py), or None.
    DIMS: columns of half a latent, of rope. PAGE: rows of a page, 0 where pages lie end to end.
    MASK: 0: `indices` are lists of rows, one per token; 1, 2: they are a block table of sequences
    (topk: most keys), full or causal, and PAGE_SIZE is what its entries count in.
    OVERLAY: whether P takes the place of rope. SCALED: columns that share a scale, 0 for plain rows
    (see dequantize/rows.py). FITS: with `total_ptr` (see dequantize/kernels.py), run only if the
    rows counted there fit the capacity of a workspace, or only if they do not. AFTER: launched
    before the kernel that fills that workspace has ended. part_sums_ptr,
    part_state_ptr: room for ranges of keys (see pages.py), without it none are split. REGISTERS:
    math, producer. LAYOUTS: of tiles of half a latent, of rope, of P.
    """
    if total_ptr is not None:
        if AFTER:
            wait_for_kernel_before()
        if (gl.load(total_ptr) <= capacity) != FITS:
            return
    DTYPE: gl.constexpr = q_half_desc.dtype
    SPLIT: gl.constexpr = part_sums_ptr is not None
    if SPLIT:
        let_next_begin()  # the merge
    HOW: gl.constexpr = (SIGN, OVERLAY, logits_ptr is not None, MASK, SCALED == 0, SPLIT)
    VECTOR_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    k_smem = column_tiles(2 * ST, DIMS, LAYOUTS, DTYPE)
    q_smem = column_tiles(1, DIMS, LAYOUTS, DTYPE)
    p_smem = k_smem[2]
    if not OVERLAY:
        p_smem = gl.allocate_shared_memory(DTYPE, [2 * ST, 64, 64], LAYOUTS[2])
    bias = gl.allocate_shared_memory(gl.float32, [2 * ST, 64], VECTOR_LAYOUT)
    flags = gl.allocate_shared_memory(gl.int32, [2 * ST, WARPS], VECTOR_LAYOUT)
    row_maxes = gl.allocate_shared_memory(gl.float32, [2, 64], VECTOR_LAYOUT)
    sums = gl.allocate_shared_memory(gl.float32, [3, 64], VECTOR_LAYOUT)
    info = gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], VECTOR_LAYOUT)
    q_bars = barrier_pair(1, 2)
    ready = barriers(4 * ST, 128)
    free = barriers(4 * ST, 1)
    valid = barriers(2 * ST, 1)
    t_bars = (barriers(2, 1), barriers(2, 2))
    smem = (k_smem, p_smem, (bias, flags), (row_maxes, sums))
    bars = (q_bars, ready, free, valid, t_bars)
    out = (out_ptr, out_stride_t, out_stride_h)
    lse = (lse_ptr, lse_stride_t, lse_stride_h)
    max_logits = (logits_ptr, logits_stride_t, logits_stride_h)
    results = (out, lse, max_logits, sink_ptr, (part_sums_ptr, part_state_ptr))
    source = (
        indices_ptr, lengths_ptr, topk, indices_stride, rows, cu_ptr, batch, total_q, heads,
        PAGE_SIZE, MASK, part_sums_ptr, rest_q, counter_ptr, part_rows,
    )  # fmt: skip
    data = (data_ptr, stride_page, stride_row, scale_ptr, scale_page, scale_row, rope_ptr)
    load_smem = (q_smem, k_smem, (bias, flags))
    descs = (q_half_desc, q_rope_desc, k_half_desc, k_rope_desc)
    shape = (tiles, head_blocks)
    gl.warp_specialize(
        [
            (left, (info, q_smem, smem, bars, results, (factor, heads), HOW, DIMS)),
            (right, (info, q_smem, smem, bars, results, (factor, heads), HOW, DIMS)),
            (load, (info, source, data, shape, descs, load_smem, bars, ST, DIMS, PAGE, LANES,
                    SCALED, AFTER)),
        ],
        [4, 4],
        [REGISTERS[0], REGISTERS[1]],
    )  # fmt: skip
