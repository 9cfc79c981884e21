"""The producer warp: all loads, by TMA.

Key blocks are loaded from the last to the first, so that the blocks that need a mask come first and
the loop over the others has none. Within a block: K (its parts and rope), for the first block Q,
then V. K and V have barriers of their own: scores do not wait for V.

Rows after the last key of a range lie in memory that belongs to a neighbor, or to nobody. Their
scores are masked, but a weight of 0 times a NaN is a NaN, so V must not hold them: its descriptor
is ragged. Two more dimensions move the end of the row dimension to wherever the range ends, and
the hardware fills the rest of the box with zeros (see `ragged` in descriptors.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from openmla.kernels.gluon.boxes import load_pages, load_ragged, load_rows
from openmla.kernels.gluon.compat import tma_load
from openmla.kernels.hopper.dense.scheduler import (
    BLOCKS,
    HEAD,
    KEY,
    KEYS,
    REQUEST,
    SKIPPED,
    TOKEN,
    get,
)

WGMMA_ROWS = gl.constexpr(64)
WORD_BITS = gl.constexpr(32)


@gluon.jit
def load_queries(descs, smem, bars, token, head, phase, NC: gl.constexpr, DIMS: gl.constexpr):
    """64 rows for each consumer, as soon as it has finished with its last ones."""
    q_main, q_tail, q_rope = descs
    main, tail, rope = smem
    ready, empty = bars
    for w in gl.static_range(NC):
        bar = ready.index(w)
        mbarrier.wait(empty.index(w), phase)
        mbarrier.expect(bar, WGMMA_ROWS * (DIMS[0] + DIMS[1] + DIMS[2]) * 2)
        row = token + w * WGMMA_ROWS
        load_rows(q_main, row, head, 0, bar, main.index(w))
        if DIMS[1] > 0:
            load_rows(q_tail, row, head, DIMS[0], bar, tail.index(w))
        if DIMS[2] > 0:
            load_rows(q_rope, row, head, DIMS[0] + DIMS[1], bar, rope.index(w))


@gluon.jit
def load_mask(desc, smem, barrier, stage, token, key, NC: gl.constexpr):
    """Four words of bits for each query of the tile, from that of `key` on: K's barrier has been
    told. Words after the last, and rows after the last token, are zeros.
    """
    for w in gl.static_range(NC):
        place = smem.index(stage * NC + w)
        tma_load(desc, [token + w * WGMMA_ROWS, key // WORD_BITS], barrier, place)


@gluon.jit
def load_keys(
    descs, smem, barrier, stage, row, head, paged, key, DIMS: gl.constexpr, BN: gl.constexpr,
    ROPE: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    """One block of K: per-head columns, and rope from a tensor or from pages.

    MORE bytes, those of a mask, come to the same barrier.
    """
    k_main, k_tail, k_rope = descs
    main, tail, rope = smem
    line, keys = paged
    mbarrier.expect(barrier, BN * (DIMS[0] + DIMS[1] + DIMS[2]) * 2 + MORE)
    load_rows(k_main, row, head, 0, barrier, main.index(stage))
    if DIMS[1] > 0:
        load_rows(k_tail, row, head, DIMS[0], barrier, tail.index(stage))
    if DIMS[2] > 0:
        if ROPE[0] == "cache":
            load_pages(k_rope, line, key, keys, barrier, rope.index(stage), ROPE[1], BN)
        elif ROPE[0] == "per_head":
            load_rows(k_rope, row, head, 0, barrier, rope.index(stage))
        else:
            load_rows(k_rope, row, 0, 0, barrier, rope.index(stage))


@gluon.jit
def producer(
    info, descs, smem, bars, table, NC: gl.constexpr, BN: gl.constexpr, ST: gl.constexpr,
    DIMS: gl.constexpr, ROPE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Load what the scheduler announces, work item after work item."""
    q_descs, k_descs, v_desc, mask_desc = descs
    q_smem, k_smem, v_smem, mask_smem = smem
    q_bars, k_ready, k_empty, v_ready, v_empty, t_ready, t_empty, t_request = bars
    table_ptr, table_stride = table
    MASK_BYTES: gl.constexpr = 0 if mask_desc is None else NC * WGMMA_ROWS * 16
    turn = gl.program_id(0) * 0
    it = turn  # key blocks so far, over all work items
    mbarrier.wait(t_ready.index(0), 0)
    blocks = get(info, 0, BLOCKS, 1)
    while blocks > 0:
        slot = turn & 1
        head = get(info, slot, HEAD, 1)
        token = get(info, slot, TOKEN, 1)
        start = get(info, slot, KEY, 1)
        keys = get(info, slot, KEYS, 1)
        skipped = keys * 0
        line = (skipped, skipped)  # of the block table; without pages there is none
        if (SPLIT > 0) and (ROPE[0] == "cache" or mask_desc is not None):
            skipped = get(info, slot, SKIPPED, 1)
        if ROPE[0] == "cache":
            request = get(info, slot, REQUEST, 1)
            line = (table_ptr + request.to(gl.int64) * table_stride, table_stride)
        mbarrier.arrive(t_empty.index(slot), count=1)
        for c in range(0, blocks):
            late = c == gl.maximum(blocks - 2, 0)
            mbarrier.arrive(t_request.index(0), count=1, pred=late)
            stage = it % ST
            phase = ((it // ST) & 1) ^ 1
            row = (blocks - 1 - c) * BN
            mbarrier.wait(k_empty.index(stage), phase)
            load_keys(
                k_descs, k_smem, k_ready.index(stage), stage, start + row, head,
                (line, skipped + keys), skipped + row, DIMS, BN, ROPE,
                MASK_BYTES,
            )  # fmt: skip
            if mask_desc is not None:
                load_mask(
                    mask_desc, mask_smem, k_ready.index(stage), stage, token, skipped + row, NC
                )
            if c == 0:
                load_queries(q_descs, q_smem, q_bars, token, head, (turn & 1) ^ 1, NC, DIMS)
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_ready.index(stage), BN * DIMS[3] * 2)
            load_ragged(v_desc, start, keys, row, head, v_ready.index(stage), v_smem.index(stage))
            it += 1
        turn += 1
        mbarrier.wait(t_ready.index(turn & 1), (turn >> 1) & 1)
        blocks = get(info, turn & 1, BLOCKS, 1)
