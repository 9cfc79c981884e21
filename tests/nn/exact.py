"""Layers by their definitions, in float64: one sequence, one query and one head at a time.

They share no code with the layers but their weights. Rows are `stored` before they are used, as a
cache rounds them, and lists are given: tests judge them by their scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Stored = Callable[[Tensor], Tensor]
"""Rows [n, width] as a cache gives them back."""


def rms(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    normed = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed if gain is None else normed * gain.double()


def times(x: Tensor, projection: nn.Linear) -> Tensor:
    return x @ projection.weight.double().T


def attended(
    q: Tensor, keys: Tensor, values: Tensor, seen: Sequence[int], scale: float, sink: float | None
) -> Tensor:
    """One head of one query: softmax over the rows it sees, and a sink that has no row."""
    rows = list(seen)
    scores = keys[rows] @ q * scale
    if sink is not None:
        scores = torch.cat([scores, torch.tensor([sink], dtype=torch.float64)])
    weights = (scores - scores.max()).exp() if len(scores) else scores
    return weights[: len(rows)] / weights.sum() @ values[rows]


def mla(layer: Any, x: Tensor, lists: Sequence[Sequence[int]], stored: Stored) -> Tensor:
    """float64 [tokens, hidden] of a layer of `MLAAttention` whose columns do not turn."""
    config, dims = layer.config, layer.config.dims
    x = x.double()
    compressed = rms(times(x, layer.q_a_proj), layer.q_a_layernorm.weight, config.eps)
    q = times(compressed, layer.q_b_proj).view(len(x), config.heads, dims.nope + dims.rope)
    made = times(x, layer.kv_a_proj_with_mqa)
    latent = rms(made[:, : dims.latent], layer.kv_a_layernorm.weight, config.eps)
    rows = stored(torch.cat([latent, made[:, dims.latent :]], 1).float()).double()
    weight = layer.kv_b_proj.weight.double().view(config.heads, dims.nope + dims.v, dims.latent)
    out = torch.empty(len(x), config.heads, dims.v, dtype=torch.float64)
    for head in range(config.heads):
        made = rows[:, : dims.latent] @ weight[head].T
        keys = torch.cat([made[:, : dims.nope], rows[:, dims.latent :]], 1)
        for t, seen in enumerate(lists):
            out[t, head] = attended(
                q[t, head], keys, made[:, dims.nope :], seen, config.scale, None
            )
    flat = out.flatten(1)
    if config.gate:
        flat = flat / (1 + (-times(x, layer.g_proj)).exp())
    return times(flat, layer.o_proj)
