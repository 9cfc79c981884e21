"""The producer of the sparse backward: Q and d_out once, then the rows of a list, block by block.

Rows are copied 16 bytes at a time (cp.async); where an entry does not count the copy fills in
zeros, so no garbage is ever multiplied. A block is loaded in two parts, left latent columns, then
right and rope columns, each as soon as its last reader is done with it. Indices are loaded a block
ahead.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from openmla.kernels.gluon.compat import cp_async, reinterpret, tma_load
from openmla.kernels.gluon.scores import MINUS_INF

ENTRIES = gl.constexpr(64)  # of a block
VECTOR = gl.constexpr(8)  # elements of 16 bytes; the stride of rows comes in this unit


@gluon.jit
def load_heads(desc, item, COLUMN: gl.constexpr, barrier, tile):
    """Load 64 heads of a query by TMA; zeros past the last head. item: WorkItem."""
    BOX: gl.constexpr = desc.block_shape
    LAYOUT: gl.constexpr = desc.layout
    box = reinterpret(tile, desc.dtype, BOX, LAYOUT)
    tma_load(desc, [item.token, item.head_block * 64, COLUMN], barrier, box)


@gluon.jit
def load_queries(sources, smem, barrier, item, DIMS: gl.constexpr):
    """Load Q and d_out of a work item. sources: Sources, smem: Smem."""
    PANEL: gl.constexpr = smem.d_out.shape[2]
    mbarrier.expect(barrier, 64 * (2 * DIMS.latent + DIMS.rope) * 2)
    for i in gl.static_range(DIMS.latent // PANEL):
        load_heads(sources.q.panel, item, i * PANEL, barrier, smem.q.latent.index(i))
        load_heads(sources.d_out, item, i * PANEL, barrier, smem.d_out.index(i))
    if DIMS.rope > 0:
        load_heads(sources.q.rope, item, DIMS.latent, barrier, smem.q.rope.index(0))


@gluon.jit
def entries(lists, item, first, LAYOUT: gl.constexpr):
    """Indices of the 64 entries from `first` on; -1 past the end. lists: Lists, item: WorkItem."""
    place = gl.arange(0, ENTRIES, LAYOUT) + first
    line = lists.indices + item.token.to(gl.int64) * lists.stride
    return gl.load(line + place, mask=place < item.count, other=-1)


@gluon.jit
def copy(tile, start, ok, FIRST: gl.constexpr, LAYOUT: gl.constexpr):
    """Start copying columns FIRST … of 64 rows into a tile; zeros where an entry does not count."""
    column = gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT)) + FIRST
    cp_async(tile, start[:, None] + column[None, :], mask=ok[:, None])


@gluon.jit
def producer(lists, sources, item, smem, bars, DIMS: gl.constexpr):
    """Load a work item: WorkItem. lists: Lists, sources: Sources, smem: Smem, bars: Barriers."""
    HALF: gl.constexpr = DIMS.latent // 2
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    RL: gl.constexpr = gl.SliceLayout(1, BL)
    load_queries(sources, smem, bars.q_ready.index(0), item, DIMS)
    index = entries(lists, item, 0, RL)
    for first in range(0, item.count, ENTRIES):
        phase = (first // ENTRIES & 1) ^ 1
        ok = (index >= 0) & (index < lists.row_count)
        step = lists.row_stride.to(gl.int64) * VECTOR
        start = lists.rows + gl.where(ok, index, 0).to(gl.int64) * step
        index = entries(lists, item, first + ENTRIES, RL)
        mbarrier.wait(bars.k_empty.index(0), phase)
        smem.bias.store(gl.where(ok, 0.0, MINUS_INF))
        mbarrier.arrive(bars.valid_ready.index(0), count=1)
        copy(smem.k.left.index(0), start, ok, 0, BL)
        async_copy.mbarrier_arrive(bars.k_ready.index(0), increment_count=False)
        mbarrier.wait(bars.k_empty.index(1), phase)
        copy(smem.k.right.index(0), start, ok, HALF, BL)
        if DIMS.rope > 0:
            copy(smem.k.rope.index(0), start, ok, DIMS.latent, BL)  # both have given it back
        async_copy.mbarrier_arrive(bars.k_ready.index(1), increment_count=False)
