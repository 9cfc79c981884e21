"""What SGLang calls in each of its processes: openmla enters its registries.

Nothing here may end the engine: a user who never asks for openmla must not notice that it is
installed. What stands in the way is said in one line of SGLang's log; a function that is to be
replaced and is not there, by SGLang itself. Registering twice changes nothing.
"""

from __future__ import annotations

import logging
import os
from importlib import import_module
from typing import Any

from openmla.errors import InvalidArgument
from openmla.integrations.plugin import Refused, attribute, or_one_line
from openmla.problem import RANGES_TAKEN, is_range

WRITTEN_FOR = "SGLang 0.5.23"
NAME = "openmla"
VARIABLE = "OPENMLA_SGLANG"
RANGE_VARIABLE = "OPENMLA_RANGE_KEYS"
LATENT = "latent"
FLASH_MLA = "flash_mla"
# A child of SGLang's own logger: its handlers and its format.
log = logging.getLogger("sglang.openmla")

CHOICES = "sglang.srt.arg_groups.choices"
# Lists of names that arguments may have, and what adds to them.
LISTS = {
    "ATTENTION_BACKEND_CHOICES": "add_attention_backend_choices",
    "DETERMINISTIC_ATTENTION_BACKEND_CHOICES": "add_deterministic_attention_backend_choices",
    # DeepSeek models need this one too in deterministic mode; it keeps the radix cache in it.
    "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND": (
        "add_radix_supported_deterministic_attention_backend_choices"
    ),
}
BACKENDS = "sglang.srt.layers.attention.attention_registry"
FORMS = "sglang.srt.models.deepseek_common.attention_backend_handler"
METHODS = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods"
HOOKS = "sglang.srt.plugins.hook_registry"

_UTILS = "sglang.srt.layers.attention.dsa.utils"
_DSA = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"
# For each wish, functions of SGLang and those of `selection` that take their places.
REPLACED = {
    "scores": {
        f"{_UTILS}.resolve_fp8_mqa_logits_fn": "logits_function",
        f"{_UTILS}.resolve_fp8_paged_mqa_logits_fn": "paged_logits_function",
        f"{_UTILS}.resolve_paged_mqa_logits_metadata_fn": "metadata_function",
        f"{_UTILS}.resolve_num_sms": "multiprocessors",
    },
    "attention": {
        f"{_DSA}._forward_flashmla_sparse": "attend_selected",
        f"{_DSA}._forward_triton_sparse_mla": "attend_selected",
    },
}


def register() -> None:
    """Offer the backend to SGLang, and put openmla where the environment asks for it."""
    with or_one_line(log, f"no backend {NAME}"):
        _offer()
    for wish in wishes():
        with or_one_line(log, f"{VARIABLE}={wish} has no effect"):
            _grant(wish)


def wishes() -> list[str]:
    """What OPENMLA_SGLANG asks for."""
    return [wish.strip() for wish in os.environ.get(VARIABLE, "").split(",") if wish.strip()]


def range_keys() -> int | None:
    """What OPENMLA_RANGE_KEYS says that ranges of keys have; None where it says nothing.

    Raises:
        InvalidArgument: it is no length that ranges may have.
    """
    said = os.environ.get(RANGE_VARIABLE, "").strip()
    if not said:
        return None
    if not said.isdecimal() or not is_range(int(said)):
        raise InvalidArgument(RANGE_VARIABLE, RANGES_TAKEN, repr(said))
    return int(said)


def create(runner: Any) -> Any:
    """The backend of a runner, once SGLang has been told to use it."""
    backend = import_module("openmla.integrations.sglang.attention").OpenMLABackend
    import_module(FORMS).AttentionBackendRegistry.register(NAME, form_of)
    return backend(runner)


def form_of(layer: Any, forward_batch: Any) -> Any:
    """The form in which a layer hands its batch to the backend; Triton's rule, unless told."""
    if LATENT in wishes():
        return import_module(METHODS).AttnForwardMethod.MLA
    return import_module(FORMS).AttentionBackendRegistry.get_handler("triton")(layer, forward_batch)


def _offer() -> None:
    backends = _attribute(BACKENDS, "ATTENTION_BACKENDS")
    add = _attribute(BACKENDS, "register_attention_backend")
    lists = [(_attribute(CHOICES, name), _attribute(CHOICES, by)) for name, by in LISTS.items()]
    there = backends.get(NAME, create)
    if there is not create:
        raise Refused(f"another plug-in has registered that name, as {there}")
    add(NAME)(create)
    for names, extend in lists:
        if NAME not in names:
            extend([NAME])


def _grant(wish: str) -> None:
    if wish == LATENT:
        return  # `form_of` looks at it
    if wish == FLASH_MLA:
        import_module("openmla.compat.stand_in").install()
        return
    if wish not in REPLACED:
        raise Refused(f"expected {', '.join([LATENT, FLASH_MLA, *REPLACED])}")
    registry, kind = _attribute(HOOKS, "HookRegistry"), _attribute(HOOKS, "HookType").REPLACE
    selection = import_module("openmla.integrations.sglang.selection")
    for target, ours in REPLACED[wish].items():
        registry.register(target, getattr(selection, ours), kind)


def _attribute(module: str, name: str) -> Any:
    return attribute(module, name, WRITTEN_FOR)
