"""Rows of e4m3 with one scale per token, on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
LEAST_AMAX = 2.0**-117  # keeps the scale a normal number, and 448 / amax finite
TOKENS = 256  # at a time: their fp32 copy stays in the cache


def quantize(x: Tensor, rope: Tensor | None, outs: list[Tensor], scale: Tensor) -> None:
    """x [tokens, heads, width] and rope [tokens, columns] into e4m3 `outs` of the same shapes."""
    parts = [x] if rope is None else [x, rope]
    for first in range(0, x.shape[0], TOKENS):
        rows = slice(first, first + TOKENS)
        wide = [part[rows].flatten(1).float() for part in parts]
        amax = torch.stack([_largest(part) for part in wide]).amax(0)
        known = amax.clamp_min(LEAST_AMAX)
        empty = amax == 0
        scale[rows] = torch.where(empty, 1.0, known / E4M3_MAX)
        # A number over a tensor would be its reciprocal times the number: rounded twice.
        inverse = torch.where(empty, 1.0, known.new_tensor(E4M3_MAX) / known)[:, None]
        for part, out in zip(wide, outs, strict=True):
            scaled = (part * inverse).clamp_(-E4M3_MAX, E4M3_MAX)
            scaled.masked_fill_(scaled.isnan(), torch.nan)  # 0 * inf has a sign, on some chips
            out[rows] = scaled.to(out.dtype).view_as(out[rows])


def _largest(x: Tensor) -> Tensor:
    """The largest magnitude of each row, NaN not counted."""
    return torch.where(x.isnan(), 0.0, x.abs()).amax(-1)
