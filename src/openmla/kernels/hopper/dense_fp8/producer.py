"""The producer warp: all loads, by TMA but for scales. As dense/producer.py, with FP8 widths.

| tile | rows from | bytes of an element |
|---|---|---|
| Q: main, tail, rope | q | 1 |
| K: main, tail | k_nope | 1 |
| rope | k_rope, or pages of a bf16 cache | 1 or 2 |
| scales of keys | k_scale, a vector | 4 |
| V | v or its copy (upcast.py), ragged: zeros after the last key | 2 |
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from openmla.kernels.gluon.boxes import load_pages, load_ragged, load_rows, load_scales
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


@gluon.jit
def load_queries(descs, smem, bars, token, head, phase, NC: gl.constexpr, DIMS: gl.constexpr):
    """64 rows for each consumer, as soon as it has finished with its last ones."""
    ready, empty = bars
    for w in gl.static_range(NC):
        bar = ready.index(w)
        mbarrier.wait(empty.index(w), phase)
        mbarrier.expect(bar, WGMMA_ROWS * (DIMS[0] + DIMS[1] + DIMS[2]))
        row = token + w * WGMMA_ROWS
        load_rows(descs[0], row, head, 0, bar, smem[0].index(w))
        if DIMS[1] > 0:
            load_rows(descs[1], row, head, DIMS[0], bar, smem[1].index(w))
        if DIMS[2] > 0:
            load_rows(descs[2], row, head, DIMS[0] + DIMS[1], bar, smem[2].index(w))


@gluon.jit
def load_keys(
    descs, smem, barrier, stage, row, head, paged, key, DIMS: gl.constexpr, BN: gl.constexpr,
    ROPE: gl.constexpr,
):  # fmt: skip
    """One block of K: per-head columns, rope from a tensor or from pages, scales."""
    k_main, k_tail, k_rope, k_scale = descs
    main, tail, rope, scales = smem
    line, keys = paged
    ROPE_BYTES: gl.constexpr = rope.dtype.primitive_bitwidth // 8
    mbarrier.expect(barrier, BN * (DIMS[0] + DIMS[1] + DIMS[2] * ROPE_BYTES))
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
    if k_scale is not None:
        load_scales(k_scale, row, keys - key, barrier, scales.index(stage))


@gluon.jit
def producer(
    info, descs, smem, bars, table, NC: gl.constexpr, BN: gl.constexpr, ST: gl.constexpr,
    DIMS: gl.constexpr, ROPE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Load what the scheduler announces, work item after work item, the last keys first."""
    q_descs, k_descs, v_desc = descs
    q_smem, k_smem, v_smem = smem
    q_bars, k_ready, k_empty, v_ready, v_empty, t_ready, t_empty, t_request = bars
    table_ptr, table_stride = table
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
        if SPLIT > 0:
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
            )  # fmt: skip
            if c == 0:
                load_queries(q_descs, q_smem, q_bars, token, head, (turn & 1) ^ 1, NC, DIMS)
            mbarrier.wait(v_empty.index(stage), phase)
            bar = v_ready.index(stage)
            mbarrier.expect(bar, BN * DIMS[3] * 2)
            load_ragged(v_desc, start, keys, row, head, bar, v_smem.index(stage))
            it += 1
        turn += 1
        mbarrier.wait(t_ready.index(turn & 1), (turn >> 1) & 1)
        blocks = get(info, turn & 1, BLOCKS, 1)
