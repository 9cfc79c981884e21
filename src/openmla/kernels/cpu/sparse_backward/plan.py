"""Gradients of the sparse form without a GPU: what the reference and the CPU kernel serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openmla.backward.problem import SPARSE_BACKWARD_FORM
from openmla.planning.family import Kernel
from openmla.planning.serves import ANY, DTYPES, LENGTHS, OneOf, Range, Serves, alike, either
from openmla.planning.target import Target
from openmla.problem import MAX_HEADS

EVERY_ROW_GRADIENT = Serves(
    {
        "form": OneOf(SPARSE_BACKWARD_FORM),
        "heads": Range(1, MAX_HEADS),
        "d_nope": Range(1),
        "d_rope": ANY,
        "d_v": Range(1),
        DTYPES: OneOf(*alike("bf16", "fp16", "fp32")),
        "rope": OneOf("none", "shared"),
        "topk": ANY,
        **LENGTHS,
        **either("causal", "has_topk_lengths", "has_sink", "wants_lse", "aligned_16", "has_d_lse"),
    }
)
"""Every list over plain rows, but for FP8 and scales per token."""


@dataclass(frozen=True, slots=True)
class CpuSparseBackwardConfig:
    """How the CPU kernel cuts a list."""

    BN: int

    def why_unsupported(self) -> str:
        """Nothing: blocks only set the pace."""
        return ""

    def explain(self) -> list[str]:
        """What the number means."""
        return [f"one query, {self.BN} entries of its list at a time, in fp32: five products"]


def _no_config(problem: Any, target: Target) -> None:
    """The reference has no blocks to choose."""


def _cpu(problem: Any, target: Target) -> CpuSparseBackwardConfig:
    return CpuSparseBackwardConfig(BN=2048)


def _definition(config: None, problem: Any) -> list[str]:
    return ["the definition in float64, one query at a time"]


SPARSE_BACKWARD_DEFINITION = Kernel(
    name="sparse_backward",
    serves=EVERY_ROW_GRADIENT,
    config=type(None),
    choose=_no_config,
    launcher="openmla.backward.sparse_reference",
    explain=_definition,
)
"""The reference's kernel of the sparse form's gradients."""
CPU_SPARSE_BACKWARD = Kernel(
    name="sparse_backward",
    serves=EVERY_ROW_GRADIENT,
    config=CpuSparseBackwardConfig,
    choose=_cpu,
    launcher="openmla.kernels.cpu.sparse_backward.launch",
)
