"""The loss of an indexer without a GPU: what the float64 reference and the CPU kernel serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openmla.indexer.loss_problem import LOSS_FORM
from openmla.planning.family import Kernel
from openmla.planning.serves import ANY, DTYPES, LENGTHS, OneOf, Range, Serves, alike, either
from openmla.planning.target import Target
from openmla.problem import MAX_HEADS

EVERY_LOSS = Serves(
    {
        "form": OneOf(LOSS_FORM),
        "heads": Range(1, MAX_HEADS),
        "d_nope": Range(1),
        "d_rope": ANY,
        "d_v": ANY,
        DTYPES: OneOf(*alike("bf16", "fp16", "fp32")),
        "rope": OneOf("none", "shared", "per_head"),
        "index_heads": Range(1, MAX_HEADS),
        "index_dim": Range(1),
        **LENGTHS,
        **either("causal", "has_sink", "has_key_mask", "wants_lse", "aligned_16"),
        **either("wants_gradients"),
    }
)
"""Against every dense call but for those with FP8, scales per token or shared keys."""


@dataclass(frozen=True, slots=True)
class CpuLossConfig:
    """Rows of scores are whole: 64 of 32768 keys, of 8 heads, are 64 MB in fp32."""

    rows: int = 64
    group: int = 8
    """Heads whose products are made at once."""

    def why_unsupported(self) -> str:
        """Nothing: tiles only set the pace."""
        return ""

    def explain(self) -> list[str]:
        """What the numbers mean."""
        return [f"{self.rows} queries x all their keys x {self.group} heads at a time, in fp32"]


def _no_config(problem: Any, target: Target) -> None:
    """The reference has no tiles to choose."""


def _cpu(problem: Any, target: Target) -> CpuLossConfig:
    return CpuLossConfig()


def _definition(config: None, problem: Any) -> list[str]:
    return ["the definition in float64, one query row at a time"]


LOSS_DEFINITION = Kernel(
    name="index_loss",
    serves=EVERY_LOSS,
    config=type(None),
    choose=_no_config,
    launcher="openmla.indexer.loss_reference",
    explain=_definition,
)
"""The reference's kernel of an indexer's loss."""
CPU_LOSS = Kernel(
    name="index_loss",
    serves=EVERY_LOSS,
    config=CpuLossConfig,
    choose=_cpu,
    launcher="openmla.kernels.cpu.indexer_loss.launch",
)
