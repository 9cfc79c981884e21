"""Layers by their definitions, in float64: one sequence, one query and one head at a time.

They share no code with the layers but their weights. Rows are `stored` before they are used, as a
cache rounds them, and lists are given: tests judge them by their scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Stored = Callable[[Tensor], Tensor]
"""Rows [n, width] as a cache gives them back."""


def cached(rows: Tensor, share: float, block: int = 1) -> Stored:
    """Rows that a cache holds. They must be those of the definition, each element off by at most a
    share of the largest in its block: what rounds to neighbors is no difference."""

    def stored(exact: Tensor) -> Tensor:
        n, width = exact.shape
        largest = exact.abs().view(n, -1, block).amax(2).repeat_interleave(block, 1)
        off = (rows[:n].double() - exact.double()).abs() - share * largest
        assert rows.shape[1] == width and (n == 0 or off.max() <= 1e-6), float(off.max())
        return rows[:n]

    return stored


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


def turned(x: Tensor, positions: Tensor, rope: Any, back: bool = False) -> Tensor:
    """The last columns of x [tokens, heads, width], pairs (0, 1), (2, 3), … of them, turned by an
    angle for each pair, position times its frequency."""
    pair = torch.arange(rope.width // 2, dtype=torch.float64)
    frequency = rope.theta ** (-2 * pair / rope.width)
    if rope.yarn is not None:
        yarn = rope.yarn

        def pair_with(rotations: float) -> float:
            around = yarn.trained / (rotations * 2 * math.pi)
            return rope.width * math.log(around) / (2 * math.log(rope.theta))

        low = max(math.floor(pair_with(yarn.fast)), 0)
        high = min(math.ceil(pair_with(yarn.slow)), rope.width - 1)
        slowed = ((pair - low) / max(high - low, 0.001)).clamp(0, 1)
        frequency = frequency / yarn.factor * slowed + frequency * (1 - slowed)
    angle = positions.double()[:, None, None] * frequency * (-1 if back else 1)
    still = x.shape[-1] - rope.width
    a, b = x[..., still::2], x[..., still + 1 :: 2]
    out = x.clone()
    out[..., still::2] = a * angle.cos() - b * angle.sin()
    out[..., still + 1 :: 2] = a * angle.sin() + b * angle.cos()
    return out


class WrittenRows(NamedTuple):
    """What a layer of DeepSeek-V4.1 writes for one sequence, not rounded."""

    rows: Tensor
    keys: Tensor


def written_rows(layer: Any, x: Tensor) -> WrittenRows:
    """Rows and keys of the indexer, of a layer of `SharedRowsAttention` that writes them."""
    config, x = layer.config, x.double()
    count, ratio = len(x) // config.ratio, config.ratio
    values = times(x, layer.compressor.kv_proj)
    latents = torch.empty(count, config.width, dtype=torch.float64)
    for j in range(count):
        tokens = slice(j * ratio, (j + 1) * ratio)
        weights = torch.ones(ratio, config.width, dtype=torch.float64)
        if ratio > 1:
            weights = times(x[tokens], layer.compressor.gate_proj).exp()
        latents[j] = (weights / weights.sum(0) * values[tokens]).sum(0)
    latents = rms(latents, layer.compressor.kv_norm.weight, config.eps)
    keys = rms(times(latents, layer.indexer.k_proj), layer.indexer.k_norm.weight, config.eps)
    first = torch.arange(count) * ratio
    rows, keys = (turned(z[:, None], first, config.rope)[:, 0] for z in (latents, keys))
    return WrittenRows(rows, keys)


def shared_rows_layer(
    layer: Any, x: Tensor, window: Stored, rows: Tensor, lists: Sequence[Sequence[int]]
) -> Tensor:
    """float64 [tokens, hidden] of `SharedRowsAttention`: window rows as they are `stored`, and of
    the given compressed rows those that each query's list names."""
    config, positions = layer.config, torch.arange(len(x))
    x = x.double()
    compressed = rms(times(x, layer.q_a_proj), layer.q_a_norm.weight, config.eps)
    q = times(compressed, layer.q_b_proj).view(len(x), config.heads, config.width)
    q = turned(q, positions, config.rope)
    own = rms(times(x, layer.kv_proj), layer.kv_norm.weight, config.eps)
    own = window(turned(own[:, None], positions, config.rope)[:, 0].float()).double()
    both = torch.cat([own, rows.double()])
    out = torch.empty_like(q)
    for t, named in enumerate(lists):
        seen = [*range(max(0, t - config.window + 1), t + 1), *(len(x) + row for row in named)]
        for head in range(config.heads):
            sink = float(layer.sinks[head])
            out[t, head] = attended(q[t, head], both, both, seen, config.width**-0.5, sink)
    out = turned(out, positions, config.rope, back=True)
    grouped = out.reshape(len(x), config.o_groups, -1)
    weight = layer.o_a_proj.weight.double().view(config.o_groups, config.o_lora, -1)
    low = [grouped[:, group] @ weight[group].T for group in range(config.o_groups)]
    return times(torch.cat(low, 1), layer.o_b_proj)


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
