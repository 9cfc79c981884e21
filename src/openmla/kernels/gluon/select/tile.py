"""Tiles of scores in registers, [WARPS, R, 32 lanes, 4], and the places of selected elements.

Element (w, r, lane, v) is number ((w * R + r) * 32 + lane) * 4 + v of the tile: a warp's part is
contiguous, and a thread loads four neighbors at once. Order among hits is order of these numbers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.scores import opaque_zero

VECTOR = gl.constexpr(4)  # neighbors in a thread: 16 bytes
GROUP = gl.constexpr(128)  # scores of a warp that are loaded by one instruction


@gluon.constexpr_function
def tile_layout(WARPS: gl.constexpr, R: gl.constexpr):
    """The register layout of a tile."""
    return gl.BlockedLayout([1, R, 1, 4], [1, 1, 32, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0])


@gluon.jit
def plus(a, b):
    """The operator of prefix sums."""
    return a + b


@gluon.jit
def vectors(WARPS: gl.constexpr, R: gl.constexpr):
    """The number of each vector of a tile, and 0 … 3: both ready to be broadcast."""
    LT: gl.constexpr = tile_layout(WARPS, R)
    L3: gl.constexpr = gl.SliceLayout(3, LT)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, L3)))
    r = gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(2, L3)))
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, L3))) + opaque_zero()
    v = gl.arange(0, VECTOR, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LT))))
    row = (warp * (R * 32))[:, None] + (r * 32)[None, :]
    number = row[:, :, None] + lane[None, :][:, None, :]
    return number[:, :, :, None], v[None, :][:, None, :][:, :, None, :]


@gluon.jit
def of_all_warps(x, WARPS: gl.constexpr):
    """Give every thread all of the values [WARPS], one per warp. This is one exchange through
    shared memory, where Triton's reduction over warps takes two."""
    P: gl.constexpr = gl.BlockedLayout([1, WARPS], [1, 32], [WARPS, 1], [1, 0])
    return gl.convert_layout(x, gl.SliceLayout(0, P))


@gluon.jit
def total(x):
    """The sum of a tile."""
    return gl.sum(of_all_warps(gl.sum(gl.sum(gl.sum(x, 3), 1), 1), x.shape[0]), 0)


@gluon.jit
def least(x):
    """The minimum of a tile."""
    return gl.min(of_all_warps(gl.min(gl.min(gl.min(x, 3), 1), 1), x.shape[0]), 0)


@gluon.jit
def greatest(x):
    """The maximum of a tile."""
    return gl.max(of_all_warps(gl.max(gl.max(gl.max(x, 3), 1), 1), x.shape[0]), 0)


@gluon.jit
def over_lanes(x, WARPS: gl.constexpr):
    """Exclusive prefix sums of [WARPS, 32] over lanes. Triton scans only blocked layouts."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    upto = gl.associative_scan(gl.convert_layout(x, L, assert_trivial=True), 1, plus)
    return gl.convert_layout(upto, x.type.layout, assert_trivial=True) - x


@gluon.jit
def over_registers(x, WARPS: gl.constexpr):
    """Exclusive prefix sums of [WARPS, R] over registers."""
    L: gl.constexpr = gl.BlockedLayout([1, x.shape[1]], [1, 32], [WARPS, 1], [1, 0])
    upto = gl.associative_scan(gl.convert_layout(x, L, assert_trivial=True), 1, plus)
    return gl.convert_layout(upto, x.type.layout, assert_trivial=True) - x


@gluon.jit
def over_warps(x, WARPS: gl.constexpr):
    """Exclusive prefix sums of [WARPS] over warps, and the total."""
    P: gl.constexpr = gl.BlockedLayout([1, WARPS], [1, 32], [WARPS, 1], [1, 0])
    every = of_all_warps(x, WARPS)
    mine = gl.arange(0, WARPS, gl.SliceLayout(1, P))
    other = gl.arange(0, WARPS, gl.SliceLayout(0, P))
    before = gl.sum(gl.where(other[None, :] < mine[:, None], every[None, :], 0), 1)
    return gl.convert_layout(before, x.type.layout, assert_trivial=True), gl.sum(every, 0)


@gluon.jit
def places(hit):
    """Exclusive prefix sums of `hit` over the whole tile, and the total.

    The counts of a thread's vectors are packed, 8 bits each (a warp has at most 128 hits in one
    vector), so that one prefix sum over lanes serves all R of them.
    """
    LT: gl.constexpr = hit.type.layout
    L3: gl.constexpr = gl.SliceLayout(3, LT)
    WARPS: gl.constexpr = hit.shape[0]
    R: gl.constexpr = hit.shape[1]
    WORD: gl.constexpr = gl.int64 if R > 4 else gl.int32
    one = hit.to(gl.int32)
    inside = gl.associative_scan(one, 3, plus) - one
    shift = (8 * gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(2, L3))))[None, :].to(WORD)
    packed = gl.sum(gl.sum(one, 3).to(WORD) << shift[:, :, None], 1)  # [WARPS, 32]
    of_warp = gl.convert_layout(gl.sum(packed, 1), gl.SliceLayout(1, gl.SliceLayout(2, L3)))
    sums = ((of_warp[:, None] >> shift) & 255).to(gl.int32)  # [WARPS, R]
    before, count = over_warps(gl.sum(sums, 1), WARPS)
    first = over_registers(sums, WARPS) + before[:, None]
    lanes = ((over_lanes(packed, WARPS)[:, None, :] >> shift[:, :, None]) & 255).to(gl.int32)
    return (first[:, :, None] + lanes)[:, :, :, None] + inside, count
