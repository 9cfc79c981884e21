"""The families that need no GPU: the float64 reference and the CPU kernels. They serve all."""

from __future__ import annotations

from openmla.planning.family import Family, Kernel
from openmla.planning.host.tiles import CpuConfig, plan_cpu
from openmla.planning.serves import ANY, LENGTHS, YES_OR_NO, OneOf, Range, Serves
from openmla.planning.target import Target
from openmla.problem import CACHE_FORMATS, DTYPE_BYTES, FORMS, MAX_HEADS, ROPE_SOURCES, Problem

_STORED = OneOf(*dict.fromkeys((*DTYPE_BYTES, *CACHE_FORMATS)))
EVERYTHING = Serves(
    {
        "form": OneOf(*FORMS),
        "heads": Range(1, MAX_HEADS),
        "d_nope": Range(1),
        "d_rope": ANY,
        "d_v": Range(1),
        "q_dtype": OneOf(*DTYPE_BYTES),
        "kv_dtype": _STORED,
        "v_dtype": _STORED,
        "rope": OneOf(*ROPE_SOURCES),
        "rope_dtype": _STORED,
        "page_size": ANY,
        "causal": YES_OR_NO,
        "has_k_start": YES_OR_NO,
        "topk": ANY,
        "has_topk_lengths": YES_OR_NO,
        "has_sink": YES_OR_NO,
        "has_q_scale": YES_OR_NO,
        "has_k_scale": YES_OR_NO,
        "has_key_mask": YES_OR_NO,
        "wants_lse": YES_OR_NO,
        "wants_max_logits": YES_OR_NO,
        **LENGTHS,
        "aligned_16": YES_OR_NO,
    }
)


def _no_config(problem: Problem, target: Target) -> None:
    """The reference has no tiles to choose."""


def _definition(config: None, problem: Problem) -> list[str]:
    return ["the definition in float64, no tiling"]


def _cpu(problem: Problem, target: Target) -> CpuConfig:
    return plan_cpu(problem)


REFERENCE = Family(
    name="reference",
    archs=("cpu", "gpu"),
    kernels=(
        Kernel(
            serves=EVERYTHING,
            config=type(None),
            choose=_no_config,
            launcher="openmla.reference",
            explain=_definition,
        ),
    ),
)
CPU = Family(
    name="cpu",
    archs=("cpu",),
    kernels=(
        Kernel(
            serves=EVERYTHING, config=CpuConfig, choose=_cpu, launcher="openmla.kernels.cpu.launch"
        ),
    ),
)
