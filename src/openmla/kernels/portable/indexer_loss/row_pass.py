"""The row pass of an indexer's loss: of a row's sums and scores, its loss or its gradients.

| | |
|---|---|
| a program computes | one query row |
| reads | its sums and scores, three times, BLOCK keys at a time |
| writes | loss; or, in place of the sums, dI = d_loss * (softmax(I) - p) |

p is the row's sums over their total. A row that has no total, since it sees no key or all its heads
look at their sinks, has a loss of 0 and gradients of 0, whatever comes back to it.
"""

# ruff: noqa: PLR0913

from __future__ import annotations

import triton
import triton.language as tl

from openmla.kernels.portable.indexer_loss.query_tiles import query_tile
from openmla.kernels.portable.softmax import MINUS_INF

COUNTS = ["total_q", "total_k", "batch", "launch_tile", "columns"]


@triton.jit(do_not_specialize=COUNTS)
def loss_row_pass_kernel(
    sums_ptr,
    scores_ptr,
    loss_ptr,
    d_loss_ptr,
    cu_q_ptr,
    cu_k_ptr,
    total_q,
    total_k,
    batch,
    launch_tile,
    columns,
    CAUSAL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row; `loss_ptr` is None where gradients are computed. See the top of the file."""
    program = tl.program_id(0)
    tile = query_tile(
        launch_tile + program // BM, cu_q_ptr, cu_k_ptr, batch, total_q, total_k, CAUSAL, BM
    )
    row = tile.first + program % BM
    if row >= tile.q_len:
        return
    token = (tile.q_start + row).to(tl.int64)
    line = tl.cast(program, tl.int64) * columns
    stop = (tile.stop + BN - 1) // BN * BN  # all that the score pass wrote
    lane = tl.arange(0, BLOCK)

    totals = tl.zeros([BLOCK], tl.float32)
    highs = tl.zeros([BLOCK], tl.float32) + MINUS_INF
    for start in tl.range(0, stop, BLOCK):
        ok = start + lane < stop
        totals += tl.load(sums_ptr + line + start + lane, mask=ok, other=0.0)
        s = tl.load(scores_ptr + line + start + lane, mask=ok, other=MINUS_INF)
        highs = tl.maximum(highs, s)
    total = tl.sum(totals, 0)
    has_target = total > 0.0
    total = tl.where(has_target, total, 1.0)
    high = tl.where(has_target, tl.max(highs, 0), 0.0)
    shares = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, stop, BLOCK):
        ok = start + lane < stop
        s = tl.load(scores_ptr + line + start + lane, mask=ok, other=MINUS_INF)
        shares += tl.exp(s - high)
    lse = high + tl.log(tl.sum(shares, 0))

    if loss_ptr is not None:
        losses = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, stop, BLOCK):
            ok = start + lane < stop
            p = tl.load(sums_ptr + line + start + lane, mask=ok, other=0.0) / total
            s = tl.load(scores_ptr + line + start + lane, mask=ok, other=0.0)
            seen = p > 0.0
            far = tl.log(tl.where(seen, p, 1.0)) - (s - lse)
            losses += tl.where(seen, p * far, 0.0)
        loss = tl.sum(losses, 0)
        tl.store(loss_ptr + token, tl.where(has_target, loss, 0.0))
    else:
        come = tl.load(d_loss_ptr + token)
        for start in tl.range(0, stop, BLOCK):
            ok = start + lane < stop
            p = tl.load(sums_ptr + line + start + lane, mask=ok, other=0.0) / total
            s = tl.load(scores_ptr + line + start + lane, mask=ok, other=MINUS_INF)
            d = come * (tl.exp(s - lse) - p)
            tl.store(sums_ptr + line + start + lane, tl.where(has_target, d, 0.0), mask=ok)
