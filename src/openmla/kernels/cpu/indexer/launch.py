"""Host side of the indexer on the CPU: the one call that a plan is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from openmla.indexer.operands import IndexOperands, SelectOperands
from openmla.kernels.cpu.indexer.scores import scores
from openmla.kernels.cpu.indexer.select import select
from openmla.planning import Plan


@dataclass(frozen=True, eq=False)
class HostCall:
    """A kernel that runs here and now."""

    plan: Plan
    operands: IndexOperands
    results: Any
    """The scores, or SelectResults."""

    def run(self) -> None:
        """Compute every row."""
        if isinstance(self.operands, SelectOperands):
            select(self.operands, self.results)
        else:
            scores(self.plan.config, self.operands, self.results)


def calls(plan: Plan, operands: IndexOperands, results: Any) -> Iterator[HostCall]:
    """The one call."""
    yield HostCall(plan, operands, results)
