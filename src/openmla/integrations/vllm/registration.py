"""What vLLM calls in each of its processes: openmla's backends enter vLLM's registries.

Nothing here may end the engine: a user who never asks for openmla must not notice that it is
installed. What stands in the way of a backend is said in one line of vLLM's log, and the others are
registered all the same. Registering twice changes nothing.

vLLM before 0.32 takes no new names; it has one member, CUSTOM, for whoever registers it. openmla
does so if asked to, by OPENMLA_VLLM_CUSTOM, and if its classes can be loaded with that vLLM.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from openmla.integrations.plugin import Refused, attribute, or_one_line

WRITTEN_FOR = "vLLM 0.32"
CPU_VARIABLE = "OPENMLA_VLLM_CPU"
CUSTOM_VARIABLE = "OPENMLA_VLLM_CUSTOM"
INDEXER_VARIABLE = "OPENMLA_VLLM_INDEXER"
FLASH_MLA_VARIABLE = "OPENMLA_VLLM_FLASHMLA"
CUSTOM = "CUSTOM"
# A child of vLLM's own logger: its handlers and its format.
log = logging.getLogger("vllm.openmla")


@dataclass(frozen=True)
class Seam:
    """One registry of vLLM, and the backend that openmla puts into it."""

    module: str
    members: str
    """The enum of backends in that module."""
    add: str
    """The function of that module that takes a new name or a member, and a class path."""
    name: str
    backend: str
    cpu_member: str = ""
    """vLLM's own member that a CPU always uses, whatever was asked for."""


_ATTENTION = ("vllm.v1.attention.backends.registry", "AttentionBackendEnum", "register_backend")
_HERE = "openmla.integrations.vllm"
SEAMS = {
    "prefill": Seam(
        "vllm.v1.attention.backends.mla.prefill.registry",
        "MLAPrefillBackendEnum",
        "register_mla_prefill_backend",
        "OPENMLA",
        f"{_HERE}.prefill.OpenMLAPrefillBackend",
        cpu_member="CPU",
    ),
    "attention": Seam(
        *_ATTENTION, "OPENMLA", f"{_HERE}.attention.OpenMLABackend", cpu_member="CPU_MLA"
    ),
    "sparse": Seam(*_ATTENTION, "OPENMLA_SPARSE", f"{_HERE}.sparse.OpenMLASparseBackend"),
}


PLATFORM = f"{_HERE}.cpu.OpenMLACpuPlatform"
# The op of vLLM that openmla's indexer takes the place of, and what of the model needs Triton.
INDEXER = "SparseAttnIndexer"
MODEL = "vllm.model_executor.models.deepseek_v2"
QUANTIZER = "per_token_group_quant_fp8"
# Models as vLLM has them for all platforms but CUDA, where its own have their indexer built in.
REGISTRY = ("vllm.model_executor.models.registry", "ModelRegistry")
MODELS = {
    "DeepseekV32ForCausalLM": f"{MODEL}:DeepseekV3ForCausalLM",
    "GlmMoeDsaForCausalLM": f"{MODEL}:GlmMoeDsaForCausalLM",
    "DeepseekV32MTPModel": "vllm.model_executor.models.deepseek_mtp:DeepSeekMTP",
}
# Where vLLM's layers import FlashMLA's calls from, DeepSeek-V4's above all, and those of them that
# attend. What schedules them stays vLLM's: openmla does not look at it.
FLASH_MLA = "vllm.v1.attention.ops.flashmla"
FLASH_MLA_CALLS = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")


_as_custom: set[str] = set()
"""The seams whose backend is vLLM's member CUSTOM in this process."""


def name_of(seam: str) -> str:
    """What vLLM knows a backend as."""
    return CUSTOM if seam in _as_custom else SEAMS[seam].name


def platform() -> str | None:
    """The class path of the platform that vLLM shall run on; None for vLLM's own.

    vLLM asks before it knows its platform, so nothing here may ask for it.
    """
    if os.environ.get(CPU_VARIABLE, "") != "sparse":
        return None
    with or_one_line(log, f"{CPU_VARIABLE}=sparse has no effect"):
        on_cpu = import_module("vllm.platforms").cpu_platform_plugin() is not None
        if not on_cpu:
            raise Refused("this is not a CPU; --attention-backend OPENMLA_SPARSE names it")
        _loadable(PLATFORM)
        return PLATFORM
    return None


def register() -> None:
    """Offer openmla's backends to vLLM; take a member's place if the environment asks for it."""
    custom = [wish.strip() for wish in os.environ.get(CUSTOM_VARIABLE, "").split(",")]
    for key, seam in SEAMS.items():
        if key not in custom:
            with or_one_line(log, f"no backend {seam.name}"):
                _offer(key)
    for wish in filter(None, custom):
        with or_one_line(log, f"{CUSTOM_VARIABLE}={wish} has no effect"):
            _take_custom(wish)
    wish = os.environ.get(CPU_VARIABLE, "")
    if wish:
        with or_one_line(log, f"{CPU_VARIABLE}={wish} has no effect"):
            _replace_on_cpu(wish)
    wish = os.environ.get(INDEXER_VARIABLE, "")
    if wish:
        with or_one_line(log, f"{INDEXER_VARIABLE}={wish} has no effect"):
            _select_on_gpu(wish)
    wish = os.environ.get(FLASH_MLA_VARIABLE, "")
    if wish:
        with or_one_line(log, f"{FLASH_MLA_VARIABLE}={wish} has no effect"):
            _answer_flash_mla(wish)


def _offer(key: str) -> None:
    seam = SEAMS[key]
    members, add = _registry(seam)
    if seam.name not in members.__members__:
        add(seam.name, seam.backend)
        # Before names could be added, a name was taken for a member, and silently lost.
        if seam.name not in members.__members__:
            also = f"; {CUSTOM_VARIABLE}={key} asks for {CUSTOM}"
            also = also if CUSTOM in members.__members__ else ""
            raise Refused(f"this vLLM takes no new names, {WRITTEN_FOR} does{also}")
    there = members[seam.name].get_path()
    if there != seam.backend:
        raise Refused(f"another plug-in has registered that name, for {there}")


def _take_custom(wish: str) -> None:
    """The member that older versions have for others; only for classes that they can load."""
    seam = SEAMS.get(wish)
    if seam is None:
        raise Refused(f"expected {', '.join(SEAMS)}")
    members, add = _registry(seam)
    member = members.__members__.get(CUSTOM)
    if member is None:
        raise Refused(f"{seam.members} has no member {CUSTOM}")
    if member.is_overridden() and member.get_path() != seam.backend:
        raise Refused(f"another plug-in has taken {CUSTOM}, for {member.get_path()}")
    _loadable(seam.backend)
    add(member, seam.backend)
    _as_custom.add(wish)


def _replace_on_cpu(wish: str) -> None:
    """vLLM ignores the choice of a backend on a CPU: the way in is its own member's place."""
    seam = SEAMS.get(wish)
    if seam is None:
        raise Refused(f"expected {', '.join(SEAMS)}")
    if not _on_cpu():
        raise Refused("this is not a CPU; name the backend on vLLM's command line")
    if not seam.cpu_member:
        _select_on_cpu()
        return
    members, add = _registry(seam)
    member = members.__members__.get(seam.cpu_member)
    if member is None:
        raise Refused(f"{seam.members} has no member {seam.cpu_member}, {WRITTEN_FOR} does")
    if member.is_overridden() and member.get_path() != seam.backend:
        raise Refused(f"another plug-in has taken {seam.cpu_member}, for {member.get_path()}")
    _loadable(seam.backend)
    add(member, seam.backend)


def _select_on_cpu() -> None:
    """The indexer that vLLM has not on a CPU; `platform` has let its attention through."""
    _replace_indexer()
    model = import_module(MODEL)
    if not hasattr(model, QUANTIZER):
        raise Refused(f"{MODEL} has no {QUANTIZER}, {WRITTEN_FOR} does")
    setattr(model, QUANTIZER, import_module(f"{_HERE}.queries").quantize_queries)


def _select_on_gpu(wish: str) -> None:
    """The indexer in the models that have vLLM's op for it, for all chips and all batches."""
    if wish != "1":
        raise Refused("expected 1")
    if not import_module("vllm.platforms").current_platform.is_cuda():
        raise Refused(f"this is no CUDA GPU; on a CPU, {CPU_VARIABLE}=sparse")
    models = attribute(*REGISTRY, WRITTEN_FOR)
    missing = sorted(MODELS.keys() - models.models.keys())
    if missing:
        raise Refused(f"this vLLM has no {', '.join(missing)}, {WRITTEN_FOR} does")
    _replace_indexer()
    for name, path in MODELS.items():
        models.register_model(name, path)


def _answer_flash_mla(wish: str) -> None:
    """FlashMLA's calls in vLLM's layers, answered by openmla: all of them, or none."""
    if wish != "1":
        raise Refused("expected 1")
    if not import_module("vllm.platforms").current_platform.is_cuda():
        raise Refused("this is no CUDA GPU")
    ours = import_module("openmla.compat.flash_mla")
    theirs = {name: attribute(FLASH_MLA, name, WRITTEN_FOR) for name in FLASH_MLA_CALLS}
    for name, function in theirs.items():
        if function is not getattr(ours, name):
            early = _importers(name, function)
            if early:
                raise Refused(f"{early[0]} was imported before, with FlashMLA's {name}")
    for name in theirs:
        setattr(sys.modules[FLASH_MLA], name, getattr(ours, name))


def _importers(name: str, function: Any) -> list[str]:
    """Modules of vLLM's layers and models that have a function of FlashMLA's already."""
    places = ("vllm.v1.attention.backends.", "vllm.models.", "vllm.model_executor.")
    return sorted(
        module
        for module, loaded in list(sys.modules.items())
        if module.startswith(places) and vars(loaded).get(name) is function
    )


def _replace_indexer() -> None:
    ops = import_module("vllm.model_executor.custom_op")
    own = import_module(f"{_HERE}.indexer").OpenMLAIndexer
    if INDEXER not in ops.op_registry_oot:
        ops.CustomOp.register_oot(own, name=INDEXER)
    there = ops.op_registry_oot[INDEXER]
    if there is not own:
        raise Refused(f"another plug-in has registered {INDEXER}, as {there.__name__}")


def _loadable(path: str) -> None:
    """A refusal if this vLLM cannot load a class; named all the same, it would end the engine."""
    module, _, name = path.rpartition(".")
    attribute(module, name, WRITTEN_FOR)


def _on_cpu() -> bool:
    return bool(import_module("vllm.platforms").current_platform.is_cpu())


def _registry(seam: Seam) -> tuple[Any, Any]:
    members = attribute(seam.module, seam.members, WRITTEN_FOR)
    return members, attribute(seam.module, seam.add, WRITTEN_FOR)
