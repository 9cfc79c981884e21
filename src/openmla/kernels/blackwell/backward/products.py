"""Products of a block into tensor memory, issued: the same in both passes.

A pass keeps 128 rows of its own and walks blocks of the other side. Own rows are queries in the
query pass, keys in the key pass, whose products are transposed.

| | query pass | key pass |
|---|---|---|
| scores | Q K^T | K Q^T |
| gradients of own rows | d_q += dS K | d_k += dS^T Q |
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import tcgen05_mma

from openmla.kernels.blackwell.dense.columns import weights_at

OWN = gl.constexpr(128)  # rows that a pass keeps


@gluon.jit
def issue_scores(own, walked, tmem, stage, DIMS: gl.constexpr, TMEM: gl.constexpr):
    """The scores of a block: one product for each of the Parts `own` and `walked`."""
    S = tmem.slice(TMEM.scores, walked.nope.shape[1])
    rows = walked.nope.index(stage).permute((1, 0))
    tcgen05_mma(own.nope.index(0), rows, S, use_acc=False)
    if DIMS.rope > 0:
        tcgen05_mma(own.rope.index(0), walked.rope.index(stage).permute((1, 0)), S)


@gluon.jit
def issue_own_gradients(walked, tmem, stage, begun, DIMS: gl.constexpr, TMEM: gl.constexpr):
    """Add dS times the rows of a block (Parts) to the gradients of own rows.

    begun: whether these have the products of blocks before.
    """
    dS = weights_at(tmem, TMEM.gradients, walked.nope.shape[1], walked.nope.dtype, TMEM)
    nope = tmem.slice(TMEM.nope, DIMS.nope)
    tcgen05_mma(dS, walked.nope.index(stage), nope, use_acc=begun)
    if DIMS.rope > 0:
        rope = tmem.slice(TMEM.rope, DIMS.rope)
        tcgen05_mma(dS, walked.rope.index(stage), rope, use_acc=begun)
