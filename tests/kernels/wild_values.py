"""Numbers that no caller should pass: offsets, lengths, tables and lists on a device hold anything.

Nobody looks at them before a launch, which would mean waiting for the device. So whatever they
hold, kernels read and write inside their tensors, and end.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from openmla.lab.testing.build import BuiltCase

NAMES = (
    "cu_seqlens_q",
    "cu_seqlens_k",
    "k_start",
    "cache_lengths",
    "block_table",
    "indices",
    "topk_lengths",
)
EXTREMES = (-(2**31), -(2**31) + 1, -(2**30), -70, -1, 0, 1, 70, 2**20, 2**30, 2**31 - 1)
KINDS = ("early", "late", "backwards", "anything", "something")
"""Numbers too small or too large by a few, in the opposite order, extreme, or half of them so."""


def make_wild(x: Tensor, kind: str, rng: random.Random) -> None:
    """Overwrite a tensor of int32."""
    if kind == "early":
        x -= 7
    elif kind == "late":
        x += 7
    elif kind == "backwards":
        x.copy_(x.flip(-1))
    else:
        drawn = torch.tensor(rng.choices(EXTREMES, k=x.numel()), dtype=x.dtype).view(x.shape)
        kept = torch.tensor([rng.random() < 0.5 for _ in range(x.numel())]).view(x.shape)
        x.copy_(torch.where(kept, x.cpu(), drawn) if kind == "something" else drawn)


def with_wild_values(built: BuiltCase, kind: str, seed: int) -> BuiltCase:
    """The case with all such tensors overwritten, or (odd seeds) one of them."""
    rng = random.Random(f"{kind} {seed}")
    found = [getattr(built.operands, name, None) for name in NAMES]
    tensors = [x for x in found if x is not None]
    for x in rng.sample(tensors, 1) if seed % 2 else tensors:
        make_wild(x, kind, rng)
    return built
