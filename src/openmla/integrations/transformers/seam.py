"""The seam: methods of an attention module and of its indexer, overridden and given back.

Every MLA attention of Transformers expands the cached rows by a method of its own,
`expand_kv(latent, rope)`, and passes the result on untouched. Here it returns the two as they are,
so the attention function gets the rows themselves and decides how to attend. A model that caches
what `expand_kv` returns then caches rows: 576 wide for all heads, not 320 for each.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor

from openmla.integrations.transformers import indexer

NAME = "openmla"
_FORM, _BEFORE = "openmla_form", "openmla_before"


def install(layer: Any, form: str, fp8_indexer: bool = True) -> None:
    """Override the methods of one attention module, and note what its config says now."""
    layer.__dict__.setdefault(_BEFORE, layer.config._attn_implementation)
    layer.__dict__[_FORM] = form
    layer.expand_kv = MethodType(_rows, layer)
    if hasattr(type(layer), "build_attention_mask_from_topk"):
        layer.build_attention_mask_from_topk = MethodType(_list_as_mask, layer)
    own = getattr(layer, "indexer", None)
    if own is not None and fp8_indexer and not indexer.why_not(own):
        own.forward = MethodType(_select, own)


def remove(layer: Any) -> None:
    """The methods and the attention implementation as they were."""
    before = layer.__dict__.pop(_BEFORE, None)
    for name in (_FORM, "expand_kv", "build_attention_mask_from_topk"):
        layer.__dict__.pop(name, None)
    if getattr(layer, "indexer", None) is not None:
        layer.indexer.__dict__.pop("forward", None)
    if before is not None:
        layer.config._attn_implementation = before


def form_of(module: Any) -> str:
    """The form that `install` was given; "" where K is put together by the model."""
    return str(module.__dict__.get(_FORM, ""))


def _rows(self: Any, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """`expand_kv` that does not; unless the model was given another attention meanwhile."""
    if self.config._attn_implementation != NAME:
        expanded: tuple[Tensor, Tensor] = type(self).expand_kv(self, latent, rope)
        return expanded
    return latent, rope


def _list_as_mask(self: Any, topk_indices: Tensor, query_states: Tensor, kv_length: int) -> Tensor:
    """`build_attention_mask_from_topk` that leaves the list [B, S, topk] as it is."""
    if self.config._attn_implementation != NAME:
        mask: Tensor = type(self).build_attention_mask_from_topk(
            self, topk_indices, query_states, kv_length
        )
        return mask
    return topk_indices


def _select(
    self: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
) -> Tensor:
    """An indexer's `forward`; the model's own where the mask is made of numbers."""
    arguments = (hidden_states, q_resid, position_embeddings, attention_mask)
    if self.config._attn_implementation != NAME or attention_mask.dtype != torch.bool:
        own: Tensor = type(self).forward(self, *arguments, position_ids, past_key_values)
        return own
    return indexer.select(self, *arguments, past_key_values)
