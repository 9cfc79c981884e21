"""The producer warp of the bf16 and of the FP8 kernel: all loads, by TMA but for scales.

| tile | rows from | bytes of an element |
|---|---|---|
| Q: main, tail, rope | q | 2, FP8: 1 |
| K: main, tail | k_nope | 2, FP8: 1 |
| K: rope | k_rope, or pages of a bf16 cache | 2, FP8: 1 or 2 |
| key mask, if there is one | four words of bits per query | 4 |
| scales of keys, if FP8 keys have them | k_scale, a vector | 4 |
| V | v, or its 16-bit copy (gluon/upcast/kernel.py) | 2 |

Key blocks are loaded from the last to the first, so that the blocks that need a mask come first and
the loop over the others has none. Within a block: K (its parts and rope), key mask or scales, for
the first block Q, then V. K and V have barriers of their own: scores do not wait for V.

Rows after the last key of a range belong to the next request, or lie outside the tensor. Their
scores are masked, but a weight of 0 times a NaN is a NaN, so V must not hold them: its descriptor
is ragged. Two more dimensions move the end of the row dimension to the end of the range, and the
hardware fills the rest of the box with zeros (see `ragged` in gluon/descriptors.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from openmla.kernels.gluon.boxes import load_pages, load_ragged, load_rows, load_scales
from openmla.kernels.gluon.compat import tma_load
from openmla.kernels.hopper.dense.records import KeyBlock, TableLine
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
def load_queries(descs, tiles, bars, token, head, phase, NC: gl.constexpr, DIMS: gl.constexpr):
    """Load 64 rows for each consumer, as soon as it has finished with its last ones.

    descs, tiles: ColumnTiles, bars: Barriers, DIMS: Columns.
    """
    BYTES: gl.constexpr = tiles.main.dtype.primitive_bitwidth // 8
    for w in gl.static_range(NC):
        bar = bars.q_ready.index(w)
        mbarrier.wait(bars.q_empty.index(w), phase)
        mbarrier.expect(bar, WGMMA_ROWS * (DIMS.main + DIMS.tail + DIMS.rope) * BYTES)
        load_query_rows(descs, tiles, bar, w, token + w * WGMMA_ROWS, head, DIMS)


@gluon.jit
def load_query_rows(descs, tiles, barrier, number, row, head, DIMS: gl.constexpr):
    """Load 64 rows from `row` on into tiles `number`. descs, tiles: ColumnTiles, DIMS: Columns."""
    load_rows(descs.main, row, head, 0, barrier, tiles.main.index(number))
    if DIMS.tail > 0:
        load_rows(descs.tail, row, head, DIMS.main, barrier, tiles.tail.index(number))
    if DIMS.rope > 0:
        load_rows(descs.rope, row, head, DIMS.main + DIMS.tail, barrier, tiles.rope.index(number))


@gluon.jit
def load_mask(desc, words, barrier, stage, token, key, NC: gl.constexpr):
    """Load four words of bits for each query of the tile, from the word of `key` on.

    K's barrier expects their bytes. Words after the last, and rows after the last token, are zeros.
    """
    for w in gl.static_range(NC):
        place = words.index(stage * NC + w)
        tma_load(desc, [token + w * WGMMA_ROWS, key // WORD_BITS], barrier, place)


@gluon.jit
def load_keys(
    descs,
    tiles,
    barrier,
    stage,
    block,
    DIMS: gl.constexpr,
    BN: gl.constexpr,
    ROPE: gl.constexpr,
    MORE: gl.constexpr,
):
    """Load one block of K: per-head columns, and rope from a tensor or from pages.

    descs, tiles: ColumnTiles, block: KeyBlock, DIMS: Columns, ROPE: Rope. MORE bytes, those of a
    key mask, come to the same barrier.
    """
    row = block.row
    head = block.head
    BYTES: gl.constexpr = tiles.main.dtype.primitive_bitwidth // 8
    ROPE_BYTES: gl.constexpr = tiles.rope.dtype.primitive_bitwidth // 8
    COLUMN_BYTES: gl.constexpr = (DIMS.main + DIMS.tail) * BYTES + DIMS.rope * ROPE_BYTES
    mbarrier.expect(barrier, BN * COLUMN_BYTES + MORE)
    load_rows(descs.main, row, head, 0, barrier, tiles.main.index(stage))
    if DIMS.tail > 0:
        load_rows(descs.tail, row, head, DIMS.main, barrier, tiles.tail.index(stage))
    if DIMS.rope > 0:
        rope = tiles.rope.index(stage)
        if ROPE.source == "cache":
            load_pages(
                descs.rope, block.line, block.key, block.keys, barrier, rope, ROPE.page_size, BN
            )
        elif ROPE.source == "per_head":
            load_rows(descs.rope, row, head, 0, barrier, rope)
        else:
            load_rows(descs.rope, row, 0, 0, barrier, rope)


@gluon.jit
def producer(
    info,
    sources,
    smem,
    bars,
    table,
    NC: gl.constexpr,
    BN: gl.constexpr,
    ST: gl.constexpr,
    DIMS: gl.constexpr,
    ROPE: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """Load what the scheduler announces, work item after work item.

    sources: Sources, smem: SharedMemory, bars: Barriers, table: BlockTable, DIMS: Columns, ROPE:
    Rope. SPLIT: fewest keys of a range of a split request; 0: requests are never split.
    """
    PAGED: gl.constexpr = ROPE.source == "cache"
    MASKED: gl.constexpr = sources.key_mask is not None
    MASK_BYTES: gl.constexpr = NC * WGMMA_ROWS * 16 if MASKED else 0
    turn = gl.program_id(0) * 0
    it = turn  # key blocks so far, over all work items
    mbarrier.wait(bars.t_ready.index(0), 0)
    blocks = get(info, 0, BLOCKS, 1)
    while blocks > 0:
        slot = turn & 1
        head = get(info, slot, HEAD, 1)
        token = get(info, slot, TOKEN, 1)
        start = get(info, slot, KEY, 1)
        keys = get(info, slot, KEYS, 1)
        skipped = keys * 0
        line = None
        if (SPLIT > 0) and (PAGED or MASKED):
            skipped = get(info, slot, SKIPPED, 1)
        if PAGED:
            request = get(info, slot, REQUEST, 1)
            line = TableLine(table.base + request.to(gl.int64) * table.stride, table.stride)
        mbarrier.arrive(bars.t_empty.index(slot), count=1)
        for c in range(0, blocks):
            late = c == gl.maximum(blocks - 2, 0)
            mbarrier.arrive(bars.t_request.index(0), count=1, pred=late)
            stage = it % ST
            phase = ((it // ST) & 1) ^ 1
            row = (blocks - 1 - c) * BN
            mbarrier.wait(bars.k_empty.index(stage), phase)
            k_ready = bars.k_ready.index(stage)
            block = KeyBlock(
                head=head, row=start + row, keys=skipped + keys, key=skipped + row, line=line
            )
            load_keys(sources.k, smem.k, k_ready, stage, block, DIMS, BN, ROPE, MASK_BYTES)
            if MASKED:
                load_mask(sources.key_mask, smem.key_mask, k_ready, stage, token, skipped + row, NC)
            if sources.k_scale is not None:
                left = keys - row
                load_scales(sources.k_scale, block.row, left, k_ready, smem.k_scale.index(stage))
            if c == 0:
                load_queries(sources.q, smem.q, bars, token, head, (turn & 1) ^ 1, NC, DIMS)
            mbarrier.wait(bars.v_empty.index(stage), phase)
            v_ready = bars.v_ready.index(stage)
            mbarrier.expect(v_ready, BN * DIMS.v * 2)
            load_ragged(sources.v, start, keys, row, head, v_ready, smem.v.index(stage))
            it += 1
        turn += 1
        mbarrier.wait(bars.t_ready.index(turn & 1), (turn >> 1) & 1)
        blocks = get(info, turn & 1, BLOCKS, 1)
