"""Host side of an indexer's loss on the CPU: the one call that a plan is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from openmla.indexer.loss_operands import LossGradients, LossOperands
from openmla.kernels.cpu.indexer_loss.loss import gradients, loss
from openmla.planning import Plan


@dataclass(frozen=True, eq=False)
class HostCall:
    """A kernel that runs here and now."""

    plan: Plan
    operands: LossOperands
    results: Any
    """The loss, or LossGradients."""

    def run(self) -> None:
        """Compute every row."""
        if isinstance(self.results, LossGradients):
            gradients(self.plan.config, self.operands, self.results)
        else:
            loss(self.plan.config, self.operands, self.results)


def calls(plan: Plan, operands: LossOperands, results: Any) -> Iterator[HostCall]:
    """The one call."""
    yield HostCall(plan, operands, results)
