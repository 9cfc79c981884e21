"""Tiles of scores in registers, [WARPS, R, LANES, 4], and the places of selected elements.

Element (w, r, lane, v) is number ((w * R + r) * LANES + lane) * 4 + v of the tile: a warp's part is
contiguous, and a thread loads four neighbors at once. Order among hits is order of these numbers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.scores import opaque_zero

VECTOR = gl.constexpr(4)  # neighbors in a thread: 16 bytes


@gluon.constexpr_function
def tile_layout(CFG: gl.constexpr, R: gl.constexpr):
    """The register layout of a tile with R vectors in a thread."""
    return gl.BlockedLayout([1, R, 1, 4], [1, 1, CFG.lanes, 1], [CFG.warps, 1, 1, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def tile_vectors(CFG: gl.constexpr, R: gl.constexpr):
    """Vectors of that tile."""
    return CFG.warps * R * CFG.lanes


@gluon.constexpr_function
def tile_scores(CFG: gl.constexpr, R: gl.constexpr):
    """Scores of that tile."""
    return CFG.warps * R * CFG.lanes * 4


@gluon.constexpr_function
def over_warps_layout(WARPS: gl.constexpr, LANES: gl.constexpr):
    """The register layout in which every thread has something of all warps."""
    return gl.BlockedLayout([1, WARPS], [1, LANES], [WARPS, 1], [1, 0])


@gluon.jit
def plus(a, b):
    """The operator of prefix sums."""
    return a + b


@gluon.jit
def vectors(CFG: gl.constexpr, R: gl.constexpr):
    """The number of each vector of a tile, and 0 … 3: both ready to be broadcast."""
    LANES: gl.constexpr = CFG.lanes
    LT: gl.constexpr = tile_layout(CFG, R)
    L3: gl.constexpr = gl.SliceLayout(3, LT)
    warp = gl.arange(0, CFG.warps, gl.SliceLayout(1, gl.SliceLayout(2, L3)))
    r = gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(2, L3)))
    lane = gl.arange(0, LANES, gl.SliceLayout(0, gl.SliceLayout(1, L3)))
    if CFG.recomputes:
        lane = lane + opaque_zero()
    v = gl.arange(0, VECTOR, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LT))))
    row = (warp * (R * LANES))[:, None] + (r * LANES)[None, :]
    number = row[:, :, None] + lane[None, :][:, None, :]
    return number[:, :, :, None], v[None, :][:, None, :][:, :, None, :]


@gluon.jit
def of_all_warps(x, WARPS: gl.constexpr, LANES: gl.constexpr):
    """Give every thread all of the values [WARPS], one per warp. This is one exchange through
    shared memory, where Triton's reduction over warps takes two."""
    P: gl.constexpr = over_warps_layout(WARPS, LANES)
    return gl.convert_layout(x, gl.SliceLayout(0, P))


@gluon.jit
def total(x):
    """The sum of a tile."""
    return gl.sum(of_all_warps(gl.sum(gl.sum(gl.sum(x, 3), 1), 1), x.shape[0], x.shape[2]), 0)


@gluon.jit
def least(x):
    """The minimum of a tile."""
    return gl.min(of_all_warps(gl.min(gl.min(gl.min(x, 3), 1), 1), x.shape[0], x.shape[2]), 0)


@gluon.jit
def greatest(x):
    """The maximum of a tile."""
    return gl.max(of_all_warps(gl.max(gl.max(gl.max(x, 3), 1), 1), x.shape[0], x.shape[2]), 0)


@gluon.jit
def over_lanes(x):
    """Exclusive prefix sums of [WARPS, LANES] over lanes. Triton scans only blocked layouts."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, x.shape[1]], [x.shape[0], 1], [1, 0])
    upto = gl.associative_scan(gl.convert_layout(x, L, assert_trivial=True), 1, plus)
    return gl.convert_layout(upto, x.type.layout, assert_trivial=True) - x


@gluon.jit
def over_registers(x, LANES: gl.constexpr):
    """Exclusive prefix sums of [WARPS, R] over registers."""
    L: gl.constexpr = gl.BlockedLayout([1, x.shape[1]], [1, LANES], [x.shape[0], 1], [1, 0])
    upto = gl.associative_scan(gl.convert_layout(x, L, assert_trivial=True), 1, plus)
    return gl.convert_layout(upto, x.type.layout, assert_trivial=True) - x


@gluon.jit
def over_warps(x, LANES: gl.constexpr):
    """Exclusive prefix sums of [WARPS] over warps, and the total."""
    WARPS: gl.constexpr = x.shape[0]
    P: gl.constexpr = over_warps_layout(WARPS, LANES)
    every = of_all_warps(x, WARPS, LANES)
    mine = gl.arange(0, WARPS, gl.SliceLayout(1, P))
    other = gl.arange(0, WARPS, gl.SliceLayout(0, P))
    before = gl.sum(gl.where(other[None, :] < mine[:, None], every[None, :], 0), 1)
    return gl.convert_layout(before, x.type.layout, assert_trivial=True), gl.sum(every, 0)


@gluon.jit
def places(hit):
    """Exclusive prefix sums of `hit` over the whole tile, and the total.

    The counts of a thread's vectors are packed, so that one prefix sum over lanes serves all R of
    them: 8 bits each, or 16 where a warp of 64 lanes may have 256 hits in one vector.
    """
    LT: gl.constexpr = hit.type.layout
    L3: gl.constexpr = gl.SliceLayout(3, LT)
    R: gl.constexpr = hit.shape[1]
    LANES: gl.constexpr = hit.shape[2]
    BITS: gl.constexpr = 8 if LANES == 32 else 16
    ONES: gl.constexpr = (1 << BITS) - 1
    WORD: gl.constexpr = gl.int64 if R * BITS > 32 else gl.int32
    one = hit.to(gl.int32)
    inside = gl.associative_scan(one, 3, plus) - one
    shift = (BITS * gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(2, L3))))[None, :].to(WORD)
    packed = gl.sum(gl.sum(one, 3).to(WORD) << shift[:, :, None], 1)  # [WARPS, LANES]
    of_warp = gl.convert_layout(gl.sum(packed, 1), gl.SliceLayout(1, gl.SliceLayout(2, L3)))
    sums = ((of_warp[:, None] >> shift) & ONES).to(gl.int32)  # [WARPS, R]
    before, count = over_warps(gl.sum(sums, 1), LANES)
    first = over_registers(sums, LANES) + before[:, None]
    lanes = ((over_lanes(packed)[:, None, :] >> shift[:, :, None]) & ONES).to(gl.int32)
    return (first[:, :, None] + lanes)[:, :, :, None] + inside, count
