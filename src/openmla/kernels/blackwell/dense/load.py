"""The load warp: Q once, then K and V of every block of keys, by TMA; scales by cp.async.

Blocks come from the last to the first, so that the blocks that need a mask come first. The first K
brings Q with it, on the same barrier; with two query tiles the second has a barrier of its own.
Rows of V after a request's last key must be zeros, because a weight of 0 times a NaN is a NaN: V's
descriptor is ragged. Rows of K and rope there may hold anything: their scores are masked.

Arguments of all functions: Sources `sources` (or TMA descriptors `descs`, the Parts of Q or K),
Tiles `smem` (or Parts), Barriers `bars`, BlockTable `table`, WorkItem `work`, LoadHow `HOW`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

from openmla.kernels.blackwell.dense.records import TableLine
from openmla.kernels.blackwell.dense.ring import k_place, tile_of, v_place
from openmla.kernels.blackwell.dequantize import raw_of
from openmla.kernels.gluon.boxes import load_pages, load_ragged, load_rows, load_scales

Q_ROWS = gl.constexpr(128)


@gluon.jit
def load_queries(descs, smem, bar, bars, half: gl.constexpr, work, HOW: gl.constexpr):
    """Query tile `half`: 128 rows of Q. The caller has announced the bytes on `bar`; raw rope has a
    barrier of its own."""
    COLUMNS: gl.constexpr = HOW.columns
    row = work.token + half * descs.main.block_shape[0]
    load_rows(descs.main, row, work.head, 0, bar, smem.main.index(half))
    if COLUMNS.tail > 0:
        load_rows(descs.tail, row, work.head, COLUMNS.main, bar, smem.tail.index(half))
    column: gl.constexpr = COLUMNS.main + COLUMNS.tail
    if HOW.raw.q:
        raw_bar = bars.q_raw.index(half)
        mbarrier.expect(raw_bar, Q_ROWS * COLUMNS.rope)
        raw_tile = raw_of(smem.rope.index(half), HOW.raw)
        load_rows(descs.rope, row, work.head, column, raw_bar, raw_tile)
    elif COLUMNS.rope > 0:
        load_rows(descs.rope, row, work.head, column, bar, smem.rope.index(half))


@gluon.jit
def load_block_scales(scale_ptr, scale_smem, bars, work, j, RING: gl.constexpr):
    """The scales of the keys of the j-th block; the softmax groups read and release them."""
    place = j % RING.rope_buffers
    row = (work.blocks - 1 - j) * scale_smem.shape[1]
    mbarrier.wait(bars.scales.empty.index(place), ((j // RING.rope_buffers) & 1) ^ 1)
    first, left = work.first_key + row, work.keys - row
    load_scales(scale_ptr, first, left, bars.scales.full.index(place), scale_smem.index(place))


@gluon.jit
def key_head(work, HOW: gl.constexpr):
    """The head of K and V that the work item reads."""
    return work.head if HOW.group == 1 else work.head // HOW.group


@gluon.jit
def load_keys(descs, smem, bars, table, work, j, ONE: gl.constexpr, HOW: gl.constexpr):
    """K of the j-th block, counted from the last; Q comes on the same barrier as the first."""
    COLUMNS: gl.constexpr = HOW.columns
    ROPE: gl.constexpr = HOW.rope
    BYTES: gl.constexpr = HOW.tile_bytes
    slot, phase, place = k_place(j, ONE, HOW.ring)
    BN: gl.constexpr = smem.main.shape[1]
    bar = bars.ring.full.index(slot)
    row = (work.blocks - 1 - j) * BN
    mbarrier.wait(bars.ring.empty.index(slot), phase ^ 1)
    if j == 0:
        mbarrier.expect(bar, BYTES.q + BYTES.k)
    else:
        mbarrier.expect(bar, BYTES.k)
    rope_bar = bar
    rope_tile = None
    if COLUMNS.rope > 0:
        rope_tile = smem.rope.index(place)
    if HOW.raw.k:
        rope_bar = bars.k_raw.index(place)
        mbarrier.expect(rope_bar, BN * COLUMNS.rope)
        rope_tile = raw_of(rope_tile, HOW.raw)
    key = work.first_key + row
    head = key_head(work, HOW)
    load_rows(descs.main, key, head, 0, bar, tile_of(smem.main, slot, COLUMNS.main))
    if COLUMNS.tail > 0:
        load_rows(descs.tail, key, head, COLUMNS.main, bar, smem.tail.index(slot))
    if ROPE.source == "cache":
        line = TableLine(table.base + work.request.to(gl.int64) * table.entries, table.entries)
        load_pages(descs.rope, line, row, work.keys, rope_bar, rope_tile, ROPE.page_size, BN)
    elif ROPE.source == "per_head":
        load_rows(descs.rope, key, head, 0, rope_bar, rope_tile)
    elif ROPE.source == "shared":
        load_rows(descs.rope, key, 0, 0, rope_bar, rope_tile)
    return bar


@gluon.jit
def load_values(desc, v_smem, bars, work, j, ONE: gl.constexpr, HOW: gl.constexpr):
    """V of the j-th block, counted from the last."""
    slot, phase, at = v_place(j, ONE, HOW.ring)
    BN: gl.constexpr = v_smem.shape[1]
    bar = bars.ring.full.index(at)
    mbarrier.wait(bars.ring.empty.index(at), phase ^ 1)
    mbarrier.expect(bar, HOW.tile_bytes.v)
    row = (work.blocks - 1 - j) * BN
    tile = tile_of(v_smem, slot, HOW.columns.v)
    load_ragged(desc, work.first_key, work.keys, row, key_head(work, HOW), bar, tile)


@gluon.jit
def load_two(sources, smem, bars, table, work, HOW: gl.constexpr):
    """Two query tiles: Q0 K0, Q1, V0, K1, V1, …"""
    for j in range(0, work.blocks):
        bar = load_keys(sources.k, smem.k, bars, table, work, j, False, HOW)
        if sources.key_scales is not None:
            load_block_scales(sources.key_scales, smem.key_scales, bars, work, j, HOW.ring)
        if j == 0:
            load_queries(sources.q, smem.q, bar, bars, 0, work, HOW)
            mbarrier.expect(bars.second.index(0), HOW.tile_bytes.q)
            load_queries(sources.q, smem.q, bars.second.index(0), bars, 1, work, HOW)
        load_values(sources.v, smem.v, bars, work, j, False, HOW)


@gluon.jit
def load_one(sources, smem, bars, table, work, HOW: gl.constexpr):
    """One query tile: Q K0, K1, V0, K2, V1, K3, …"""
    for j in range(0, work.blocks + 1):
        if j < work.blocks:
            bar = load_keys(sources.k, smem.k, bars, table, work, j, True, HOW)
            if j == 0:
                load_queries(sources.q, smem.q, bar, bars, 0, work, HOW)
            if sources.key_scales is not None:
                load_block_scales(sources.key_scales, smem.key_scales, bars, work, j, HOW.ring)
        if j > 0:
            load_values(sources.v, smem.v, bars, work, j - 1, True, HOW)


@gluon.jit
def load(
    sources,
    smem,
    bars,
    table,
    work,
    QUERIES: gl.constexpr,
    HOW: gl.constexpr,
):
    """The load partition. QUERIES: as in multiply.py."""
    if QUERIES == 1:
        load_one(sources, smem, bars, table, work, HOW)
    elif QUERIES == 2:
        load_two(sources, smem, bars, table, work, HOW)
    else:
        if work.rows > Q_ROWS:
            load_two(sources, smem, bars, table, work, HOW)
        else:
            load_one(sources, smem, bars, table, work, HOW)
