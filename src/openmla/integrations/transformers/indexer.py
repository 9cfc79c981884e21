"""The indexer of a DSA layer of Transformers, without its scores of every head.

Transformers multiplies in the model's own precision and keeps [B, S, H, T] scores: 64 GiB for 4096
queries of 128K keys. Here q and k are quantized to e4m3, as the models are served everywhere else,
and scored and selected a bounded number of queries at a time. Keys stay in the model's own cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import openmla
from openmla.indexer.api import SCORES_LIMIT
from openmla.indexer.cache import quantize
from openmla.indexer.problem import DIM
from openmla.nn.indexer import fold
from openmla.nn.rope import Rope

# Classes that are compared with this one in the tests, and whether their rope turns neighbors.
INTERLEAVED = {"DeepseekV32Indexer": False, "GlmMoeDsaIndexer": True}
PARTS = {"wq_b": nn.Linear, "wk": nn.Linear, "k_norm": nn.LayerNorm, "weights_proj": nn.Linear}


def why_not(indexer: Any) -> str:
    """Why a model's indexer is left as it is; "" when `select` does what it does."""
    name = type(indexer).__name__
    if name not in INTERLEAVED:
        return f"{name} is not known"
    if indexer.head_dim != DIM:
        return f"{name} is {indexer.head_dim} wide, and e4m3 keys have {DIM} columns"
    kinds = {part: type(getattr(indexer, part)) for part in PARTS}
    other = [f"{part} is a {kind.__name__}" for part, kind in kinds.items() if kind != PARTS[part]]
    return other[0] if other else ""


@torch.no_grad()
def select(
    indexer: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    past_key_values: Any = None,
) -> Tensor:
    """int32 [B, S, topk]: the best keys of every query that the mask bool [B, S, T] lets it see.

    Ascending, then -1; keys that it does not let through come last, where there are no others.
    """
    batch, tokens, _ = hidden_states.shape
    q = indexer.wq_b(q_resid).view(batch, tokens, indexer.n_heads, DIM)
    k = indexer.k_norm(indexer.wk(hidden_states))[:, :, None]
    q, k = (_turned(indexer, x, position_embeddings) for x in (q, k))
    k = k[:, :, 0]
    if past_key_values is not None:
        k = past_key_values.update_indexer(k, indexer.layer_idx)
    projection = indexer.weights_proj
    weights = projection(hidden_states.to(projection.weight.dtype)).float()
    weights = weights * (indexer.n_heads * DIM) ** -0.5
    mask = attention_mask.expand(batch, tokens, k.shape[1])
    topk = min(indexer.index_topk, k.shape[1])
    return torch.stack([_best(q[b], k[b], weights[b], mask[b], topk) for b in range(batch)])


def _best(q: Tensor, k: Tensor, weights: Tensor, mask: Tensor, topk: int) -> Tensor:
    """int32 [S, topk] of one sequence, its scores at most SCORES_LIMIT bytes at a time."""
    values, folded = fold(q, weights)
    keys = quantize(k, "ue8m0")
    column = torch.arange(1, k.shape[0] + 1, dtype=torch.int32, device=k.device)
    rows = max(SCORES_LIMIT // (4 * k.shape[0]), 1)
    found = []
    for start in range(0, q.shape[0], rows):
        part = slice(start, start + rows)
        ends = torch.where(mask[part], column, 0).amax(-1).to(torch.int32)
        scores = openmla.indexer_scores(values[part], keys, folded[part], ends=ends)
        scores.masked_fill_(~mask[part], -torch.inf)
        best = openmla.select_topk(scores, topk, ends=ends)
        assert isinstance(best, Tensor)
        found.append(best)
    return torch.cat(found)


def _turned(indexer: Any, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """x [B, S, n, 128] with rope on its first columns, as the model turns them."""
    width: int = indexer.qk_rope_head_dim
    rope = Rope(width, 1.0, INTERLEAVED[type(indexer).__name__])
    cos, sin = (t[:, :, None, : width // 2] for t in cos_sin)
    return torch.cat([rope.turn(x[..., :width], cos, sin), x[..., width:]], dim=-1)
