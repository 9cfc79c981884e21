"""One step of attention over rows that are keys and values at once, for latent.py and sparse.py.

| a step reads | latent [BN, LATENT], rope [BN, ROPE] of BN rows, each once: V is the latent |
|---|---|
| scores | q_latent · latent + q_rope · rope, in two products |
| FP8 rows | dequantized to bf16 on the way, as LatentCache defines it |
| fp16 queries, bf16 rows | every left operand as two bf16 terms (TWO_TERMS) |
"""

# Device code: Triton gives its values their types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: PLR0913

from __future__ import annotations

import triton
import triton.language as tl

from openmla.kernels.portable.rows import read_columns, two_terms
from openmla.kernels.portable.softmax import MINUS_INF, softmax_step


@triton.jit
def scores(q, k, s, KEYS_FIRST: tl.constexpr):
    """s + q · k, as [rows, keys] or, with KEYS_FIRST, as [keys, rows].

    Warps share out the rows of a product: 64 rows leave half of 8 warps to repeat the work of the
    others, 128 keys do not.
    """
    if KEYS_FIRST:
        s = tl.dot(k, tl.trans(q), s)
    else:
        s = tl.dot(q, tl.trans(k), s)
    return s


@triton.jit
def row_step(
    acc,
    top,
    total,
    q,
    q_rest,
    q_rope,
    q_rope_rest,
    data_ptr,
    scale_ptr,
    data_row,
    scale_row,
    row_ok,
    visible,
    key_factor,
    row_factor,
    factor,
    D_LATENT: tl.constexpr,
    D_ROPE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    TYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    TWO_TERMS: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take in the rows at data_row (int64 offsets); returns acc, top, total.

    visible: [BM or 1, BN], used when MASKED. key_factor and row_factor: per key, per row, or None.
    """
    k = read_columns(
        data_ptr, scale_ptr, data_row, scale_row, row_ok,
        0, D_LATENT, LATENT, FORMAT, SCALE_BLOCK, TYPE, MASKED,
    )  # fmt: skip
    s = scores(q, k, None, KEYS_FIRST)
    if TWO_TERMS:
        s = scores(q_rest, k, s, KEYS_FIRST)
    if ROPE > 0:
        k_rope = read_columns(
            data_ptr, scale_ptr, data_row, scale_row, row_ok,
            D_LATENT, D_ROPE, ROPE, FORMAT, SCALE_BLOCK, TYPE, MASKED,
        )  # fmt: skip
        s = scores(q_rope, k_rope, s, KEYS_FIRST)
        if TWO_TERMS:
            s = scores(q_rope_rest, k_rope, s, KEYS_FIRST)
    if KEYS_FIRST:
        s = tl.trans(s)
    step_factor = factor
    if key_factor is not None:
        s = s * (key_factor * factor)[None, :]
        step_factor = 1.0
    if row_factor is not None:
        s = s * (row_factor * step_factor)[:, None]
        step_factor = 1.0
    if MASKED:
        s = tl.where(visible, s, MINUS_INF)
    p, top, total, shrink = softmax_step(s, top, total, step_factor, MASKED)
    acc = acc * shrink[:, None]
    if TWO_TERMS:
        p_first, p_rest = two_terms(p, TYPE)
        acc = tl.dot(p_rest, k, tl.dot(p_first, k, acc))
    else:
        acc = tl.dot(p.to(TYPE), k, acc)
    return acc, top, total
