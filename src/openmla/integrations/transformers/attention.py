"""The attention function that Transformers calls for every layer, and when it hands on to SDPA."""

from __future__ import annotations

import warnings
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from openmla import checks
from openmla.errors import InvalidArgument, Unsupported
from openmla.integrations.transformers import forms, paged, ranks
from openmla.integrations.transformers.masks import full_mask, selected
from openmla.integrations.transformers.seam import installed, is_served
from openmla.planning.form import LayerDims, choose_form

# Keywords that models pass along and that do not change what attention computes: positions are in
# the rope already, and where they matter to the mask, the mask says so.
WITHOUT_EFFECT = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "logits_to_keep",
        "return_dict",
        "output_hidden_states",
        "output_router_logits",
        "num_items_in_batch",
    }
)


class Call(NamedTuple):
    """One layer's call. With `form`, key and value are the latent and rope columns of its rows."""

    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    indices: Tensor | None
    sink: Tensor | None
    form: str
    options: dict[str, Any]


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    indices: Tensor | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What `ALL_ATTENTION_FUNCTIONS["openmla"]` is: [B, S, H, v] from one layer's tensors."""
    options = {k: v for k, v in options.items() if has_effect(k, v)}
    query, key, value = forms.in_autocast(query, key, value)
    how = installed(module)
    served = bool(how.form) and is_served(module.config)
    if "cache" in options and not served:
        raise Unsupported(
            "continuous batching of a model that is not optimized",
            nearest="openmla.integrations.transformers.optimize(model)",
        )
    if served:
        others = indices, s_aux
        return _served(module, query, (key, value), how.form, scaling, options, *others), None
    mask = attention_mask
    if indices is not None and (mask is None or mask.dim() < 4):
        mask = full_mask(mask, query.shape[2], key.shape[2], query.device)
    elif mask is not None and mask.dim() == 3:
        # The seam's stand-in for a mask made of a list: the list, with -1 for what is not seen.
        indices, mask = forms.unique(mask), None
    sink = None if s_aux is None else s_aux.float()
    call = Call(module, query, key, value, mask, indices, s_aux, how.form, options)
    shard = options.pop("shard", None)
    reason = why_sdpa(call, dropout)
    if shard is not None:
        ranks.check(module, query, key.shape[2], mask, shard, how.group)
        if reason:
            raise Unsupported(f"{reason}, beside a shard")
        form = "expanded" if is_differentiated(call) else how.form
        given = (key, value), form, shard, how.group
        return ranks.attend(module, query, *given, scale=scaling, sink=sink), None
    if not reason:
        try:
            attend = _differentiable if is_differentiated(call) else _openmla
            return attend(call, scale=scaling, sink=sink), None
        except _NoGradients as error:
            reason = str(error)
    return _sdpa(call, reason, dropout=dropout, scaling=scaling)


def _served(
    module: Any,
    query: Tensor,
    rows: tuple[Tensor, Tensor],
    form: str,
    scale: float | None,
    options: dict[str, Any],
    *others: Tensor | None,
) -> Tensor:
    """One layer of a batch of continuous batching, which comes without a mask."""
    if "cache" not in options:
        raise Unsupported(
            "a forward pass of a model that continuous batching serves",
            nearest="the same after the manager's stop()",
        )
    if any(x is not None for x in others):
        raise Unsupported("selected keys or attention sinks in continuous batching")
    return paged.attend(module, query, rows, form, scale, options)


def why_sdpa(call: Call, dropout: float) -> str:
    """Why the call must go to SDPA; "" when openmla serves it."""
    if not hasattr(type(call.module), "expand_kv"):
        return f"{type(call.module).__name__} is not MLA"
    if dropout:
        return "dropout"
    if call.form == "latent" and is_differentiated(call):
        return "gradients of the latent form"
    if call.options.get("is_causal", True) is not True:
        return "attention that is not causal"
    if call.options.keys() - {"is_causal"}:
        return f"the keyword {min(call.options.keys() - {'is_causal'})}"
    if call.indices is None:
        return "" if call.mask is None or call.mask.dim() == 2 or are_bits(call) else "a 4-D mask"
    if not call.form:
        return "selected keys (DSA) without openmla.integrations.transformers.optimize(model)"
    return "" if call.mask is None or call.mask.dtype == torch.bool else "a mask of numbers"


def are_bits(call: Call) -> bool:
    """Whether a 4-D mask says of every query and key whether it is seen, of all heads alike, in a
    call with gradients: the masked form has them."""
    mask, shape = call.mask, (1, call.query.shape[2], call.key.shape[2])
    said = mask is not None and mask.dtype == torch.bool and tuple(mask.shape[1:]) == shape
    return said and bool(call.form) and is_differentiated(call)


def is_differentiated(call: Call) -> bool:
    """Whether autograd is to compute a gradient of what the call reads, a projection included."""
    projection = call.module.kv_b_proj.parameters() if call.form else ()
    return checks.needs_gradients(call.query, call.key, call.value, call.sink, *projection)


def has_effect(name: str, value: object) -> bool:
    """Whether a keyword that a model passes along changes what attention computes."""
    unset = value is None or (value is False and name != "is_causal")
    return not unset and name not in WITHOUT_EFFECT


def _openmla(call: Call, **options: Any) -> Tensor:
    query, mask, heads = call.query, call.mask, forms.Heads.of(call.module)
    if not call.form:  # K put together by the model: every head holds the same rope columns
        keys = call.key.transpose(1, 2)
        k_nope, k_rope, v = keys[..., : heads.nope], keys[:, :, 0, heads.nope :], call.value
        return _put_together(query, k_nope, k_rope, v.transpose(1, 2), mask, **options)
    rows = call.key, call.value
    if call.indices is not None:
        seen = call.indices if mask is None else forms.visible(call.indices, mask)
        return forms.sparse(query, heads, rows, seen, **options)
    if mask is not None:
        _check_used(mask, call.key.shape[2])
        # A static cache is longer than what it holds.
        rows = rows[0][:, :, : mask.shape[1]], rows[1][:, :, : mask.shape[1]]
    if call.form == "latent":
        return forms.latent(query, heads, rows, mask, **options)
    if call.form == "auto" and _latent_is_less_work(call, heads, rows):
        try:
            return forms.latent(query, heads, rows, mask, **options)
        except Unsupported:  # raised before anything ran: this device has no latent kernel for it
            pass
    return forms.expanded(query, heads, rows, mask, **options)


class _NoGradients(Exception):
    """No kernel computes the gradients of this call. Raised before any attention ran."""


def _differentiable(call: Call, **options: Any) -> Tensor:
    """The expanded form, which has gradients; bits hide keys that were not selected, and those that
    a 4-D mask hides: other sequences packed into the same row, say."""
    seen = call.mask
    try:
        if call.indices is None and (seen is None or seen.dim() == 2):
            return _openmla(call._replace(form=call.form and "expanded"), **options)
        rows, keys = (call.key, call.value), call.key.shape[2]
        if call.indices is not None:
            chosen = selected(call.indices, keys)
            seen = chosen if seen is None else chosen & seen
        assert seen is not None
        return forms.masked(call.query, forms.Heads.of(call.module), rows, seen, **options)
    except Unsupported as error:
        raise _NoGradients(f"gradients here ({error.reason})") from error


def _put_together(
    query: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor, mask: Tensor | None, **options: Any
) -> Tensor:
    if mask is not None:
        _check_used(mask, k_rope.shape[1])
        k_nope, k_rope, v = (x[:, : mask.shape[1]] for x in (k_nope, k_rope, v))
    return forms.dense(query, k_nope, k_rope, v, mask, **options)


def _check_used(mask: Tensor, keys: int) -> None:
    if mask.shape[1] > keys:
        raise InvalidArgument("attention_mask", f"{keys} columns at most", mask.shape[1])


def _latent_is_less_work(call: Call, heads: forms.Heads, rows: tuple[Tensor, Tensor]) -> bool:
    if call.query.dtype == torch.float16 or heads.why_not_latent():
        return False  # pages of rows are bf16, and float16 would lose bits
    (*_, keys, latent), rope = rows[0].shape, rows[1].shape[3]
    return _form(latent, heads.nope, rope, heads.v, call.query.shape[2], keys) == "latent"


@lru_cache(maxsize=1024)
def _form(latent: int, nope: int, rope: int, v: int, new: int, keys: int) -> str:
    """`choose_form` for one sequence; every layer of a forward pass asks the same."""
    return choose_form(LayerDims(latent, nope, rope, v), [new], [keys]).form


def _sdpa(call: Call, reason: str, **options: Any) -> tuple[Tensor, None]:
    if call.sink is not None:
        raise Unsupported(
            f"{reason}, in a model with attention sinks, which torch's SDPA has not",
            nearest='attn_implementation="eager"',
        )
    _warn_once(reason)
    if call.form:
        key, value = type(call.module).expand_kv(call.module, call.key, call.value)
        call = call._replace(key=key, value=value)
    out: tuple[Tensor, None] = sdpa_attention_forward(
        call.module, call.query, call.key, call.value, _sdpa_mask(call), **call.options, **options
    )
    return out


def _sdpa_mask(call: Call) -> Tensor | None:
    """The mask as SDPA wants it, which aligns causal to the top left when it gets none."""
    mask, (queries, keys) = call.mask, (call.query.shape[2], call.key.shape[2])
    causal = call.options.get("is_causal", getattr(call.module, "is_causal", True))
    if call.indices is not None:
        chosen = selected(call.indices, keys)
        if mask is None:
            return chosen
        if mask.dtype == torch.bool:
            return mask & chosen
        return mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)
    if mask is not None and mask.dim() == 4:
        return mask
    if mask is None and (not causal or queries in (1, keys)):
        return None
    return full_mask(mask, queries, keys, call.query.device)


@cache
def _warn_once(reason: str) -> None:
    message = f"openmla does not serve {reason}; torch's SDPA runs instead"
    warnings.warn(message, RuntimeWarning, stacklevel=2)
