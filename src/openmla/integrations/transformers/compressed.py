"""DeepSeek-V4 in Transformers: attention to a window and to compressed rows by `mla_attend`.

Its attention has no `expand_kv`: K and V are one row, shared by all heads. Transformers puts window
and compressed rows together in one tensor, makes a mask [B, 1, S, T] of numbers over both, and
multiplies every query with every row. Here the module's `forward` is overridden: each query has two
lists, of the window's rows and of compressed ones, and nothing is put together. Caches are the
model's own and hold the same.

Masks are made once per forward pass, for all layers: `window_list` makes the first list in their
place, int32 [B, S, window].
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor

import openmla
from openmla import checks
from openmla.compressor import compress_rows
from openmla.errors import Unsupported
from openmla.indexer.api import SCORES_LIMIT
from openmla.integrations.transformers import seam
from openmla.integrations.transformers.attention import has_effect
from openmla.integrations.transformers.forms import in_autocast
from openmla.integrations.transformers.masks import selected
from openmla.nn.rope import turn_tail, turns_back

NAME = "openmla_compressed"
CLASS = "DeepseekV4Attention"
ARGUMENTS = (
    "self",
    "hidden_states",
    "position_embeddings",
    "position_ids",
    "attention_mask",
    "past_key_values",
    "kwargs",
)


def is_compressed(module: Any) -> bool:
    """Whether a module is DeepSeek-V4's attention."""
    return type(module).__name__ == CLASS


def check(layer: Any, form: str, fp8_indexer: bool, group: object) -> None:
    """Refuse what was asked for and is not there."""
    own = tuple(inspect.signature(type(layer).forward).parameters)
    if own != ARGUMENTS:
        raise Unsupported(f"{CLASS} of this version of Transformers", nearest="that of 5.22")
    if "forward" in vars(layer) and not seam.installed(layer).form:
        raise Unsupported(f"the forward of a {CLASS} is overridden already")
    if form == "expanded":
        raise Unsupported(
            f"{CLASS} keeps one row as K and V, and there is no other form",
            nearest='optimize(model, form="auto")',
        )
    if fp8_indexer:
        raise Unsupported(
            "fp8_indexer: DeepseekV4Indexer in e4m3", nearest="optimize(model), in its precision"
        )
    if group is not None:
        raise Unsupported(f"{CLASS} over several ranks", nearest="optimize(model)")


def no_batching(self: Any, *_: Any, **__: Any) -> NoReturn:
    """`init_continuous_batching` of an optimized model: the engine has one cache for all layers."""
    raise Unsupported(
        f"continuous batching of {type(self).__name__}, whose rows are compressed",
        nearest="model.generate",
    )


def window_list(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: Any = "cpu",
    **_: Any,
) -> Tensor:
    """What Transformers takes for a mask: int32 [B, S, window], the keys that each query sees.

    Keys are numbered as they lie in the layers' tensors, -1 names none. The model's own function
    decides, padding and packed sequences included, but is asked for the last `window` keys of each
    query instead of for all.
    """
    if local_size is None:
        raise Unsupported("a mask without a window, for a model of compressed rows")
    width = min(local_size, kv_length)
    query = torch.arange(q_length, device=device)[None, :, None] + q_offset
    keys = query + torch.arange(1 - width, 1, device=device)
    sequence = torch.arange(batch_size, device=device)[:, None, None]
    there = (keys >= kv_offset) & (keys < kv_offset + kv_length)
    keys = torch.where(there, keys, kv_offset)
    seen = there & mask_function(sequence, torch.zeros_like(sequence), query, keys)
    if attention_mask is not None:
        # A token that the mask does not reach is padding, as for every other implementation.
        known = keys < attention_mask.shape[1]
        kept = attention_mask.bool()[sequence, torch.where(known, keys, 0)]
        seen = seen & known & kept
    listed = torch.where(seen, keys - kv_offset, -1).to(torch.int32)
    return listed.expand(batch_size, -1, -1)


def forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: dict[str, tuple[Tensor, Tensor]],
    position_ids: Tensor,
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    """A module's `forward`: here, or the model's own with one warning where it cannot be here."""
    arguments = hidden_states, position_embeddings, position_ids
    listed = _list_of(attention_mask)
    if not runs_here(self.config):
        return type(self).forward(self, *arguments, attention_mask, past_key_values, **kwargs)
    options = {name for name, value in kwargs.items() if has_effect(name, value)}
    reason = why_not(self, hidden_states, listed, options)
    if listed is not None and not reason:
        return _attended(self, *arguments, listed, past_key_values), None
    _warn_once(reason)
    if listed is not None:
        keys = _window_keys(self, hidden_states.shape[1], past_key_values)
        attention_mask = _numbers(listed, keys, hidden_states.dtype)
    return type(self).forward(self, *arguments, attention_mask, past_key_values, **kwargs)


def why_not(self: Any, hidden_states: Tensor, listed: Tensor | None, options: set[str]) -> str:
    """Why a module attends as it did before; "" when it need not."""
    if listed is None:
        return "a mask of one's own in a model of compressed rows"
    if checks.needs_gradients(hidden_states, *self.parameters()):
        return "gradients of compressed rows"
    if self.training and self.attention_dropout:
        return "dropout"
    if torch.compiler.is_compiling():
        return "torch.compile of a model of compressed rows"
    return f"the keyword {min(options)}" if options else ""


def own_attention(module: Any, *args: Any, **kwargs: Any) -> Any:
    """What the name of this implementation stands for in a module's own `forward`: eager."""
    if not is_compressed(module) or not seam.installed(module).form:
        raise Unsupported(
            f"attn_implementation={NAME!r} in a {type(module).__name__} that is not optimized",
            nearest="openmla.integrations.transformers.optimize(model)",
        )
    eager = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    return eager(module, *args, **kwargs)


def runs_here(config: Any) -> bool:
    """Whether the model was not given another attention meanwhile."""
    implementation: str = config._attn_implementation
    return implementation == NAME


def _attended(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: dict[str, tuple[Tensor, Tensor]],
    position_ids: Tensor,
    window: Tensor,
    past_key_values: Any,
) -> Tensor:
    """[B, S, hidden] -> [B, S, hidden]."""
    batch, tokens, _ = hidden_states.shape
    cos, sin = (x[:, :, None] for x in position_embeddings[self.rope_layer_type])
    residual = self.q_a_norm(self.q_a_proj(hidden_states))
    q = self.q_b_proj(residual).view(batch, tokens, -1, self.head_dim)
    q = turn_tail(self.q_b_norm(q), cos, sin)
    kv = self.kv_norm(self.kv_proj(hidden_states))[:, :, None]
    kv = turn_tail(kv, cos, sin).transpose(1, 2)
    if past_key_values is not None:
        kv = past_key_values.update(kv, kv, self.layer_idx)[0]
    q, kv = in_autocast(q, kv)
    sources = [_listed(kv[:, 0], window)]
    if self.compressor is not None:
        layer = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        (rows,) = in_autocast(_rows(self.compressor, "compressor", hidden_states, layer))
        if hasattr(self.compressor, "indexer"):
            keys = _rows(self.compressor.indexer, "indexer", hidden_states, layer)
            given = hidden_states, residual, position_ids
            chosen = _chosen(self.compressor.indexer, keys, *given)
            sources += [_listed(rows, chosen)] if rows.shape[1] else []
        elif rows.shape[1]:
            sources += [_first(rows, position_ids, tokens, self.compressor.compress_rate)]
    out = openmla.mla_attend(
        q.flatten(0, 1),
        sources,
        scale=self.scaling,
        sink=self.sinks.float(),
        d_v=self.head_dim,
        turn_back=turns_back(*(x[:, :, 0].expand(batch, -1, -1) for x in (cos, sin))),
    )
    grouped = out.reshape(batch, tokens, self.config.o_groups, -1)
    projected: Tensor = self.o_b_proj(self.o_a_proj(grouped).flatten(2))
    return projected


def _list_of(mask: Any) -> Tensor | None:
    """A mask that is a `window_list`; None for any other mask."""
    listed = isinstance(mask, Tensor) and mask.dim() == 3 and mask.dtype == torch.int32
    return mask if listed else None


def _numbers(listed: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """A `window_list` as the model's own attention takes it: [B, 1, S, T]."""
    seen = selected(listed, keys)
    numbers = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return numbers.masked_fill_(~seen, torch.finfo(dtype).min)


def _window_keys(self: Any, tokens: int, past_key_values: Any) -> int:
    """Keys that the window's tensor of a layer will have."""
    if past_key_values is None:
        return tokens
    length: int = past_key_values.get_mask_sizes(tokens, self.layer_idx)[0]
    return length


@cache
def _warn_once(reason: str) -> None:
    message = f"openmla does not serve {reason}; the model's own attention runs instead"
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def _listed(rows: Tensor, listed: Tensor) -> openmla.Listed:
    """Rows [B, T, width] and lists [B, S, n] of places in them, as one pool of all sequences."""
    batch, length, _ = rows.shape
    if batch > 1:
        first = torch.arange(batch, dtype=torch.int32, device=rows.device).view(-1, 1, 1) * length
        listed = torch.where(listed < 0, -1, listed + first)
    return openmla.Listed(rows.flatten(0, 1), listed.flatten(0, 1))


def _first(rows: Tensor, position_ids: Tensor, tokens: int, ratio: int) -> openmla.Listed:
    """All rows [B, T, width] that are complete at each query's position.

    One token is shown every row there is, as the model does: where sequences are padded on the
    left, positions are fewer than tokens.
    """
    batch, length, _ = rows.shape
    every = torch.arange(length, dtype=torch.int32, device=rows.device)
    listed = _listed(rows, every.expand(batch, tokens, -1))
    ends = _ends(position_ids, ratio) if tokens > 1 else torch.full_like(position_ids, length)
    lengths = ends.to(torch.int32).expand(batch, -1).reshape(-1)
    return openmla.Listed(listed.rows, listed.indices, lengths)


def _ends(position_ids: Tensor, ratio: int) -> Tensor:
    """Rows of `ratio` tokens that are complete at a position."""
    return (position_ids + 1) // ratio


def _rows(part: Any, name: str, hidden_states: Tensor, layer: Any) -> Tensor:
    """[B, T, width]: all compressed rows so far of a compressor or an indexer.

    Unfinished rows, and of overlapping ones the last tokens, are kept by the layer's cache.
    """
    ratio: int = part.compress_rate
    kv, gate, first = part.kv_proj(hidden_states), part.gate_proj(hidden_states), 0
    if layer is not None:
        kv, gate, first = layer.store_compression_weights(name, kv, gate)
    rows = kv.shape[1] // ratio
    kv, gate = kv[:, : rows * ratio], gate[:, : rows * ratio]
    gate = gate + part.position_bias.repeat(rows, 1)
    overlap, previous = kv.shape[2] == 2 * part.head_dim, None
    if overlap and layer is not None and rows:
        parts = (x.unflatten(1, (rows, ratio)) for x in (kv, gate))
        before = layer.update_overlap_state(name, *parts, part.head_dim)
        previous = None if before[0] is None else before
    pooled = compress_rows(kv, gate, ratio=ratio, overlap=overlap, previous=previous)
    pooled = part.kv_norm(pooled)
    positions = torch.arange(first, first + rows * ratio, ratio, device=kv.device)[None]
    cos, sin = part.rotary_emb(pooled, positions, part.rope_layer_type)
    pooled = turn_tail(pooled, cos, sin)
    if layer is not None:
        pooled = layer.update_compressor_states(name, pooled)
    return pooled


@torch.no_grad()
def _chosen(
    indexer: Any, keys: Tensor, hidden_states: Tensor, residual: Tensor, position_ids: Tensor
) -> Tensor:
    """int32 [B, S, topk]: the best complete rows of every query, ascending, then -1."""
    batch, tokens, _ = hidden_states.shape
    length = keys.shape[1]
    if not length:
        return torch.empty(batch, tokens, 0, dtype=torch.int32, device=keys.device)
    cos, sin = indexer.rotary_emb(hidden_states, position_ids, indexer.rope_layer_type)
    q = indexer.q_b_proj(residual).view(batch, tokens, -1, indexer.head_dim)
    q = turn_tail(q, cos[:, :, None], sin[:, :, None])
    scorer = indexer.scorer
    weights = scorer.weights_proj(hidden_states).float()
    weights = weights * (scorer.softmax_scale * scorer.weights_scaling)
    ends = _ends(position_ids, indexer.compress_rate).clamp(max=length).to(torch.int32)
    ends = ends.expand(batch, -1)
    topk = min(indexer.index_topk, length)
    with torch.autocast(q.device.type, enabled=False):  # scores are in float32
        return torch.stack([_best(q[b], keys[b], weights[b], ends[b], topk) for b in range(batch)])


def _best(q: Tensor, keys: Tensor, weights: Tensor, ends: Tensor, topk: int) -> Tensor:
    """int32 [S, topk] of one sequence, every head's scores at most SCORES_LIMIT bytes at a time."""
    count = max(SCORES_LIMIT // (4 * q.shape[1] * keys.shape[0]), 1)
    found = []
    for start in range(0, q.shape[0], count):
        part = slice(start, start + count)
        each = (q[part].float() @ keys.float().T).relu_()
        scores = torch.bmm(weights[part, None], each)[:, 0]
        best = openmla.select_topk(scores, topk, ends=ends[part].contiguous())
        assert isinstance(best, Tensor)
        found.append(best)
    return torch.cat(found)
