"""A buffer that is written through one view and read through another.

| kernel | feature | warps | barriers (count) | shared memory |
|---|---|---|---|---|
| through | a view of another layout, an index, a slice, a permute | 4 | none | tile |
| words | a slice of words that TMA wrote, permuted or not | 4 | loaded (1) | tile |
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from toys.compat import reinterpret, thread_barrier, tma_load


@gluon.jit
def numbered(ROWS: gl.constexpr, COLUMNS: gl.constexpr, L: gl.constexpr):
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, L))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, L))
    return rows[:, None] * COLUMNS + columns[None, :]


@gluon.jit
def through(
    src_ptr,
    o_ptr,
    TILE: gl.constexpr,
    LAYOUT: gl.constexpr,
    CUT: gl.constexpr,
    AS: gl.constexpr,
    AS_LAYOUT: gl.constexpr,
    STAGE: gl.constexpr,
    LENGTH: gl.constexpr,
    PERMUTED: gl.constexpr,
    L: gl.constexpr,
):
    """src [TILE] goes to shared memory; what a view of it has goes to o.

    CUT: the first of its columns and how many, or None; AS, AS_LAYOUT: the other view; STAGE: which
    tile of it, or None; LENGTH: its last rows, of which there may be more.
    """
    at = numbered(TILE[0], TILE[1], L)
    tile = gl.allocate_shared_memory(src_ptr.dtype.element_ty, TILE, LAYOUT)
    tile.store(gl.load(src_ptr + at))
    thread_barrier()
    view = tile
    if CUT is not None:
        view = view.slice(CUT[0], CUT[1], dim=1)
    if AS is not None:
        view = reinterpret(view, o_ptr.dtype.element_ty, AS, AS_LAYOUT)
    if STAGE is not None:
        view = view.index(STAGE)
    if view.shape[0] > LENGTH:
        view = view.slice(view.shape[0] - LENGTH, LENGTH)
    if PERMUTED:
        view = view.permute((1, 0))
    gl.store(o_ptr + numbered(view.shape[0], view.shape[1], L), view.load(L))


@gluon.jit
def words(src, o_ptr, PERMUTED: gl.constexpr, L: gl.constexpr):
    """Two of four words of 32 rows."""
    tile = gl.allocate_shared_memory(src.dtype, src.block_shape, src.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    mbarrier.expect(loaded, 32 * 4 * 4)
    tma_load(src, [0, 0], loaded, tile)
    mbarrier.wait(loaded, 0)
    view = tile.slice(2, 2, dim=1)
    if PERMUTED:
        gl.store(o_ptr + numbered(2, 32, L), view.permute((1, 0)).load(L))
    else:
        gl.store(o_ptr + numbered(32, 2, L), view.load(L))
