"""The matrix products of a sparse block: Q times K in two parts, P times V in four.

Q times K: the first `q_smem_depth` columns of Q come from shared memory ("SS"), the others from
tensor memory ("TS"). P times V: two atoms of output columns, each in two halves of the keys, so
that a half of V can be refilled while the other is multiplied.
"""

from typing import NamedTuple

from openmla.modular.blackwell.sparse.shape import SparseShape
from openmla.modular.blackwell.units import Swizzle

TS_STAGES = 3  # one issue takes at most 16 steps of 16 columns; 384 columns go in 3 of 8


class TensorAccumulator(NamedTuple):
    """One tcgen05 product over the whole CTA group: (MMA_M x BK) times (BK x MMA_N)."""

    dtype: str
    accum_dtype: str
    MMA_M: int
    MMA_N: int
    BK: int
    cta_group: int
    a_tmem: bool = False
    """Whether A comes from tensor memory; B never does."""
    num_stages: int = 1
    """Issues that BK is divided among."""
    swizzle_a: Swizzle = Swizzle.B128
    swizzle_b: Swizzle = Swizzle.B128
    transpose_b: bool = True
    """Whether B is stored as rows of BK columns, as K is; V is not."""


class QKMMAOp(NamedTuple):
    """Q times K, for all heads of the CTA group and the keys of one step."""

    SSMMAType: TensorAccumulator
    """Over the columns of Q in shared memory; it starts from zero."""
    TSMMAType: TensorAccumulator
    """Over those in tensor memory; it adds to the first."""

    @property
    def NUM_TS_STAGES(self) -> int:
        return self.TSMMAType.num_stages


class SVMMAOp(NamedTuple):
    """P times V for one atom of output columns: the original's struct SVMMAType."""

    SS_P0MMAType: TensorAccumulator
    """Over the first half of the keys of a step."""
    SS_P1MMAType: TensorAccumulator
    """Over the second half."""


def qk_products(shape: SparseShape, accum_dtype: str) -> QKMMAOp:
    """Q times K of a block."""
    ss = TensorAccumulator(
        dtype=shape.qkv_dtype,
        accum_dtype=accum_dtype,
        MMA_M=shape.padded_num_q_heads,
        MMA_N=shape.B_TOPK,
        BK=shape.q_smem_depth,
        cta_group=shape.cta_group,
    )
    return QKMMAOp(ss, ss._replace(BK=shape.q_tmem_depth, a_tmem=True, num_stages=TS_STAGES))


def sv_products(shape: SparseShape, accum_dtype: str) -> SVMMAOp:
    """P times V of a block; softmax writes P without a swizzle."""
    half = TensorAccumulator(
        dtype=shape.qkv_dtype,
        accum_dtype=accum_dtype,
        MMA_M=shape.padded_num_q_heads,
        MMA_N=shape.SV_ATOM_MMA_N,
        BK=shape.B_TOPK // 2,
        cta_group=shape.cta_group,
        swizzle_a=Swizzle.NONE,
        transpose_b=False,
    )
    return SVMMAOp(half, half)
