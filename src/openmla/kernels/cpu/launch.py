"""Host side of the CPU kernels: from a Plan and its operands to the one call it is."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from openmla.kernels.cpu.dense import dense
from openmla.kernels.cpu.latent import latent
from openmla.kernels.cpu.sparse import sparse
from openmla.operands import Operands, Results
from openmla.planning import Plan

KERNELS: dict[str, Callable[[Any, Any, Results], None]] = {
    "dense": dense,
    "latent": latent,
    "sparse": sparse,
}


@dataclass(frozen=True, eq=False)
class HostCall:
    """A kernel that runs here and now."""

    plan: Plan
    operands: Operands
    results: Results

    def run(self) -> None:
        """Compute every row; kernels write only rows that see a key."""
        self.results.clear()
        KERNELS[self.plan.problem.form](self.plan.config, self.operands, self.results)


def calls(plan: Plan, operands: Operands, results: Results) -> Iterator[HostCall]:
    """The one call."""
    yield HostCall(plan, operands, results)
