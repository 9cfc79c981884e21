"""Products of a block, issued: the same in both passes.

A pass keeps rows of its own, 64 of each consumer, and walks blocks of the other side. Own rows are
queries with d_out in the query pass, keys with V in the key pass, whose products are transposed.

| | query pass | key pass |
|---|---|---|
| scores | Q K^T | K Q^T |
| gradients of weights | d_out V^T | V d_out^T |
| gradients of own rows | d_q += dS K | d_k += dS^T Q |
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from openmla.kernels.gluon.gradients.records import Parts
from openmla.kernels.gluon.scores import opaque_zero
from openmla.kernels.hopper.dense.softmax import unpack

NC = gl.constexpr(2)  # consumers
WARPS = gl.constexpr(4)  # of a consumer
WGMMA_ROWS = gl.constexpr(64)  # rows of a consumer


@gluon.jit
def issue_scores(own, walked, stage, WHO: gl.constexpr, SL: gl.constexpr, DIMS: gl.constexpr):
    """Start the scores of a block: one product for each of the Parts `own` and `walked`."""
    STEP: gl.constexpr = walked.nope.shape[1]
    S = gl.zeros([64, STEP], gl.float32, SL)
    who = opaque_zero() + WHO
    rows = walked.nope.index(stage).permute((1, 0))
    S = warpgroup_mma(own.nope.index(who), rows, S, use_acc=False, is_async=True)
    if DIMS.rope > 0:
        rows = walked.rope.index(stage).permute((1, 0))
        S = warpgroup_mma(own.rope.index(who), rows, S, is_async=True)
    return S


@gluon.jit
def issue_weight_gradients(own, walked, stage, WHO: gl.constexpr, SL: gl.constexpr):
    """Start dP of a block, or dP^T; own, walked: tiles of d_out and of V."""
    STEP: gl.constexpr = walked.shape[1]
    dP = gl.zeros([64, STEP], gl.float32, SL)
    rows = walked.index(stage).permute((1, 0))
    return warpgroup_mma(own.index(opaque_zero() + WHO), rows, dP, use_acc=False, is_async=True)


@gluon.jit
def issue_own_gradients(words, sums, walked, stage, DIMS: gl.constexpr):
    """Start adding dS times the rows of a block to the gradients of own rows.

    words: dS or dS^T in pairs, sums: Parts, walked: Parts. Returns the products in flight and dS.
    """
    STEP: gl.constexpr = walked.nope.shape[1]
    DTYPE: gl.constexpr = walked.nope.dtype
    AL: gl.constexpr = gl.DotOperandLayout(0, sums.nope.type.layout, 2)
    dS = unpack(words, STEP, DTYPE, AL)
    nope = warpgroup_mma(dS, walked.nope.index(stage), sums.nope, is_async=True)
    rope = sums.rope
    if DIMS.rope > 0:
        RL: gl.constexpr = gl.DotOperandLayout(0, sums.rope.type.layout, 2)
        narrow = gl.convert_layout(dS, RL)
        rope = warpgroup_mma(narrow, walked.rope.index(stage), sums.rope, is_async=True)
    return Parts(nope, rope), dS
