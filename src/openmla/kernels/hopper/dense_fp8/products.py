# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""The products of a consumer of kernel.py: scores of a tile of keys, and weights times its values."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from openmla.kernels.gluon.compat import thread_barrier
from openmla.kernels.gluon.scores import opaque_zero
from openmla.kernels.hopper.dense.kernel import WARPS
from openmla.kernels.hopper.dense_fp8.words import bytes_of, read_queries, unpack_weights


@gluon.jit
def left(tile, words, WHO: gl.constexpr, SL: gl.constexpr, IN_REGISTERS: gl.constexpr):
    """Columns of Q as a left operand: from registers, or from shared memory."""
    if IN_REGISTERS:
        QL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SL, k_width=4)
        return gl.convert_layout(gl.reshape(bytes_of(words), [64, 4 * words.shape[1]]), QL)
    else:
        return tile.index(opaque_zero() + WHO)


@gluon.jit
def issue_qk(
    q_smem, q_words, k_smem, stage, WHO: gl.constexpr, LAYOUTS: gl.constexpr, DIMS: gl.constexpr,
    IN_REGISTERS: gl.constexpr,
):  # fmt: skip
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
    q = left(q_smem[0], q_words[0], WHO, SL, IN_REGISTERS)
    S = warpgroup_mma(q, k, S, use_acc=WIDE_ROPE, is_async=True)
    if DIMS[1] > 0:
        k = k_tail.index(stage).permute((1, 0))
        S = warpgroup_mma(left(q_smem[1], q_words[1], WHO, SL, IN_REGISTERS), k, S, is_async=True)
    if DIMS[2] > 0 and not WIDE_ROPE:
        k = k_rope.index(stage).permute((1, 0))
        S = warpgroup_mma(left(q_smem[2], q_words[2], WHO, SL, IN_REGISTERS), k, S, is_async=True)
    return S


@gluon.jit
def take_queries(q_smem, q_empty, blocks, WHO: gl.constexpr, DIMS: gl.constexpr,
                 IN_REGISTERS: gl.constexpr):  # fmt: skip
    """After q_ready: what of a consumer's rows is kept elsewhere than in the tiles of the load.

    Rope columns of a wider type get a copy in shared memory; all others may go to registers, and
    then the tiles are free at once.
    """
    if q_smem[3].dtype.primitive_bitwidth > 8:
        WIDTH: gl.constexpr = DIMS[2]
        L: gl.constexpr = gl.BlockedLayout([1, 16], [512 // WIDTH, WIDTH // 16], [WARPS, 1], [1, 0])
        rope = q_smem[2].index(WHO).load(L)
        q_smem[3].index(WHO).store(rope.to(q_smem[3].dtype))
        fence_async_shared()
        thread_barrier()
    words = read_queries(q_smem, WHO, DIMS, IN_REGISTERS)
    if IN_REGISTERS:
        mbarrier.arrive(q_empty.index(WHO), count=1, pred=blocks > 0)
    return words


@gluon.jit
def issue_pv(words, v_smem, stage, O, PL: gl.constexpr):
    """Start O + P V; returns it and P, whose registers must live as long."""
    DTYPE: gl.constexpr = v_smem.dtype
    if gl.float8e4nv == DTYPE:
        P = unpack_weights(words, v_smem.shape[2], DTYPE, PL)
        # A wait takes no 8-bit tensor: the words are the registers that P is in.
        return warpgroup_mma(P, v_smem.index(stage).permute((1, 0)), O, is_async=True), words
    else:
        P = unpack_weights(words, v_smem.shape[1], DTYPE, PL)
        return warpgroup_mma(P, v_smem.index(stage), O, is_async=True), P
