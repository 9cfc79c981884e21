"""Host side of the sparse form's gradients on the CPU: the one call that a plan is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from openmla.backward.sparse_operands import RowGradients, SparseBackwardOperands
from openmla.kernels.cpu.sparse_backward.kernel import sparse_backward
from openmla.planning import Plan


@dataclass(frozen=True, eq=False)
class HostCall:
    """A kernel that runs here and now."""

    plan: Plan
    operands: SparseBackwardOperands
    gradients: RowGradients

    def run(self) -> None:
        """Compute every gradient; what nobody sees stays +0."""
        self.gradients.clear()
        sparse_backward(self.plan.config, self.operands, self.gradients)


def calls(
    plan: Plan, operands: SparseBackwardOperands, gradients: RowGradients
) -> Iterator[HostCall]:
    """The one call."""
    yield HostCall(plan, operands, gradients)
