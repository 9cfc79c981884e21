"""Plans of the indexer: which kernel computes scores or selects, by the same rules as attention.

>>> index_plan(IndexProblem(form="select", topk=64, total_q=8, width=512), "cpu").backend
'cpu'
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from openmla.indexer.problem import IndexProblem
from openmla.kernels.blackwell.indexer.plan import BLACKWELL_INDEX
from openmla.kernels.cdna4.indexer.plan import CDNA4_INDEX
from openmla.kernels.cpu.indexer.plan import CPU_INDEX, REFERENCE_INDEX
from openmla.kernels.hopper.indexer.plan import HOPPER_INDEX
from openmla.kernels.portable.indexer.plan import PORTABLE_INDEX
from openmla.planning.family import Kernel
from openmla.planning.registry import first_that_serves, version_text
from openmla.planning.target import Target, target_by_name

INDEX_FAMILIES = (
    REFERENCE_INDEX,
    CPU_INDEX,
    HOPPER_INDEX,
    BLACKWELL_INDEX,
    CDNA4_INDEX,
    PORTABLE_INDEX,
)
"""Best first, as openmla.planning.registry has them."""


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """The kernel that serves one step of the indexer on a target, and its numbers."""

    problem: IndexProblem
    target: str
    backend: str
    kernel_name: str
    config: Any
    passed_over: tuple[str, ...] = ()
    """Families that would have come first, each with the reason it cannot serve the problem."""
    triton: str = ""
    """Version of Triton that it was made for; empty: whichever is needed."""

    @property
    def kernel(self) -> Kernel:
        """The declaration of the kernel that this is a plan of."""
        family = next(f for f in INDEX_FAMILIES if f.name == self.backend)
        return family.kernel_named(self.kernel_name)

    def explain(self) -> str:
        """What would run and why, as text."""
        lines = [
            str(self.problem),
            f"on {target_by_name(self.target)}",
            f"kernel: {self.backend} {self.kernel_name}",
            *([f"made for Triton {self.triton}"] if self.triton else []),
            *(f"passed over: {reason}" for reason in self.passed_over),
            *(f"  {line}" for line in self.kernel.explain(self.config, self.problem)),
        ]
        return "\n".join(lines)


def choose_index_plan(
    problem: IndexProblem, target: Target, backend: str, triton: tuple[int, ...] | None
) -> IndexPlan:
    """The plan; raises Unsupported with every family's reason."""
    nearest = "backend='auto'" if backend != "auto" else "backend='reference'"
    chosen = first_that_serves(problem, target, backend, triton, INDEX_FAMILIES, nearest)
    return IndexPlan(problem, target.name, *chosen, triton=version_text(target, triton))


cached_index_plan = lru_cache(maxsize=4096)(choose_index_plan)


def index_plan(
    problem: IndexProblem, target: str | Target = "cpu", backend: str = "auto"
) -> IndexPlan:
    """What would run for a step of the indexer on a target."""
    chip = target if isinstance(target, Target) else target_by_name(target)
    return cached_index_plan(problem, chip, backend, None)


_SCORES = IndexProblem(form="scores", heads=64, page_size=64, total_q=4096, width=131072)
_SELECT = IndexProblem(form="select", topk=2048, total_q=4096, width=131072)
INDEX_FEATURES = {
    "index scores, 64 heads, pages of 64": _SCORES,
    "index scores, 64 heads, contiguous keys": replace(_SCORES, page_size=0),
    "selection of 2048": _SELECT,
    "selection of 2048, with bits for `key_mask`": replace(_SELECT, wants_mask=True),
}
"""Rows of the support table."""
