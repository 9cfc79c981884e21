"""The FP8 product of kernel.py, scores of a block of keys, and what a consumer does to Q before it.

wgmma keeps 13 binary places of a sum of FP8 products and truncates every term to them: an error of
at most 0.2 % in scores, which are sums of few columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
)

from openmla.kernels.gluon.compat import thread_barrier
from openmla.kernels.gluon.scores import opaque_zero
from openmla.kernels.hopper.dense.kernel import WARPS


@gluon.jit
def issue_qk(smem, stage, WHO: gl.constexpr, LAYOUTS: gl.constexpr, DIMS: gl.constexpr):
    """Start the scores of a block: one product for each of the ColumnTiles of Q and K.

    The product of a 16-bit rope comes first and is waited for: an accumulator has a layout per type
    of operands, and one in flight cannot change its layout, although the registers are the same.
    smem: SharedMemory, LAYOUTS: MmaLayouts, DIMS: Columns.
    """
    q = smem.q
    k = smem.k
    SL: gl.constexpr = LAYOUTS.scores
    WIDE_ROPE: gl.constexpr = smem.q_wide_rope is not None
    BN: gl.constexpr = k.main.shape[1]
    S = gl.zeros([64, BN], gl.float32, SL)
    if WIDE_ROPE:
        keys = k.rope.index(stage).permute((1, 0))
        R = gl.zeros([64, BN], gl.float32, LAYOUTS.rope_scores)
        q_wide = smem.q_wide_rope.index(opaque_zero() + WHO)
        R = warpgroup_mma(q_wide, keys, R, use_acc=False)
        S = gl.convert_layout(R, SL, assert_trivial=True)
    keys = k.main.index(stage).permute((1, 0))
    S = warpgroup_mma(q.main.index(opaque_zero() + WHO), keys, S, use_acc=WIDE_ROPE, is_async=True)
    if DIMS.tail > 0:
        keys = k.tail.index(stage).permute((1, 0))
        S = warpgroup_mma(q.tail.index(opaque_zero() + WHO), keys, S, is_async=True)
    if DIMS.rope > 0 and not WIDE_ROPE:
        keys = k.rope.index(stage).permute((1, 0))
        S = warpgroup_mma(q.rope.index(opaque_zero() + WHO), keys, S, is_async=True)
    return S


@gluon.jit
def widen_rope(smem, WHO: gl.constexpr, DIMS: gl.constexpr):
    """Convert a consumer's rope columns to the type of a wider k_rope, once q_ready has completed.

    smem: SharedMemory, DIMS: Columns.
    """
    if smem.q_wide_rope is not None:
        WIDTH: gl.constexpr = DIMS.rope
        L: gl.constexpr = gl.BlockedLayout([1, 16], [512 // WIDTH, WIDTH // 16], [WARPS, 1], [1, 0])
        rope = smem.q.rope.index(WHO).load(L)
        smem.q_wide_rope.index(WHO).store(rope.to(smem.q_wide_rope.dtype))
        fence_async_shared()
        thread_barrier()


@gluon.jit
def turn_signs(q, q_scale_ptr, tile, WHO: gl.constexpr, DIMS: gl.constexpr):
    """Give queries the signs of their rows' scales, and NaN for NaN, once q_ready has completed.

    The factors of rows are positive then, so the largest score stays the largest, and a masked one
    -inf. q: ColumnTiles, tile: OutputTile, DIMS: Columns.
    """
    if q_scale_ptr is not None:
        _turn_signs_of(q.main.index(WHO), q_scale_ptr, tile, WHO)
        if DIMS.tail > 0:
            _turn_signs_of(q.tail.index(WHO), q_scale_ptr, tile, WHO)
        if DIMS.rope > 0:
            _turn_signs_of(q.rope.index(WHO), q_scale_ptr, tile, WHO)
        fence_async_shared()
        thread_barrier()


@gluon.jit
def _turn_signs_of(queries, q_scale_ptr, tile, WHO: gl.constexpr):
    WIDTH: gl.constexpr = queries.shape[1]
    L: gl.constexpr = gl.BlockedLayout([1, 16], [512 // WIDTH, WIDTH // 16], [WARPS, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, L)) + WHO * 64
    scale = gl.load(q_scale_ptr + (tile.token + row), mask=row < tile.rows, other=0.0)
    sign = gl.where(scale < 0.0, -128, 0).to(gl.int8)
    nan = gl.where(scale == scale, 0, 127).to(gl.int8)
    bits = queries.load(L).to(gl.int8, bitcast=True)
    queries.store(((bits ^ sign[:, None]) | nan[:, None]).to(gl.float8e4nv, bitcast=True))
