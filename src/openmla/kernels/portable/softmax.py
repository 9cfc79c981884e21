"""Online softmax in log2 units, shared by all portable kernels.

Per row, with s the scores in log2 units (natural score * log2 e) and top the largest so far:

| state | meaning | before the first key |
|---|---|---|
| top | max(s) | -inf |
| total | sum(exp2(s - top)), or PARTS sums of parts of it | 0 |
| acc | sum(exp2(s - top) * v) | 0 |
"""

# Device code: Triton gives its values their types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
MINUS_INF = tl.constexpr(float("-inf"))
PARTS = tl.constexpr(8)


@triton.jit
def softmax_step(s, top, total, factor, MASKED: tl.constexpr):
    """Take in scores s [rows, keys]; `factor` > 0 turns them into log2 units.

    total is [rows], or [rows, PARTS] where threads that share a row should not meet in every step.

    Returns p (fp32), the new top and total, and by how much acc shrinks. Only a masked block can
    hold a row without a key; shifting it by 0 avoids -inf - -inf = NaN.
    """
    new_top = tl.maximum(top, tl.max(s, 1) * factor)
    shift = new_top
    if MASKED:
        shift = tl.where(new_top == MINUS_INF, 0.0, new_top)
    p = tl.exp2(s * factor - shift[:, None])
    shrink = tl.exp2(top - shift)
    if len(total.shape) == 1:
        total = total * shrink + tl.sum(p, 1)
    else:
        total = total * shrink[:, None] + sums_of_threads(p)
    return p, new_top, total, shrink


@triton.jit
def sums_of_threads(p):
    """Row sums of p [rows, keys] in PARTS parts; no thread on NVIDIA needs another's for them.

    There thread t of a quad holds columns 2t and 2t + 1 of every eight, and where two warp groups
    share the keys, each holds one half of them: 2 halves x 4 threads.
    """
    ROWS: tl.constexpr = p.shape[0]
    KEYS: tl.constexpr = p.shape[1]
    p = tl.sum(p.reshape(ROWS, 2, KEYS // 16, 4, 2), 4)
    return tl.sum(p, 2).reshape(ROWS, PARTS)


@triton.jit
def normalize(acc, top, total, sink):
    """(out, lse) of finished rows; `sink` is None or one natural-log value per row.

    A row without a key gives +0 and -inf, whatever acc holds.
    """
    empty = top == MINUS_INF
    safe_top = tl.where(empty, 0.0, top)
    denominator = tl.where(empty, 1.0, total)
    lse = tl.where(empty, MINUS_INF, safe_top * LN_2 + tl.log(denominator))
    if sink is not None:
        denominator += tl.exp2(sink * LOG2_E - safe_top)
    out = tl.where(empty[:, None], 0.0, acc * (1.0 / denominator)[:, None])
    return out, lse
