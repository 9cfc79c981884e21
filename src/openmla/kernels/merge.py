"""Merging two partial attention results, on any device: plain torch, no sync.

With both lse finite: out = (w_a * out_a + w_b * out_b) / (w_a + w_b), w = exp(lse - max). A part
whose lse is -inf saw no key; its rows are ignored whatever they hold. Libraries that mark such rows
with +inf (FlashMLA, FlashAttention-2) are understood too.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor
) -> None:
    """Write the merged result into out and lse; all inputs are as merge_states documents."""
    lse_a, lse_b = (torch.where(x == torch.inf, -torch.inf, x) for x in (lse_a, lse_b))
    top = torch.maximum(lse_a, lse_b)
    empty = top == -torch.inf
    shift = torch.where(empty, 0.0, top)
    w_a, w_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    total = torch.where(empty, 1.0, w_a + w_b)
    # Shares, not weights: the sum of two large outputs could overflow before it is divided.
    share_a, share_b = w_a / total, w_b / total
    # An ignored part adds -0.0, the one number that leaves every other one as it was, -0.0 too.
    part_a = torch.where((w_a == 0).unsqueeze(-1), -0.0, out_a.float() * share_a.unsqueeze(-1))
    part_b = torch.where((w_b == 0).unsqueeze(-1), -0.0, out_b.float() * share_b.unsqueeze(-1))
    merged = part_a + part_b
    out.copy_(torch.where(empty.unsqueeze(-1), 0.0, merged))
    lse.copy_(torch.where(empty, -torch.inf, shift + torch.log(total)))
