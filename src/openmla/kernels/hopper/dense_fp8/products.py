"""The product of a consumer of kernel.py that is FP8: scores of a block of keys.

wgmma keeps 13 binary places of a sum of FP8 products, and cuts off of every term what lies below:
of scores, sums of few columns, at most 0.2 %.
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
def issue_qk(q_smem, k_smem, stage, WHO: gl.constexpr, LAYOUTS: gl.constexpr, DIMS: gl.constexpr):
    """Start the scores of a block: one product per part of the columns.

    The product of a 16-bit rope comes first and is waited for: sums have a layout per type of
    operands, and what is in flight cannot change its own, although the registers are the same.
    """
    k_main, k_tail, k_rope, _ = k_smem
    SL: gl.constexpr = LAYOUTS[0]
    WIDE_ROPE: gl.constexpr = k_rope.dtype.primitive_bitwidth > 8
    BN: gl.constexpr = k_main.shape[1]
    S = gl.zeros([64, BN], gl.float32, SL)
    if WIDE_ROPE:
        k = k_rope.index(stage).permute((1, 0))
        R = gl.zeros([64, BN], gl.float32, LAYOUTS[2])
        q_wide = q_smem[3].index(opaque_zero() + WHO)
        R = warpgroup_mma(q_wide, k, R, use_acc=False)
        S = gl.convert_layout(R, SL, assert_trivial=True)
    k = k_main.index(stage).permute((1, 0))
    S = warpgroup_mma(q_smem[0].index(opaque_zero() + WHO), k, S, use_acc=WIDE_ROPE, is_async=True)
    if DIMS[1] > 0:
        k = k_tail.index(stage).permute((1, 0))
        S = warpgroup_mma(q_smem[1].index(opaque_zero() + WHO), k, S, is_async=True)
    if DIMS[2] > 0 and not WIDE_ROPE:
        k = k_rope.index(stage).permute((1, 0))
        S = warpgroup_mma(q_smem[2].index(opaque_zero() + WHO), k, S, is_async=True)
    return S


@gluon.jit
def widen_rope(q_smem, WHO: gl.constexpr, DIMS: gl.constexpr):
    """After q_ready: a copy of a consumer's rope columns in the type of a wider k_rope."""
    if q_smem[3].dtype.primitive_bitwidth > 8:
        WIDTH: gl.constexpr = DIMS[2]
        L: gl.constexpr = gl.BlockedLayout([1, 16], [512 // WIDTH, WIDTH // 16], [WARPS, 1], [1, 0])
        rope = q_smem[2].index(WHO).load(L)
        q_smem[3].index(WHO).store(rope.to(q_smem[3].dtype))
        fence_async_shared()
        thread_barrier()


@gluon.jit
def turn_signs(q_smem, q_scale_ptr, work, WHO: gl.constexpr, DIMS: gl.constexpr):
    """After q_ready: the sign of a row's scale, or that it is NaN, goes into its queries, so that
    the factors of rows are positive: then the largest score stays the largest, and hidden -inf."""
    if q_scale_ptr is not None:
        _turn_tile(q_smem[0].index(WHO), q_scale_ptr, work, WHO)
        if DIMS[1] > 0:
            _turn_tile(q_smem[1].index(WHO), q_scale_ptr, work, WHO)
        if DIMS[2] > 0:
            _turn_tile(q_smem[2].index(WHO), q_scale_ptr, work, WHO)
        fence_async_shared()
        thread_barrier()


@gluon.jit
def _turn_tile(tile, q_scale_ptr, work, WHO: gl.constexpr):
    _head, token, rows, _part = work
    WIDTH: gl.constexpr = tile.shape[1]
    L: gl.constexpr = gl.BlockedLayout([1, 16], [512 // WIDTH, WIDTH // 16], [WARPS, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, L)) + WHO * 64
    scale = gl.load(q_scale_ptr + (token + row), mask=row < rows, other=0.0)
    sign = gl.where(scale < 0.0, -128, 0).to(gl.int8)
    nan = gl.where(scale == scale, 0, 127).to(gl.int8)
    bits = tile.load(L).to(gl.int8, bitcast=True)
    tile.store(((bits ^ sign[:, None]) | nan[:, None]).to(gl.float8e4nv, bitcast=True))
