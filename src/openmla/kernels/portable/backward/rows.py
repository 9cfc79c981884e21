"""Statistics of query rows, and gradients of scores, as both passes compute them."""

from __future__ import annotations

import triton
import triton.language as tl

from openmla.kernels.portable.backward.records import RowStatistics
from openmla.kernels.portable.softmax import LOG2_E, MINUS_INF

PLUS_INF = tl.constexpr(float("inf"))


@triton.jit
def row_statistics(lse_rows, row_ok, sink_ptr, head):
    """RowStatistics of rows whose lse lies at `lse_rows`."""
    lse = tl.load(lse_rows, mask=row_ok, other=MINUS_INF)
    seeing = lse != MINUS_INF
    total = lse
    if sink_ptr is not None:
        # An infinite sink works too: the larger one is infinite, and the exponential of -inf is 0.
        sink = tl.load(sink_ptr + head)
        total = tl.maximum(lse, sink) + tl.log(1.0 + tl.exp(-tl.abs(lse - sink)))
    return RowStatistics(
        seeing=seeing,
        lse=lse,
        total=tl.where(seeing, total * LOG2_E, PLUS_INF),
        alone=tl.where(seeing, lse * LOG2_E, PLUS_INF),
    )


@triton.jit
def weights_of(s, total, visible, MASKED: tl.constexpr):
    """Weights of scores in log2 units; 0 where a key is not visible."""
    p = tl.exp2(s - total)
    if MASKED:
        p = tl.where(visible, p, 0.0)
    return p


@triton.jit
def score_gradients(s, p, d_p, delta, alone, d_lse, visible, MASKED: tl.constexpr):
    """dS = P * (dP - D) + P0 * d_lse; `d_lse` is None where delta has it, or nothing has."""
    d_s = p * (d_p - delta)
    if d_lse is not None:
        d_s += weights_of(s, alone, visible, MASKED) * d_lse
    return d_s
