# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""The products of a consumer of kernel.py: scores of a block of keys, weights times its values.

wgmma keeps 13 binary places of a sum of FP8 products, and cuts off of every term what lies below.
Scores are sums of few columns. What a block adds to the values of thousands of keys, however, would
be lost: on an H200, of 8192 values of one sign and of equal weight 13 %, of 131072 a quarter. So
products of e4m3 weights and values are sums of their own, of one block, and added to O in fp32, in
the registers that the block's scores have left.

| V | parts of O | a product |
|---|---|---|
| 16 bits | one, all columns | adds to O |
| 8 bits | of 64 columns, a tuple | begins at 0 and is added to O when it is waited for |
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openmla.kernels.gluon.compat import thread_barrier
from openmla.kernels.gluon.scores import opaque_zero
from openmla.kernels.hopper.dense.kernel import WARPS
from openmla.kernels.hopper.dense_fp8.softmax import rescale_quads
from openmla.kernels.hopper.dense_fp8.words import unpack_weights


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


@gluon.jit
def no_sums(PARTS: gl.constexpr, OL: gl.constexpr):
    """The parts of O, all 0. OL: layout of a part."""
    WIDTH: gl.constexpr = OL.instr_shape[1]
    O = ()
    for _ in gl.static_range(PARTS):
        O += (gl.zeros([64, WIDTH], gl.float32, OL),)
    return O


@gluon.jit
def rescale_parts(O, rescale):
    """O times rescale, row by row."""
    out = ()
    for i in gl.static_range(len(O)):
        out += (rescale_quads(O[i], rescale),)
    return out


@gluon.jit
def issue_part(words, v, O, I: gl.constexpr, PL: gl.constexpr):
    """Start the product of P and the columns of V that are part I of O, which is the third
    argument. Returns it and what has P's registers, which must live as long."""
    if gl.float8e4nv == v.dtype:
        OL: gl.constexpr = O.type.layout
        WIDTH: gl.constexpr = O.shape[1]
        FIRST: gl.constexpr = I * WIDTH
        P = unpack_weights(words, v.shape[1], v.dtype, PL)
        none = gl.zeros([64, WIDTH], gl.float32, OL)
        columns = v.slice(FIRST, WIDTH).permute((1, 0))
        # A wait takes no 8-bit tensor: the words are the registers that P is in.
        return warpgroup_mma(P, columns, none, use_acc=False, is_async=True), words
    else:
        P = unpack_weights(words, v.shape[0], v.dtype, PL)
        return warpgroup_mma(P, v, O, is_async=True), P


@gluon.jit
def wait_part(PENDING: gl.constexpr, O, flight, ALONE: gl.constexpr):
    """A part of O with the product in flight, when at most PENDING others are, and what had P's
    registers. ALONE: it has its own sums."""
    done, held = warpgroup_mma_wait(PENDING, deps=flight)
    if ALONE:
        done = O + done
    return done, held


@gluon.jit
def issue_pv(words, v, O, PL: gl.constexpr):
    """Start all parts."""
    flights = ()
    for i in gl.static_range(len(O)):
        flights += (issue_part(words, v, O[i], i, PL),)
    return flights


@gluon.jit
def wait_pv(PENDING: gl.constexpr, O, flights, ALONE: gl.constexpr):
    """O with all parts, when at most PENDING other products are in flight."""
    out = ()
    for i in gl.static_range(len(O)):
        done, _held = wait_part(PENDING + (len(O) - 1 - i), O[i], flights[i], ALONE)
        out += (done,)
    return out


@gluon.jit
def joined(O):
    """The parts of O side by side, one or two."""
    if len(O) == 1:
        return O[0]
    else:
        return gl.reshape(gl.permute(gl.join(O[0], O[1]), (0, 2, 1)), [64, 2 * O[0].shape[1]])
