"""`register`, `optimize` and `restore`: what a user calls."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from openmla.distributed.agreement import Group
from openmla.errors import InvalidArgument, Unsupported
from openmla.integrations.transformers import compressed, seam, serving
from openmla.integrations.transformers import layer as shorter
from openmla.integrations.transformers.attention import attention
from openmla.integrations.transformers.forms import Heads
from openmla.integrations.transformers.indexer import check_fp8
from openmla.integrations.transformers.masks import causal_mask
from openmla.integrations.transformers.ranks import check_model

FORMS = ("auto", "expanded", "latent")
Model = TypeVar("Model", bound=nn.Module)


def register() -> None:
    """Make attn_implementation="openmla" a name that Transformers knows. Safe to call twice."""
    for name in (seam.NAME, *seam.SERVING):
        AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(seam.NAME, causal_mask)
    AttentionInterface.register(compressed.NAME, compressed.own_attention)
    AttentionMaskInterface.register(compressed.NAME, compressed.window_list)


def optimize(
    model: Model, form: str = "auto", fp8_indexer: bool = False, group: Group = None
) -> Model:
    """Let every MLA layer of a Transformers model run on openmla, from its cached rows.

    The model itself is changed, and returned. Around attention, RMS norms run as torch's own, one
    operation for eight. A cache filled before must not be used after.

    Models that select keys (DSA) run the sparse call. DeepSeek-V4 attends to its window and its
    compressed rows in one call, whatever the form, and keeps its norms (openmla.integrations.
    transformers.compressed).

    Args:
        model: an MLA model of Transformers 5.17 or later, or DeepSeek-V4.
        form: "auto" chooses by lengths (openmla.planning.form); "expanded" makes K and V per head,
            but never concatenates K; "latent" attends to the cached rows, for few tokens over long
            caches.
        fp8_indexer: let indexers score in e4m3, which is faster and may select other keys near the
            cut (openmla.integrations.transformers.indexer); False: as exactly as before.
        group: ranks that share the sequences of a forward pass which names its `shard`: every rank
            runs the model on its own tokens (openmla.integrations.transformers.ranks). None: no
            ranks share.

    Raises:
        InvalidArgument: there is no such form.
        Unsupported: the model has no MLA layer, or one that cannot do what was asked; the model is
            left as it was.
    """
    if form not in FORMS:
        raise InvalidArgument("form", "one of " + ", ".join(FORMS), repr(form))
    rows = _compressed(model)
    if rows:
        return _optimize_compressed(model, rows, form, fp8_indexer, group)
    layers = _layers(model)
    for layer in layers:
        _check(layer, form)
        if fp8_indexer and getattr(layer, "indexer", None) is not None:
            check_fp8(layer.indexer)
    if group is not None:
        check_model(model, layers)
    register()
    seam.remove(model)
    seam.shorten_norms(model)
    for layer in layers:
        forward = shorter.forward if shorter.serves(layer) else None
        seam.install(layer, form, fp8_indexer, group, forward)
    for layer in layers:
        layer.config._attn_implementation = seam.NAME
    serving.install(model)
    return model


def restore(model: nn.Module) -> None:
    """Undo `optimize`: methods and attention implementation as they were before it.

    Args:
        model: a model that `optimize` changed; one that it did not stays as it is.

    Raises:
        Unsupported: the model has no MLA layer.
    """
    if not _compressed(model):
        _layers(model)  # or it is none of ours
    seam.remove(model)


def _compressed(model: nn.Module) -> list[Any]:
    """Attention modules of a model whose rows are compressed: DeepSeek-V4's."""
    return [module for module in model.modules() if compressed.is_compressed(module)]


def _optimize_compressed(
    model: Model, layers: list[Any], form: str, fp8_indexer: bool, group: Group
) -> Model:
    for layer in layers:
        compressed.check(layer, form, fp8_indexer, group)
    register()
    seam.remove(model)
    for layer in layers:
        seam.replace_forward(layer, form, compressed.forward)
    for layer in layers:
        layer.config._attn_implementation = compressed.NAME
    seam.override(model, "init_continuous_batching", compressed.no_batching)
    return model


def _layers(model: nn.Module) -> list[Any]:
    layers = seam.layers(model)
    if not layers:
        raise Unsupported(
            f"{type(model).__name__} has no attention module with an expand_kv method",
            nearest="an MLA model of Transformers 5.17 or later",
        )
    return layers


def _check(layer: Any, form: str) -> None:
    if "expand_kv" in vars(layer) and not seam.installed(layer).form:
        raise Unsupported(f"the expand_kv of a {type(layer).__name__} is overridden already")
    sparse = hasattr(layer, "indexer")
    if sparse and form == "expanded":
        raise Unsupported(
            f"{type(layer).__name__} selects keys, and selected keys are attended to as rows",
            nearest='optimize(model, form="auto")',
        )
    why = Heads.of(layer).why_not_latent()
    if why and (sparse or form == "latent"):
        nearest = "" if sparse else 'optimize(model, form="expanded")'
        raise Unsupported(f"{type(layer).__name__}: {why}", nearest=nearest)
