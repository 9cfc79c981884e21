"""One step of attention over rows that are keys and values at once, for latent.py and sparse.py.

| a step reads | latent [BN, LATENT], rope [BN, ROPE] of BN rows, each once: V is the latent |
|---|---|
| scores | q_latent · latent + q_rope · rope, in two products |
| FP8 rows | dequantized to bf16 on the way, as LatentCache defines it |
| fp16 queries, bf16 rows | every left operand as two bf16 terms (TWO_TERMS) |

BRANCH wraps the arithmetic in branches that are always taken (`go`, `some`). They steer Triton's
compiler on Hopper, where it otherwise

- starts copying the next rows after the last product of a step; before a branch it starts them as
  soon as these rows are there, so that the whole step hides them;
- makes both warp groups compute all scores of 64 rows, because it sees another product use them; it
  does not look past the end of a branch, and then each group computes half of the keys.
"""

# ruff: noqa: PLR0913

from __future__ import annotations

import triton
import triton.language as tl

from openmla.kernels.portable.records import Factors, SoftmaxState
from openmla.kernels.portable.rows import read_columns, two_terms
from openmla.kernels.portable.softmax import MINUS_INF, softmax_step


@triton.jit
def scores(q, k, s):
    """s + q · k, as [rows, keys]."""
    return tl.dot(q, tl.trans(k), s)


@triton.jit
def row_step(
    state,
    q,
    rows,
    visible,
    factors,
    go,
    some,
    D_LATENT: tl.constexpr,
    D_ROPE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    TYPE: tl.constexpr,
    ROW: tl.constexpr,
    TWO_TERMS: tl.constexpr,
    BN: tl.constexpr,
    BRANCH: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take in a RowBlock; returns the new SoftmaxState.

    q: QueryTile; factors: Factors. rows.ok is used when MASK_ROWS.
    visible: [BM or 1, BN], used when MASKED.
    go, some: runtime conditions that hold and differ; used when BRANCH.
    """
    k = read_columns(rows, 0, D_LATENT, LATENT, ROW, TYPE, MASK_ROWS)
    s_rope = tl.zeros([q.latent.shape[0], BN], tl.float32)
    if ROPE > 0:
        k_rope = read_columns(rows, D_LATENT, D_ROPE, ROPE, ROW, TYPE, MASK_ROWS)
        s_rope = scores(q.rope, k_rope, None)
        if TWO_TERMS:
            s_rope = scores(q.rope_rest, k_rope, s_rope)
    if BRANCH:
        s_rope *= factors.factor
        if go:
            s = s_rope
            if some:
                s_latent = scores(q.latent, k, None)
                if TWO_TERMS:
                    s_latent = scores(q.latent_rest, k, s_latent)
                s = s_latent * factors.factor + s_rope
            scaled = Factors(factor=1.0, key=factors.key, row=factors.row)
            state = _weigh(state, s, k, visible, scaled, TYPE, TWO_TERMS, MASKED)
    else:
        s = scores(q.latent, k, s_rope)
        if TWO_TERMS:
            s = scores(q.latent_rest, k, s)
        state = _weigh(state, s, k, visible, factors, TYPE, TWO_TERMS, MASKED)
    return state


@triton.jit
def _weigh(
    state,
    s,
    k,
    visible,
    factors,
    TYPE: tl.constexpr,
    TWO_TERMS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Softmax over scores s, and its product with the rows k; returns the new SoftmaxState."""
    factor = factors.factor
    if factors.key is not None:
        s = s * (factors.key * factor)[None, :]
        factor = 1.0
    if factors.row is not None:
        s = s * (factors.row * factor)[:, None]
        factor = 1.0
    if MASKED:
        s = tl.where(visible, s, MINUS_INF)
    p, row_max, row_sum, rescale = softmax_step(s, state.row_max, state.row_sum, factor, MASKED)
    acc = state.acc * rescale[:, None]
    if TWO_TERMS:
        p_first, p_rest = two_terms(p, TYPE)
        acc = tl.dot(p_rest, k, tl.dot(p_first, k, acc))
    else:
        acc = tl.dot(p.to(TYPE), k, acc)
    return SoftmaxState(acc, row_max, row_sum)
