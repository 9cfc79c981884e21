"""Online softmax in log2 units, shared by all portable kernels.

Per row, with s the scores in log2 units (natural score * log2 e) and row_max the largest so far:

| state | meaning | before the first key |
|---|---|---|
| row_max | max(s) | -inf |
| row_sum | sum(exp2(s - row_max)), or PARTS sums of parts of it | 0 |
| acc | sum(exp2(s - row_max) * v) | 0 |
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
MINUS_INF = tl.constexpr(float("-inf"))
PARTS = tl.constexpr(8)


@triton.jit
def softmax_step(s, row_max, row_sum, factor, MASKED: tl.constexpr):
    """Take in scores s [rows, keys]; `factor` > 0 turns them into log2 units.

    row_sum is [rows], or [rows, PARTS] where threads that share a row should not meet in every
    step.

    Returns p (fp32), the new row_max and row_sum, and by how much acc rescales. Only a masked block
    can hold a row without a key; shifting it by 0 avoids -inf - -inf = NaN.
    """
    new_max = tl.maximum(row_max, tl.max(s, 1) * factor)
    shift = new_max
    if MASKED:
        shift = tl.where(new_max == MINUS_INF, 0.0, new_max)
    p = tl.exp2(s * factor - shift[:, None])
    rescale = tl.exp2(row_max - shift)
    if len(row_sum.shape) == 1:
        row_sum = row_sum * rescale + tl.sum(p, 1)
    else:
        row_sum = row_sum * rescale[:, None] + sums_of_threads(p)
    return p, new_max, row_sum, rescale


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
def normalize(acc, row_max, row_sum, sink):
    """(out, lse) of finished rows; `sink` is None or one natural-log value per row.

    A row without a key gives +0 and -inf, whatever acc holds. Its sum is 0; its row_max of -inf is
    also that of a row whose scores are all NaN.
    """
    empty = row_sum == 0.0
    safe_max = tl.where(empty, 0.0, row_max)
    denominator = tl.where(empty, 1.0, row_sum)
    lse = tl.where(empty, MINUS_INF, safe_max * LN_2 + tl.log(denominator))
    if sink is not None:
        denominator += tl.exp2(sink * LOG2_E - safe_max)
    out = tl.where(empty[:, None], 0.0, acc * (1.0 / denominator)[:, None])
    return out, lse
