"""The indexer of a DSA layer of Transformers, without its scores of every head.

Transformers multiplies in float32 and keeps [B, S, H, T] scores: 64 GiB for 4096 queries of 128K
keys. Here a bounded number of queries at a time is scored, as exactly, and selected from. On
request q and k are quantized to e4m3 first, as servers of these models do: faster, and keys near
the cut may be others. Keys stay in the model's own cache either way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import openmla
from openmla.errors import Unsupported
from openmla.indexer.api import SCORES_LIMIT
from openmla.indexer.cache import quantize
from openmla.indexer.problem import DIM
from openmla.nn.indexer import fold
from openmla.nn.rope import Rope

# Classes that are compared with this one in the tests, and whether their rope turns neighbors.
INTERLEAVED = {"DeepseekV32Indexer": False, "GlmMoeDsaIndexer": True}
PARTS = {"wq_b": nn.Linear, "wk": nn.Linear, "k_norm": nn.LayerNorm, "weights_proj": nn.Linear}


def why_not(indexer: Any, fp8: bool = False) -> str:
    """Why a model's indexer is left as it is; "" when `select` does what it does."""
    name = type(indexer).__name__
    if name not in INTERLEAVED:
        return f"{name} is not known"
    if fp8 and indexer.head_dim != DIM:
        return f"{name} is {indexer.head_dim} wide, and e4m3 keys have {DIM} columns"
    kinds = {part: type(getattr(indexer, part)) for part in PARTS}
    other = [f"{part} is a {kind.__name__}" for part, kind in kinds.items() if kind != PARTS[part]]
    return other[0] if other else ""


def check_fp8(indexer: Any) -> None:
    """Refuse e4m3 where it was asked for and there is no way."""
    why = why_not(indexer, fp8=True)
    if why:
        raise Unsupported(f"fp8_indexer: {why}", nearest="optimize(model), in its own precision")


@torch.no_grad()
def select(
    indexer: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    past_key_values: Any = None,
    fp8: bool = False,
) -> Tensor:
    """int32 [B, S, topk]: the best keys of every query that the mask bool [B, S, T] lets it see.

    Ascending, then -1; keys that it does not let through come last, where there are no others.
    """
    batch, tokens, _ = hidden_states.shape
    q = indexer.wq_b(q_resid).view(batch, tokens, indexer.n_heads, indexer.head_dim)
    k = indexer.k_norm(indexer.wk(hidden_states))[:, :, None]
    q, k = (_turned(indexer, x, position_embeddings) for x in (q, k))
    k = k[:, :, 0]
    if past_key_values is not None:
        k = past_key_values.update_indexer(k, indexer.layer_idx)
    projection = indexer.weights_proj
    weights = projection(hidden_states.to(projection.weight.dtype)).float()
    weights = weights * (indexer.n_heads * indexer.head_dim) ** -0.5
    mask = attention_mask.expand(batch, tokens, k.shape[1])
    topk = min(indexer.index_topk, k.shape[1])
    best = _best_fp8 if fp8 else _best
    with torch.autocast(q.device.type, enabled=False):  # scores are in float32
        return torch.stack([best(q[b], k[b], weights[b], mask[b], topk) for b in range(batch)])


def _best(q: Tensor, k: Tensor, weights: Tensor, mask: Tensor, topk: int) -> Tensor:
    """int32 [S, topk] of one sequence, every head's scores at most SCORES_LIMIT bytes at a time."""
    rows = max(SCORES_LIMIT // (4 * q.shape[1] * k.shape[0]), 1)
    found = []
    for start in range(0, q.shape[0], rows):
        part = slice(start, start + rows)
        each = _products(q[part].flatten(0, 1), k).relu_().view(-1, q.shape[1], k.shape[0])
        scores = torch.bmm(weights[part, None], each)[:, 0]
        found.append(_largest(scores, mask[part], _ends(mask[part]), topk))
    return torch.cat(found)


def _products(q: Tensor, k: Tensor) -> Tensor:
    """float32 [n, T]: products of 16-bit numbers are exact in it, and on a GPU there is no need to
    convert them first."""
    if q.is_cuda and q.dtype != torch.float32:
        return torch.mm(q, k.T, out_dtype=torch.float32)
    return q.float() @ k.float().T


def _best_fp8(q: Tensor, k: Tensor, weights: Tensor, mask: Tensor, topk: int) -> Tensor:
    """The best keys by e4m3 products, with scores that are sums over heads already."""
    values, folded = fold(q, weights)
    keys = quantize(k, "ue8m0")
    rows = max(SCORES_LIMIT // (4 * k.shape[0]), 1)
    found = []
    for start in range(0, q.shape[0], rows):
        part = slice(start, start + rows)
        ends = _ends(mask[part])
        scores = openmla.indexer_scores(values[part], keys, folded[part], ends=ends)
        found.append(_largest(scores, mask[part], ends, topk))
    return torch.cat(found)


def _ends(mask: Tensor) -> Tensor:
    """int32 [S]: one past the last key that each query sees."""
    column = torch.arange(1, mask.shape[1] + 1, dtype=torch.int32, device=mask.device)
    return torch.where(mask, column, 0).amax(-1).to(torch.int32)


def _largest(scores: Tensor, mask: Tensor, ends: Tensor, topk: int) -> Tensor:
    best = openmla.select_topk(scores.masked_fill_(~mask, -torch.inf), topk, ends=ends)
    assert isinstance(best, Tensor)
    return best


def _turned(indexer: Any, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """x [B, S, n, head_dim] with rope on its first columns, as the model turns them."""
    width: int = indexer.qk_rope_head_dim
    rope = Rope(width, 1.0, INTERLEAVED[type(indexer).__name__])
    cos, sin = (t[:, :, None, : width // 2] for t in cos_sin)
    return torch.cat([rope.turn(x[..., :width], cos, sin), x[..., width:]], dim=-1)
