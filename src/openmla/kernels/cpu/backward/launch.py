"""Host side of gradients on the CPU: the one call that a plan is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from openmla.backward.operands import BackwardOperands, Gradients
from openmla.kernels.cpu.backward.dense import dense_backward
from openmla.planning import Plan


@dataclass(frozen=True, eq=False)
class HostCall:
    """A kernel that runs here and now."""

    plan: Plan
    operands: BackwardOperands
    gradients: Gradients

    def run(self) -> None:
        """Compute every gradient; what nobody sees stays +0."""
        self.gradients.clear()
        dense_backward(self.plan.config, self.operands, self.gradients)


def calls(plan: Plan, operands: BackwardOperands, gradients: Gradients) -> Iterator[HostCall]:
    """The one call."""
    yield HostCall(plan, operands, gradients)
