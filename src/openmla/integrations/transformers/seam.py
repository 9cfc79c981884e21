"""The seam: methods of an attention module and of its indexer, overridden and given back.

Every MLA attention of Transformers expands the cached rows by a method of its own,
`expand_kv(latent, rope)`, and passes the result on untouched. Here it returns the two as they are,
so the attention function gets the rows themselves and decides how to attend. A model that caches
what `expand_kv` returns then caches rows: 576 wide for all heads, not 320 for each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from openmla.distributed.agreement import Group
from openmla.integrations.transformers import indexer

NAME = "openmla"
# While continuous batching serves a model. Transformers 5.17 looks for "paged|", later ones for
# "flash" in a name; masks are made for neither.
SERVING = ("openmla_flash", "paged|openmla_flash")
_INSTALLED, _OVERRIDDEN = "openmla_installed", "openmla_overridden"
# Classes whose `forward` is torch's rms_norm in eight operations, each compared in the tests.
PLAIN_NORMS = frozenset(
    f"{model}RMSNorm"
    for model in (
        "AXK1",
        "AXK2",
        "BailingHybrid",
        "DeepseekV2",
        "DeepseekV3",
        "DeepseekV32",
        "Glm4MoeLite",
        "Glm5NextText",
        "GlmMoeDsa",
        "HYV4",
        "KimiLinear",
        "LongcatFlash",
        "MiniCPM3",
        "Mistral4",
        "MistralLarge4",
        "Youtu",
    )
)


class Installed(NamedTuple):
    """How one attention module runs."""

    form: str
    group: Group
    """Ranks that share the sequences of a forward pass that names a shard."""
    before: str | None
    """The attention implementation that the config named."""

    def __deepcopy__(self, memo: object) -> Installed:
        """A copy of a model runs in the same group, which cannot be copied."""
        return self


NOT_INSTALLED = Installed("", None, None)


def install(
    layer: Any,
    form: str,
    fp8_indexer: bool = False,
    group: Group = None,
    forward: Callable[..., Any] | None = None,
) -> None:
    """Override the methods of one attention module, and note what its config says now."""
    layer.__dict__[_INSTALLED] = Installed(form, group, layer.config._attn_implementation)
    override(layer, "expand_kv", _rows)
    if hasattr(type(layer), "build_attention_mask_from_topk"):
        override(layer, "build_attention_mask_from_topk", _list_as_mask)
    if forward is not None:
        override(layer, "forward", partial(_forward, forward))
    own = getattr(layer, "indexer", None)
    if own is not None and not indexer.why_not(own, fp8_indexer):
        override(own, "forward", partial(_select, fp8=fp8_indexer))


def replace_forward(layer: Any, form: str, forward: Callable[..., Any]) -> None:
    """Override nothing but the `forward` of an attention module, and note what its config says."""
    layer.__dict__[_INSTALLED] = Installed(form, None, layer.config._attn_implementation)
    override(layer, "forward", forward)


def shorten_norms(model: nn.Module) -> None:
    """Let the norms of a model, those between its layers too, run as torch's own."""
    for module in model.modules():
        if type(module).__name__ in PLAIN_NORMS:
            override(module, "forward", _normalized)


def remove(model: nn.Module) -> None:
    """Methods and attention implementations as they were, in all modules of a model."""
    for module in model.modules():
        for name in module.__dict__.pop(_OVERRIDDEN, ()):
            module.__dict__.pop(name)
        found = module.__dict__.pop(_INSTALLED, None)
        if found is not None:
            config: Any = module.config
            config._attn_implementation = found.before


def override(module: Any, name: str, function: Callable[..., Any]) -> None:
    """Set a method of one module, unless another library has: accelerate's moves weights to where
    they are needed."""
    if name not in module.__dict__:
        module.__dict__[name] = MethodType(function, module)
        module.__dict__.setdefault(_OVERRIDDEN, []).append(name)


def layers(model: nn.Module) -> list[Any]:
    """Attention modules of a model that have the seam."""
    return [module for module in model.modules() if hasattr(type(module), "expand_kv")]


def installed(module: Any) -> Installed:
    """What `install` was given; the form is "" where K is put together by the model."""
    found: Installed = module.__dict__.get(_INSTALLED, NOT_INSTALLED)
    return found


def runs_on_openmla(config: Any) -> bool:
    """Whether the model was not given another attention meanwhile.

    Asked in every layer, and Transformers' own property takes longer than a launch: it is asked
    only where what it returns is kept elsewhere.
    """
    name = config.__dict__.get("_attn_implementation_internal")
    name = config._attn_implementation if name is None else name
    return name == NAME or name in SERVING


def is_served(config: Any) -> bool:
    """Whether continuous batching has the model."""
    return config._attn_implementation in SERVING


def _rows(self: Any, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """`expand_kv` that does not; unless the model was given another attention meanwhile."""
    if not runs_on_openmla(self.config):
        expanded: tuple[Tensor, Tensor] = type(self).expand_kv(self, latent, rope)
        return expanded
    return latent, rope


def _forward(shorter: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """A module's `forward` by `shorter`, where it is neither differentiated nor traced."""
    differentiated = torch.is_grad_enabled() or torch.compiler.is_compiling()
    if differentiated or not runs_on_openmla(self.config):
        return type(self).forward(self, *args, **kwargs)
    return shorter(self, *args, **kwargs)


def _list_as_mask(self: Any, topk_indices: Tensor, query_states: Tensor, kv_length: int) -> Tensor:
    """`build_attention_mask_from_topk` that leaves the list [B, S, topk] as it is."""
    if not runs_on_openmla(self.config):
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
    fp8: bool = False,
) -> Tensor:
    """An indexer's `forward`; the model's own where the mask is made of numbers."""
    arguments = (hidden_states, q_resid, position_embeddings, attention_mask)
    if not runs_on_openmla(self.config) or attention_mask.dtype != torch.bool:
        own: Tensor = type(self).forward(self, *arguments, position_ids, past_key_values)
        return own
    return indexer.select(self, *arguments, past_key_values, fp8)


def _normalized(self: Any, hidden_states: Tensor) -> Tensor:
    """The `forward` of a norm in one operation, which rounds once."""
    if hidden_states.dtype != self.weight.dtype:
        own: Tensor = type(self).forward(self, hidden_states)
        return own
    return rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)
