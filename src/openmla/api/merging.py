"""Merging of partial results: the same queries over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from openmla import checks, ops
from openmla.errors import InvalidArgument

__all__ = ["merge_many", "merge_states"]

assert ops.FORMS  # importing ops registers torch.ops.openmla.*


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Combine results over two disjoint sets of keys: chunked prefill, context parallelism.

    Returns out and lse over all keys. More than two parts belong into one merge_many: each call
    rounds its out to the dtype of the parts.

    Args:
        out_a: [total_q, H, d_v], bf16, fp16 or fp32.
        lse_a: fp32 [total_q, H], natural log; -inf or +inf where the part saw no key.
        out_b: as out_a, over other keys.
        lse_b: as lse_a, over those keys.

    Raises:
        InvalidArgument: shapes, dtypes or devices do not go together.
        Unsupported: a tensor requires gradients.

    >>> a, b = torch.full((1, 1, 2), 1.0), torch.full((1, 1, 2), 4.0)
    >>> weight = torch.zeros(1, 1)  # exp(lse) = 1: as many keys, equally strong
    >>> out, lse = merge_states(a, weight, b, weight + 0.6931472)  # twice as strong
    >>> out, lse.exp()
    (tensor([[[3., 3.]]]), tensor([[3.]]))
    """
    a = checks.tensor("out_a", out_a, ("total_q", "heads", "d_v"), checks.Q_DTYPES[:3])
    b = checks.tensor("out_b", out_b, tuple(a.shape), (a.dtype,), a.device)
    for name, value in (("lse_a", lse_a), ("lse_b", lse_b)):
        checks.tensor(name, value, tuple(a.shape[:2]), (torch.float32,), a.device)
    checks.no_gradients(out_a=a, lse_a=lse_a, out_b=b, lse_b=lse_b)
    return _merged([a, b], [lse_a, lse_b])


def merge_many(
    outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Combine results over any number of disjoint sets of keys, and round once, at the end.

    Returns out and lse over all keys. A part with lse -inf (or +inf, as some libraries mark it) saw
    no key and is ignored, whatever its out holds; where no part saw a key, out is 0 and lse -inf.
    Parts are added in the order they come, on every device.

    Args:
        outs: [n, total_q, H, d_v], or n tensors [total_q, H, d_v] that need not lie together.
        lses: fp32 [n, total_q, H] likewise, natural log.

    Raises:
        InvalidArgument: shapes, dtypes, devices or the numbers of parts do not go together.
        Unsupported: a tensor requires gradients.

    >>> outs, lses = torch.ones(3, 1, 1, 2), torch.zeros(3, 1, 1)
    >>> lses[2] = -torch.inf  # the third saw no key
    >>> out, lse = merge_many(outs, lses)
    >>> out, lse.exp()
    (tensor([[[1., 1.]]]), tensor([[2.]]))
    """
    parts = checks.parts("outs", outs, ("total_q", "heads", "d_v"), checks.Q_DTYPES[:3])
    rows = tuple(parts[0].shape[:2])
    states = checks.parts("lses", lses, rows, (torch.float32,), parts[0].device)
    if len(states) != len(parts):
        raise InvalidArgument("lses", f"{len(parts)} parts, as outs has", len(states))
    for part, state in zip(parts, states, strict=True):
        checks.no_gradients(outs=part, lses=state)
    return _merged(parts, states)


def _merged(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(outs[0], memory_format=torch.contiguous_format)
    lse = torch.empty_like(lses[0], memory_format=torch.contiguous_format)
    torch.ops.openmla.merge_many(outs, lses, out, lse)
    return out, lse
