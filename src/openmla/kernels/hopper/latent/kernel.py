# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""MLA prefill in latent form on Hopper: every head reads the same gathered rows. bf16 or fp16.

A program works on 64 rows of scores at a time and walks their keys in steps of two blocks of 64.
The rows are heads of one token that has its own list of keys, or heads of several tokens of a
sequence. V is the first columns of K. The output columns are split between two warp-groups, because
64 x 512 fp32 sums fill half of an SM's registers.

| partition | warps | registers | does |
|---|---|---|---|
| left (default) | 4 | 216 | scores of block 0; P0 · V0 and P1 · V1 for the left output columns |
| right | 4 | 216 | scores of block 1; P0 · V0 and P1 · V1 for the right output columns |
| producer | 4 | 72 | loads Q and rows (rows.py), or dequantizes them (rows_fp8.py, rows_v4.py) |

Where FP8 rows are dequantized the registers are 200, 200 and 104.

| barrier | number | completed by (count) | waited for by |
|---|---|---|---|
| q_ready | 1 | TMA bytes of Q (1) | left, right |
| q_empty | 1 | left, right, after the last scores of a work item (2) | producer |
| k_ready | 4 ST | threads of the producer: block 0 left, right, block 1 left, right (128) | both |
| k_empty | 4 ST | the only warp-group that multiplies V with it: left, right (1) | producer |
| valid_ready | 2 ST | producer: validity of a block of a list is written (1) | left, right |
| item_ready | 2 | producer: a work item is published in `info` (1) | left, right |
| item_empty | 2 | left, right: it is read (2) | producer |
| bar 8 – 13 (named) | | see signals.py | left, right |

| shared memory | bytes (512 + 64, ST 1) |
|---|---|
| q_left, q_right, q_rope | 64 x (256 + 256 + 64) x 2 = 73728 |
| k_left, k_right, k_rope | 2 ST x 64 x (256 + 256 + 64) x 2 = 147456 |
| p | aliases k_rope, which scores are done with. Narrower rope: 2 ST x 64 x 64 x 2 of its own |
| bias, flags (of lists) | 2 ST x 64 x 4, 2 ST x 4 x 4 |
| row_maxes, sums (and largest scores) | 2 x 64 x 4, 3 x 64 x 4 |
| info, barriers | 64 + 8 x (2 + 10 ST + 4) |
| epilogue's change of layout, warp states | 4096 + 8 |

A step, in time (see softmax.py for what the maxima mean):

    left   softmax 0 | P0 V0     | P1 V1         | scores 0 of the next step
    right  scores 1  | softmax 1 | P0 V0 | P1 V1 | wait for rows | scores 1 of the next step

A warp that issues wgmma is held up until the tensor core takes the instruction. So whatever the
other warp-group waits for is signaled first and multiplied after: the reference of block 0 as soon
as it is known, P0 and P1 as soon as they are written.

Where rows are dequantized (rows_fp8.py), block 1 comes late, and the right warp-group multiplies
P0 V0 before it scores block 1.

At the end of a work item each warp-group publishes its row sums while its last product runs. Right
then stores its half of the output, while the next block 1 is being gathered. Left first computes P0
of the next work item, which right will wait for; it stores its half while right computes P1.

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

from openmla.kernels.gluon.barriers import (
    barrier_pair,
    barriers,
    let_next_begin,
    wait_for_kernel_before,
)
from openmla.kernels.gluon.compat import thread_barrier
from openmla.kernels.gluon.dequantize.records import CacheFormat, CacheRows
from openmla.kernels.gluon.pages import Pages
from openmla.kernels.gluon.ranges.records import Output, Parts
from openmla.kernels.gluon.scores import MINUS_INF, opaque_zero, signed
from openmla.kernels.gluon.turning import COUNTS as ANGLE_COUNTS
from openmla.kernels.gluon.turning import VECTORS as ANGLE_VECTORS
from openmla.kernels.gluon.turning import Angles
from openmla.kernels.hopper.accumulator import rescale_rows
from openmla.kernels.hopper.latent.epilogue import (
    divisors,
    finish_right,
    is_somewhere,
    nowhere,
    place_of,
    write_left,
)
from openmla.kernels.hopper.latent.records import (
    LISTED,
    SECOND_COUNTS,
    SECOND_STRIDES,
    SECOND_VECTORS,
    Barriers,
    ColumnTiles,
    Ended,
    How,
    Results,
    RowDescriptors,
    Sequences,
    Smem,
    Source,
    State,
    Stats,
    TileCounts,
    Validity,
)
from openmla.kernels.hopper.latent.rows import producer
from openmla.kernels.hopper.latent.rows_fp8 import fp8_producer
from openmla.kernels.hopper.latent.rows_several import several_producer
from openmla.kernels.hopper.latent.signals import (
    allocate_info,
    read_work_item,
    signal_p0,
    signal_p1,
    signal_reference,
    signal_sums,
    wait_p0,
    wait_p1,
    wait_reference,
    wait_sums,
    wait_tile,
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
from openmla.kernels.hopper.latent.source import masked

WARPS = gl.constexpr(4)


@gluon.jit
def issue_scores(
    q,
    k,
    k_ready,
    b,
    phase,
    BLOCK: gl.constexpr,
    SL: gl.constexpr,
    DIMS: gl.constexpr,
    COPIED: gl.constexpr,
):
    """Start the scores of a block, part by part as its tiles arrive: 2 groups of wgmma, 3 with
    rope. q, k: `ColumnTiles`."""
    z = opaque_zero()
    S = gl.zeros([64, 64], gl.float32, SL)
    wait_tile(k_ready.index(2 * b + 2 * BLOCK), phase, COPIED)
    columns = k.left.index(z + b + BLOCK).permute((1, 0))
    S = warpgroup_mma(q.left.index(z), columns, S, use_acc=False, is_async=True)
    if BLOCK == 1 and DIMS.rope > 0:
        columns = k.rope.index(z + b + 1).permute((1, 0))
        S = warpgroup_mma(q.rope.index(z), columns, S, is_async=True)
    wait_tile(k_ready.index(2 * b + 2 * BLOCK + 1), phase, COPIED)
    columns = k.right.index(z + b + BLOCK).permute((1, 0))
    S = warpgroup_mma(q.right.index(z), columns, S, is_async=True)
    if BLOCK == 0 and DIMS.rope > 0:
        S = warpgroup_mma(q.rope.index(z), k.rope.index(z + b).permute((1, 0)), S, is_async=True)
    return S


@gluon.jit
def any_missing(validity, valid_ready, b, phase, MASK: gl.constexpr):
    """Whether block b of a list has a key that is not there (`Validity`). It is asked while the
    block's scores are computed."""
    if MASK == LISTED:
        ALL: gl.constexpr = gl.BlockedLayout([WARPS], [32], [WARPS], [0])  # every thread has all
        mbarrier.wait(valid_ready.index(b), phase)
        return gl.max(validity.flags.index(b).load(ALL), 0)
    else:
        return 0


@gluon.jit
def higher(highest, S, factor, LOGITS: gl.constexpr):
    """The largest score so far, if max_logits are wanted."""
    if LOGITS:
        highest = gl.maximum(highest, max_of_rows(S) * factor)
    return highest


@gluon.jit
def own_sums(row_sum, row_max, highest, sums, SIDE: gl.constexpr, LOGITS: gl.constexpr):
    """Row sums over a warp-group's own block of all steps, also written for the other one."""
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
def left_step(  # noqa: PLR0913
    S,
    missing,
    state,
    ended,
    it,
    first,
    tile,
    smem,
    bars,
    results,
    factor,
    heads,
    HOW: gl.constexpr,
    PL: gl.constexpr,
):
    """From the scores of block 0 to the left columns: the `State` after the step, with P1 · V1
    still in flight.

    In the first step of a work item O still holds the work item that `Ended` before. It is stored
    when the right warp-group has got all that it waits for.
    """
    O, row_max, row_sum, highest = state
    k_left = smem.k.left
    row_maxes = smem.stats.row_maxes
    RL: gl.constexpr = row_max.type.layout
    b, _phase = block_of(it, k_left.shape[0] // 2)
    z = opaque_zero()
    S = masked(signed(S, HOW.sign), missing, smem.validity, b, tile, first, heads, HOW.mask)
    highest = higher(highest, S, factor, HOW.wants_logits)
    row_max0 = moved(S, row_max, factor)
    row_maxes.index(0).store(row_max0)
    signal_reference()
    rescale = follow(row_max, row_max0)
    weights, row_sum = weigh(S, row_max0, rescaled(row_sum, rescale), factor)
    P = weights.to(k_left.dtype)
    if HOW.p_overlays_rope:
        thread_barrier()  # every warp has finished the scores, which read the rope tile
    smem.p.index(z + b).store(P)
    fence_async_shared()
    signal_p0(it)
    if (first == 0) & is_somewhere(ended.place, HOW.mask):
        write_left(O, ended.inverse, results, ended.place, heads, HOW)
        O = gl.zeros_like(O)
    O = rescale_rows(O, rescale)
    A = gl.convert_layout(P, PL)
    O_next = warpgroup_mma(A, k_left.index(z + b), O, is_async=True)
    O, A = warpgroup_mma_wait(0, deps=(O_next, A))
    mbarrier.arrive(bars.k_empty.index(2 * b), count=1)
    wait_p1()
    row_max = row_maxes.index(1).load(RL)
    rescale = follow(row_max0, row_max)
    row_sum = rescaled(row_sum, rescale)
    O = rescale_rows(O, rescale)
    O_next = warpgroup_mma(smem.p.index(z + b + 1), k_left.index(z + b + 1), O, is_async=True)
    return State(O=O_next, row_max=row_max, row_sum=row_sum, highest=highest)


@gluon.jit
def left(info, smem, bars, results, factor, heads, HOW: gl.constexpr, DIMS: gl.constexpr):
    """Block 0 of every step, and the left output columns."""
    ST: gl.constexpr = smem.k.left.shape[0] // 2
    HALF: gl.constexpr = DIMS.latent // 2
    MASK: gl.constexpr = HOW.mask
    LOGITS: gl.constexpr = HOW.wants_logits
    COPIED: gl.constexpr = HOW.is_copied
    SPLIT: gl.constexpr = HOW.is_split
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OL, k_width=2)
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    k_ready, k_empty, valid_ready = bars.k_ready, bars.k_empty, bars.valid_ready
    sums = smem.stats.sums
    # 4 x steps so far + work items so far modulo 4: in two registers, Triton 3.9 would spill one.
    count = gl.program_id(0) * 0
    tile, steps = read_work_item(info, bars, count, MASK, SPLIT)
    S = gl.zeros([64, 64], gl.float32, SL)
    missing = count * 0
    if steps > 0:
        mbarrier.wait(bars.q_ready, 0)
        S_next = issue_scores(smem.q, smem.k, k_ready, count, 0, 0, SL, DIMS, COPIED)
        missing += any_missing(smem.validity, valid_ready, 0, 0, MASK)
        S = warpgroup_mma_wait(0, deps=(S_next,))
    # A work item that has ended, and whose O is still to be divided and stored.
    O = gl.zeros([64, HALF], gl.float32, OL)
    inverse = gl.zeros([64], gl.float32, RL)
    place = nowhere(tile, MASK)
    while steps > 0:
        # S holds the scores of block 0 of the step.
        row_max = gl.full([64], MINUS_INF, gl.float32, RL)
        row_sum = first_sums(S)
        state = State(O=O, row_max=row_max, row_sum=row_sum, highest=row_max)
        ended = Ended(inverse=inverse, place=place)
        for j in range(0, steps - 1):
            O_next, row_max, row_sum, highest = left_step(
                S,
                missing,
                state,
                ended,
                count >> 2,
                j * 128,
                tile,
                smem,
                bars,
                results,
                factor,
                heads,
                HOW,
                PL,
            )
            b, phase = block_of(count >> 2, ST)
            O = warpgroup_mma_wait(0, deps=(O_next,))
            mbarrier.arrive(k_empty.index(2 * b + 2), count=1)
            state = State(O=O, row_max=row_max, row_sum=row_sum, highest=highest)
            count += 4
            b, phase = block_of(count >> 2, ST)
            S_next = issue_scores(smem.q, smem.k, k_ready, b, phase, 0, SL, DIMS, COPIED)
            missing = count * 0 + any_missing(smem.validity, valid_ready, b, phase, MASK)
            S = warpgroup_mma_wait(0, deps=(S_next,))
        mbarrier.arrive(bars.q_empty, count=1)
        O_next, row_max, row_sum, highest = left_step(
            S,
            missing,
            state,
            ended,
            count >> 2,
            (steps - 1) * 128,
            tile,
            smem,
            bars,
            results,
            factor,
            heads,
            HOW,
            PL,
        )
        b, phase = block_of(count >> 2, ST)
        own = own_sums(row_sum, row_max, highest, sums, 0, LOGITS)
        count = (count + 4) & -4 | (count + 1) & 3
        next_tile, steps = read_work_item(info, bars, count & 3, MASK, SPLIT)
        O = warpgroup_mma_wait(0, deps=(O_next,))
        mbarrier.arrive(k_empty.index(2 * b + 2), count=1)
        S = gl.zeros([64, 64], gl.float32, SL)
        place = place_of(tile, heads, MASK, SPLIT)
        if steps > 0:
            b, phase = block_of(count >> 2, ST)
            mbarrier.wait(bars.q_ready, count & 1)
            S_next = issue_scores(smem.q, smem.k, k_ready, b, phase, 0, SL, DIMS, COPIED)
            missing = count * 0 + any_missing(smem.validity, valid_ready, b, phase, MASK)
            every, _most = both_sums(own, highest, sums, 0, LOGITS)
            inverse, _lse = divisors(row_max, every, place, heads, results.sink, MASK, SPLIT)
            S = warpgroup_mma_wait(0, deps=(S_next,))
        else:
            every, _most = both_sums(own, highest, sums, 0, LOGITS)
            inverse, _lse = divisors(row_max, every, place, heads, results.sink, MASK, SPLIT)
        tile = next_tile
    if is_somewhere(place, MASK):
        write_left(O, inverse, results, place, heads, HOW)


@gluon.jit
def follow_left(row_max, row_maxes):
    """(factor for what is relative to `row_max`, the reference after block 0)."""
    wait_reference()
    row_max0 = row_maxes.index(0).load(row_max.type.layout)
    return follow(row_max, row_max0), row_max0


@gluon.jit
def product0(O, rescale, it, p_smem, k_right, k_empty):
    """O with P0 · V0, after which the right tile of block 0 is empty."""
    b, _phase = block_of(it, k_right.shape[0] // 2)
    z = opaque_zero()
    wait_p0(it)
    O = rescale_rows(O, rescale)
    O_next = warpgroup_mma(p_smem.index(z + b), k_right.index(z + b), O, is_async=True)
    O = warpgroup_mma_wait(0, deps=(O_next,))
    mbarrier.arrive(k_empty.index(2 * b + 1), count=1)
    return O


@gluon.jit
def right_step(  # noqa: PLR0913
    state,
    it,
    first,
    tile,
    smem,
    bars,
    factor,
    heads,
    HOW: gl.constexpr,
    LAST: gl.constexpr,
    SL: gl.constexpr,
    PL: gl.constexpr,
    DIMS: gl.constexpr,
):
    """A whole step for the right columns: the `State` after it, with P1 · V1 still in flight, and
    P1, which that product reads from registers."""
    O, row_max, row_sum, highest = state
    k_right = smem.k.right
    row_maxes = smem.stats.row_maxes
    k_ready, k_empty, valid_ready = bars.k_ready, bars.k_empty, bars.valid_ready
    b, phase = block_of(it, k_right.shape[0] // 2)
    z = opaque_zero()
    if HOW.is_copied:
        S_next = issue_scores(smem.q, smem.k, k_ready, b, phase, 1, SL, DIMS, True)
        missing = any_missing(smem.validity, valid_ready, b + 1, phase, HOW.mask)
        rescale, row_max0 = follow_left(row_max, row_maxes)
    else:
        # Rows are dequantized, and block 1 comes late: block 0 is released before.
        rescale, row_max0 = follow_left(row_max, row_maxes)
        O = product0(O, rescale, it, smem.p, k_right, k_empty)
        S_next = issue_scores(smem.q, smem.k, k_ready, b, phase, 1, SL, DIMS, False)
        missing = any_missing(smem.validity, valid_ready, b + 1, phase, HOW.mask)
    S = warpgroup_mma_wait(0, deps=(S_next,))
    if LAST:
        mbarrier.arrive(bars.q_empty, count=1)
    S = signed(S, HOW.sign)
    S = masked(S, missing, smem.validity, b + 1, tile, first + 64, heads, HOW.mask)
    highest = higher(highest, S, factor, HOW.wants_logits)
    row_max = moved(S, row_max0, factor)
    row_maxes.index(1).store(row_max)
    last_rescale = follow(row_max0, row_max)
    weights, row_sum = weigh(S, row_max, rescaled(row_sum, rescale * last_rescale), factor)
    P = weights.to(k_right.dtype)
    if HOW.p_overlays_rope:
        thread_barrier()  # every warp has finished the scores, which read the rope tile
    smem.p.index(z + b + 1).store(P)
    fence_async_shared()
    signal_p1()
    if HOW.is_copied:
        O = product0(O, rescale, it, smem.p, k_right, k_empty)
    O = rescale_rows(O, last_rescale)
    A = gl.convert_layout(P, PL)
    O_next = warpgroup_mma(A, k_right.index(z + b + 1), O, is_async=True)
    return State(O=O_next, row_max=row_max, row_sum=row_sum, highest=highest), A


@gluon.jit
def right(info, smem, bars, results, factor, heads, HOW: gl.constexpr, DIMS: gl.constexpr):
    """Block 1 of every step, the right output columns, and lse."""
    ST: gl.constexpr = smem.k.right.shape[0] // 2
    HALF: gl.constexpr = DIMS.latent // 2
    MASK: gl.constexpr = HOW.mask
    LOGITS: gl.constexpr = HOW.wants_logits
    SPLIT: gl.constexpr = HOW.is_split
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OL, k_width=2)
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    k_empty = bars.k_empty
    sums = smem.stats.sums
    turn = gl.program_id(0) * 0
    it = turn
    tile, steps = read_work_item(info, bars, turn, MASK, SPLIT)
    while steps > 0:
        row_max = gl.full([64], MINUS_INF, gl.float32, RL)
        row_sum = first_sums(gl.zeros([64, 64], gl.float32, SL))
        O = gl.zeros([64, HALF], gl.float32, OL)
        state = State(O=O, row_max=row_max, row_sum=row_sum, highest=row_max)
        mbarrier.wait(bars.q_ready, turn & 1)
        for j in range(0, steps - 1):
            after, A = right_step(
                state, it, j * 128, tile, smem, bars, factor, heads, HOW, False, SL, PL, DIMS
            )
            O_next, row_max, row_sum, highest = after
            b, _phase = block_of(it, ST)
            O, A = warpgroup_mma_wait(0, deps=(O_next, A))
            mbarrier.arrive(k_empty.index(2 * b + 3), count=1)
            state = State(O=O, row_max=row_max, row_sum=row_sum, highest=highest)
            it += 1
        last = (steps - 1) * 128
        after, A = right_step(
            state, it, last, tile, smem, bars, factor, heads, HOW, True, SL, PL, DIMS
        )
        O_next, row_max, row_sum, highest = after
        b, _phase = block_of(it, ST)
        it += 1
        own = own_sums(row_sum, row_max, highest, sums, 1, LOGITS)
        turn += 1
        next_tile, steps = read_work_item(info, bars, turn, MASK, SPLIT)
        O, A = warpgroup_mma_wait(0, deps=(O_next, A))
        mbarrier.arrive(k_empty.index(2 * b + 3), count=1)
        every, most = both_sums(own, highest, sums, 1, LOGITS)
        place = place_of(tile, heads, MASK, SPLIT)
        finish_right(O, row_max, every, most, place, heads, results, HOW)
        tile = next_tile


@gluon.jit
def column_tiles(
    NUMBER: gl.constexpr, DIMS: gl.constexpr, LAYOUTS: gl.constexpr, DTYPE: gl.constexpr
):
    """NUMBER `ColumnTiles` of 64 rows."""
    HALF: gl.constexpr = DIMS.latent // 2
    left = gl.allocate_shared_memory(DTYPE, [NUMBER, 64, HALF], LAYOUTS.latent)
    right = gl.allocate_shared_memory(DTYPE, [NUMBER, 64, HALF], LAYOUTS.latent)
    rope = left
    if DIMS.rope > 0:
        rope = gl.allocate_shared_memory(DTYPE, [NUMBER, 64, DIMS.rope], LAYOUTS.rope)
    return ColumnTiles(left=left, right=right, rope=rope)


@gluon.jit
def load(  # noqa: PLR0913
    info,
    source,
    rows,
    counts,
    q_descs,
    k_descs,
    smem,
    bars,
    ST: gl.constexpr,
    DIMS: gl.constexpr,
    CACHE: gl.constexpr,
    LANES: gl.constexpr,
    CHUNK: gl.constexpr,
    AFTER: gl.constexpr,
    STORED: gl.constexpr,
):
    """The producer for plain rows, or for rows of an FP8 cache, or for sources of both."""
    if AFTER:
        wait_for_kernel_before()
    if STORED is not None:
        several_producer(info, source, rows, counts, q_descs, smem, bars, ST, DIMS, CHUNK, STORED)
    elif CACHE.scale_block > 0:
        fp8_producer(info, source, rows, counts, q_descs, smem, bars, ST, DIMS, CACHE, LANES, CHUNK)
    else:
        producer(info, source, rows, counts, q_descs, k_descs, smem, bars, ST, DIMS, LANES, CHUNK)


COUNTS = [
    "capacity",
    "topk",
    "rows",
    "tiles",
    "head_blocks",
    "heads",
    "batch",
    "total_q",
    "rest_q",
    "part_rows",
    "range_bits",
    "factor",
    "page_size",
    "page_inverse",
    "mean_tiles",
    "page_rows",
    "requests",
    "window",
    *ANGLE_COUNTS,
    *SECOND_COUNTS,
]
STRIDES = [
    "indices_stride",
    "stride_page",
    "stride_row",
    "scale_page",
    "scale_row",
    "out_stride_t",
    "out_stride_h",
    "lse_stride_t",
    "lse_stride_h",
    "logits_stride_t",
    "logits_stride_h",
    *SECOND_STRIDES,
]
# Vectors of 4-byte elements, read and written one by one: a slice of a tensor is as good as all.
VECTORS = [
    "indices_ptr",
    "lengths_ptr",
    "cu_ptr",
    "lse_ptr",
    "logits_ptr",
    "sink_ptr",
    "scale_ptr",
    "total_ptr",
    "part_state_ptr",
    "counter_ptr",
    "request_ptr",
    "begin_ptr",
    *ANGLE_VECTORS,
    *SECOND_VECTORS,
]


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def latent_kernel(  # noqa: PLR0913
    q_half_desc,
    q_rope_desc,
    k_half_desc,
    k_rope_desc,
    data_ptr,
    scale_ptr,
    rope_ptr,
    indices_ptr,
    lengths_ptr,
    cu_ptr,
    out_ptr,
    lse_ptr,
    logits_ptr,
    sink_ptr,
    total_ptr,
    part_sums_ptr,
    part_state_ptr,
    counter_ptr,
    capacity,
    factor,
    topk,
    rows,
    tiles,
    head_blocks,
    heads,
    batch,
    total_q,
    rest_q,
    part_rows,
    range_bits,
    indices_stride,
    stride_page,
    stride_row,
    scale_page,
    scale_row,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    logits_stride_t,
    logits_stride_h,
    page_size,
    page_inverse,
    mean_tiles,
    page_rows,
    request_ptr,
    begin_ptr,
    requests,
    second_data_ptr,
    second_scale_ptr,
    second_indices_ptr,
    second_lengths_ptr,
    second_request_ptr,
    second_begin_ptr,
    second_requests,
    second_topk,
    second_rows,
    second_page_rows,
    second_indices_stride,
    second_stride_page,
    second_stride_row,
    second_scale_page,
    second_scale_row,
    window,
    angles_ptr,
    positions_ptr,
    angle_lines,
    angles_stride,
    ST: gl.constexpr,
    DIMS: gl.constexpr,
    CHUNK: gl.constexpr,
    MASK: gl.constexpr,
    SIGN: gl.constexpr,
    OVERLAY: gl.constexpr,
    LANES: gl.constexpr,
    SCALED: gl.constexpr,
    STORED: gl.constexpr,
    FITS: gl.constexpr,
    AFTER: gl.constexpr,
    REGISTERS: gl.constexpr,
    LAYOUTS: gl.constexpr,
    TURNED: gl.constexpr,
):
    """MLA over rows that lists name (`indices_ptr`: topk rows for each token), or over the pages of
    sequences (`indices_ptr`: their block table, of `topk` keys in a line).

    k_half_desc, k_rope_desc: of pages whose blocks are boxes (see rows.py), or None.
    part_sums_ptr, part_state_ptr: workspace for ranges of keys (see source.py); None: no request is
    split. range_bits: logarithm of the keys of a range of an invariant call, else None.
    page_rows: rows of a page where rows are those of DeepSeek-V4 or V4.1 or one of several sources
    (rows_several.py), else None; STORED: `Stored`, their formats, else None. begin_ptr: where
    tokens see spans of requests; None: they have lists. second_data_ptr: a second source of rows,
    whose arguments are called as the first one's; None: there is none.

    stride_page, scale_page: None where pages lie end to end. page_size, page_inverse: `Pages`, in
    which entries of the block table count, and rows of pages that have gaps. mean_tiles: see
    `Sequences`.

    DIMS: `RowColumns`. CHUNK: requests whose work items are numbered together (see source.py).
    MASK: see records.py. OVERLAY: whether P aliases rope. SCALED: columns that share a scale, 0 for
    plain rows (see dequantize/rows.py). REGISTERS: `Registers`. LAYOUTS: `TileLayouts`. TURNED:
    columns of the results that are turned back by the angles that `angles_ptr` has for
    `positions_ptr` (`Angles`), 0 for none.

    FITS: early exit, with `total_ptr` (see dequantize/kernels.py). Of two launches exactly one
    works: True, over the workspace, if the rows counted there fit its capacity; False, over FP8
    rows, if they do not. AFTER: the launch may begin before the kernel that fills that workspace
    has ended (programmatic dependent launch), and waits for it.
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
    HOW: gl.constexpr = How(
        sign=SIGN,
        mask=MASK,
        wants_logits=logits_ptr is not None,
        p_overlays_rope=OVERLAY,
        is_copied=SCALED == 0,
        is_split=SPLIT,
        turned=TURNED,
    )
    CACHE: gl.constexpr = CacheFormat(scale_block=SCALED)
    VECTOR_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    k_smem = column_tiles(2 * ST, DIMS, LAYOUTS, DTYPE)
    q_smem = column_tiles(1, DIMS, LAYOUTS, DTYPE)
    p_smem = k_smem.rope
    if not OVERLAY:
        p_smem = gl.allocate_shared_memory(DTYPE, [2 * ST, 64, 64], LAYOUTS.p)
    bias = gl.allocate_shared_memory(gl.float32, [2 * ST, 64], VECTOR_LAYOUT)
    flags = gl.allocate_shared_memory(gl.int32, [2 * ST, WARPS], VECTOR_LAYOUT)
    row_maxes = gl.allocate_shared_memory(gl.float32, [2, 64], VECTOR_LAYOUT)
    sums = gl.allocate_shared_memory(gl.float32, [3, 64], VECTOR_LAYOUT)
    info = allocate_info()
    q_ready, q_empty = barrier_pair(1, 2)
    bars = Barriers(
        q_ready=q_ready,
        q_empty=q_empty,
        k_ready=barriers(4 * ST, 128),
        k_empty=barriers(4 * ST, 1),
        valid_ready=barriers(2 * ST, 1),
        item_ready=barriers(2, 1),
        item_empty=barriers(2, 2),
    )
    smem = Smem(
        q=q_smem,
        k=k_smem,
        p=p_smem,
        validity=Validity(bias=bias, flags=flags),
        stats=Stats(row_maxes=row_maxes, sums=sums),
    )
    results = Results(
        out=Output(base=out_ptr, token_stride=out_stride_t, head_stride=out_stride_h),
        lse=Output(base=lse_ptr, token_stride=lse_stride_t, head_stride=lse_stride_h),
        max_logits=Output(
            base=logits_ptr, token_stride=logits_stride_t, head_stride=logits_stride_h
        ),
        sink=sink_ptr,
        parts=Parts(sums=part_sums_ptr, state=part_state_ptr),
        angles=Angles(
            table=angles_ptr, positions=positions_ptr, lines=angle_lines, stride=angles_stride
        ),
    )
    pages = Pages(size=page_size, inverse=page_inverse)
    sequences = None
    if MASK != LISTED:
        sequences = Sequences(
            cu_seqlens_q=cu_ptr,
            batch=batch,
            total_q=total_q,
            heads=heads,
            pages=pages,
            mean_tiles=mean_tiles,
            mask=MASK,
            rest_q=rest_q,
        )
    second_source = None
    second_data = None
    if second_data_ptr is not None:
        second_source = Source(
            table=second_indices_ptr,
            lengths=second_lengths_ptr,
            most_keys=second_topk,
            table_stride=second_indices_stride,
            pool_rows=second_rows,
            sequences=None,
            counter=None,
            part_rows=None,
            range_bits=None,
            begin=second_begin_ptr,
            request=second_request_ptr,
            requests=second_requests,
            page_rows=second_page_rows,
        )
        second_data = CacheRows(
            data_ptr=second_data_ptr,
            page_stride=second_stride_page,
            row_stride=second_stride_row,
            scale_ptr=second_scale_ptr,
            scale_page_stride=second_scale_page,
            scale_row_stride=second_scale_row,
            rope_ptr=None,
            page_rows=second_page_rows,
        )
    source = Source(
        table=indices_ptr,
        lengths=lengths_ptr,
        most_keys=topk,
        table_stride=indices_stride,
        pool_rows=rows,
        sequences=sequences,
        counter=counter_ptr,
        part_rows=part_rows if SPLIT else None,
        range_bits=range_bits,
        begin=begin_ptr,
        request=request_ptr,
        requests=requests,
        page_rows=page_rows,
        second_keys=second_topk,
        second=second_source,
        window=window,
    )
    data = CacheRows(
        data_ptr=data_ptr,
        page_stride=stride_page,
        row_stride=stride_row,
        scale_ptr=scale_ptr,
        scale_page_stride=scale_page,
        scale_row_stride=scale_row,
        rope_ptr=rope_ptr,
        pages=pages,
        page_rows=page_rows,
        second=second_data,
    )
    counts = TileCounts(tiles=tiles, head_blocks=head_blocks)
    q_descs = RowDescriptors(latent=q_half_desc, rope=q_rope_desc)
    k_descs = RowDescriptors(latent=k_half_desc, rope=k_rope_desc)
    gl.warp_specialize(
        [
            (left, (info, smem, bars, results, factor, heads, HOW, DIMS)),
            (right, (info, smem, bars, results, factor, heads, HOW, DIMS)),
            (
                load,
                (
                    info,
                    source,
                    data,
                    counts,
                    q_descs,
                    k_descs,
                    smem,
                    bars,
                    ST,
                    DIMS,
                    CACHE,
                    LANES,
                    CHUNK,
                    AFTER,
                    STORED,
                ),
            ),
        ],
        [4, 4],
        [REGISTERS.consumer, REGISTERS.producer],
    )
