"""Merging partial attention results, on any device: plain torch, no sync.

    lse = log(sum_i exp(lse_i)),  out = sum_i share_i * out_i  with  share_i = exp(lse_i - lse)

A part whose lse is -inf saw no key; its rows are ignored whatever they hold. Libraries that mark
such rows with +inf (FlashMLA, FlashAttention-2) are understood too. Parts are added in the order
they are given, in a type wider than theirs, and rounded once. One row of two parts in bf16:

    lse_i  0.0, -0.6931     share_i  0.6667, 0.3333     (lse 0.4055)
    out_i  1.0, 0.5         out      0.6667 + 0.1667 = 0.8333, stored as 0.8320
"""

from functools import reduce

import torch
from torch import Tensor


def merge(outs: list[Tensor], lses: list[Tensor], out: Tensor, lse: Tensor) -> None:
    """Write the merged result into out and lse; all inputs are as merge_many documents."""
    # Rows of lse are narrow beside rows of out, so float64 costs little and keeps shares exact.
    seen = [torch.where(x == torch.inf, -torch.inf, x.double()) for x in lses]
    row_max = reduce(torch.maximum, seen)
    empty = row_max == -torch.inf
    shift = torch.where(empty, 0.0, row_max)
    weights = [torch.exp(x - shift) for x in seen]
    row_sum = torch.where(empty, 1.0, reduce(torch.add, weights))
    # float32 parts need more than float32: shares that sum to 1 + 1e-7 overflow its largest values.
    wide = torch.float64 if out.dtype == torch.float32 else torch.float32
    # -0.0 is the one number that leaves every other one as it was, -0.0 too.
    merged = torch.full(out.shape, -0.0, dtype=wide, device=out.device)
    for part, weight in zip(outs, weights, strict=True):
        share = (weight / row_sum).to(wide).unsqueeze(-1)
        merged += torch.where(share == 0, -0.0, part.to(wide) * share)
    out.copy_(torch.where(empty.unsqueeze(-1), 0.0, merged))
    lse.copy_(torch.where(empty, -torch.inf, shift + torch.log(row_sum)))
