"""Context parallelism of a whole model: every rank runs it on its own tokens.

    model = optimize(model, group=group)             # ranks that share the sequences
    shard = split([ids.shape[1]], world, rank)       # openmla.distributed: this rank's tokens
    out = model(ids[:, shard.rows()], position_ids=shard.positions()[None], shard=shard)
    cache = gather_cache(out.past_key_values, shard, group)

Everything but attention works on tokens one by one. Attention gets this rank's queries and rows,
gathers the rows of the others and attends, so `out.logits` are those of this rank's tokens, in the
order of `shard.rows()`. Its cache holds this rank's rows; `gather_cache` makes the whole of it on
every rank, from which the model goes on without a shard, as if one process had done it all.
Sequences of a batch lie end to end in one row of `ids`. Heads may be split over another group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from openmla.distributed import ContextShard, gather_latent, prefill, prefill_latent
from openmla.distributed.agreement import Facts, Group, check_together
from openmla.errors import InvalidArgument, Unsupported
from openmla.integrations.transformers.forms import Heads
from openmla.planning.form import LayerDims, choose_form


def attend(
    module: Any,
    query: Tensor,
    rows: tuple[Tensor, Tensor],
    form: str,
    shard: ContextShard,
    group: Group,
    **options: Any,
) -> Tensor:
    """[1, S, H, v] of this rank's queries [1, H, S, d] over the rows of all ranks.

    rows are this rank's: latent [1, 1, S, latent] and rope [1, 1, S, rope].
    """
    heads, (latent, rope) = Heads.of(module), (x[0, 0] for x in rows)
    options["verify"] = _is_first(module)
    if _chosen(form, heads, query, rows, shard) == "latent":
        out = prefill_latent(heads.absorb(query)[0], latent, rope, shard, group, **options)
        assert isinstance(out, Tensor)
        return heads.release(out[None])
    q = query[0].transpose(0, 1)
    out = prefill(q, latent, rope, heads.expand, shard, group, **options)
    assert isinstance(out, Tensor)
    return out[None]


def _chosen(
    form: str, heads: Heads, query: Tensor, rows: tuple[Tensor, Tensor], shard: ContextShard
) -> str:
    """The form of the whole batch, so that all ranks choose the same one; pages are bf16."""
    if form != "auto" or heads.why_not_latent() or query.dtype != torch.bfloat16:
        return form
    dims = LayerDims(rows[0].shape[3], heads.nope, rows[1].shape[3], heads.v)
    return choose_form(dims, shard.lengths, shard.lengths).form


def check(
    module: Any, query: Tensor, keys: int, mask: Tensor | None, shard: Any, group: Group
) -> None:
    """Refuse what a shard cannot be combined with: in the first layer, on every rank."""
    if not isinstance(shard, ContextShard):
        raise InvalidArgument("shard", "what split returns", type(shard).__name__)
    if group is None:
        raise InvalidArgument("shard", "a model after optimize(model, group=...)", "another")

    def facts() -> Facts:
        _check_call(query, keys, mask, shard)
        return {}

    if _is_first(module):
        check_together("model", group, shard.world, facts)
    else:
        facts()


def _is_first(module: Any) -> bool:
    """Ranks that agree in the first layer agree in the others."""
    return getattr(module, "layer_idx", 0) == 0


def _check_call(query: Tensor, keys: int, mask: Tensor | None, shard: ContextShard) -> None:
    if mask is not None:
        expected = "none beside a shard, which says who sees whom; and use_cache=True"
        raise InvalidArgument("attention_mask", expected, f"shape {tuple(mask.shape)}")
    tokens = query.shape[0], query.shape[2]
    if tokens != (1, shard.tokens):
        raise InvalidArgument("input_ids", f"[1, {shard.tokens}], this rank's", f"{list(tokens)}")
    if keys != shard.tokens:
        raise Unsupported(
            f"a shard after {keys - shard.tokens} cached tokens",
            nearest="openmla.nn.MLAAttention over pages, or the whole prompt at once",
        )


def check_model(model: Any, layers: list[Any]) -> None:
    """Refuse models with layers that would not see the tokens of other ranks."""
    config = model.config.get_text_config()
    if len(layers) < config.num_hidden_layers:
        others = config.num_hidden_layers - len(layers)
        raise Unsupported(f"a group: {others} layers of {type(model).__name__} are not MLA")
    for layer in layers:
        if getattr(layer, "indexer", None) is not None:
            raise Unsupported(
                f"a group: {type(layer).__name__} selects keys", nearest="openmla.nn.MLAAttention"
            )


def gather_cache(cache: DynamicCache, shard: ContextShard, group: Group = None) -> DynamicCache:
    """Rows of all ranks, in sequence order, from caches that hold each rank's own; in place.

    Args:
        cache: the DynamicCache that a forward pass with a shard returned, with this rank's rows.
        shard: which tokens this rank has, as openmla.distributed.split made it; all sequences have
            one length.
        group: the ranks that share the sequences; None is torch's default group.

    Raises:
        InvalidArgument: the cache is of another kind, or an argument is wrong.
        Unsupported: sequences have several lengths.
        PeerLost: another rank has ended, or did not make this call within the group's timeout.
    """
    if type(cache) is not DynamicCache:
        raise InvalidArgument("cache", "a DynamicCache", type(cache).__name__)
    if len({*shard.lengths}) > 1:
        raise Unsupported("a cache of sequences of several lengths", nearest="sequences of one")
    for number, layer in enumerate(cache.layers):
        for name in ("keys", "values"):
            local = getattr(layer, name)[0, 0]
            whole = gather_latent(local, shard, group, verify=not number)
            setattr(layer, name, whole.view(len(shard.lengths), 1, -1, local.shape[1]))
    return cache
