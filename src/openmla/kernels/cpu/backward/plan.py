"""Gradients without a GPU: what the float64 reference and the CPU kernel serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openmla.backward.problem import BACKWARD_FORM
from openmla.kernels.cpu.plan import CpuConfig
from openmla.planning.family import Kernel
from openmla.planning.serves import ANY, DTYPES, LENGTHS, OneOf, Range, Serves, alike, either
from openmla.planning.target import Target
from openmla.problem import MAX_HEADS

EVERY_GRADIENT = Serves(
    {
        "form": OneOf(BACKWARD_FORM),
        "heads": Range(1, MAX_HEADS),
        "d_nope": Range(1),
        "d_rope": ANY,
        "d_v": Range(1),
        DTYPES: OneOf(*alike("bf16", "fp16", "fp32")),
        "rope": OneOf("none", "shared", "per_head", why="rope of a cache has no gradient"),
        "window": ANY,
        **LENGTHS,
        **either("causal", "has_sink", "has_key_mask", "wants_lse", "aligned_16", "has_d_lse"),
    }
)
"""Every dense call but for those with FP8, scales per token, shared keys or rope in a cache."""


@dataclass(frozen=True, slots=True)
class CpuBackwardConfig:
    """How the CPU kernel cuts a backward pass: tiles of the forward pass, and shorter blocks.

    A block's scores, weights and their gradients are three times the scratch of the forward pass.
    """

    tiles: CpuConfig

    def why_unsupported(self) -> str:
        """Nothing: tiles only set the pace."""
        return ""

    def explain(self) -> list[str]:
        """What the numbers mean."""
        tiles = self.tiles
        return [
            f"{tiles.BM} queries x {tiles.BN} keys at a time, in fp32: five products, gradients of "
            f"queries in a buffer of their sequence"
        ]


def _no_config(problem: Any, target: Target) -> None:
    """The reference has no tiles to choose."""


def _cpu(problem: Any, target: Target) -> CpuBackwardConfig:
    return CpuBackwardConfig(CpuConfig(BM=128, BN=256, rows_per_step=512))


def _definition(config: None, problem: Any) -> list[str]:
    return ["the definition in float64, one query row at a time"]


BACKWARD_DEFINITION = Kernel(
    name="backward",
    serves=EVERY_GRADIENT,
    config=type(None),
    choose=_no_config,
    launcher="openmla.backward.reference",
    explain=_definition,
)
"""The reference's kernel of gradients."""
CPU_BACKWARD = Kernel(
    name="backward",
    serves=EVERY_GRADIENT,
    config=CpuBackwardConfig,
    choose=_cpu,
    launcher="openmla.kernels.cpu.backward.launch",
)
