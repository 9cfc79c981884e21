"""Plans of backward passes: which kernels compute gradients, by the same rules as attention.

A chip's own kernels come before the portable ones, in `BACKWARD_FAMILIES`, as soon as there are
any. What no family declares is refused, before the forward pass of a call that needs gradients.

>>> dense = Problem(form="dense", heads=16, d_nope=128, d_rope=64, d_v=128, total_q=64, total_k=64)
>>> backward_plan(BackwardProblem.of(dense), "h200").backend
'portable'
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from openmla.backward.problem import BackwardProblem
from openmla.kernels.cpu.backward.plan import CPU_BACKWARD, REFERENCE_BACKWARD
from openmla.kernels.portable.backward.plan import PORTABLE_BACKWARD
from openmla.planning.family import Kernel
from openmla.planning.registry import first_that_serves, version_text
from openmla.planning.target import Target, target_by_name
from openmla.problem import Problem

BACKWARD_FAMILIES = (REFERENCE_BACKWARD, CPU_BACKWARD, PORTABLE_BACKWARD)
"""Best first, as openmla.planning.registry has them."""


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """The kernels that compute the gradients of a call on a target, and their numbers."""

    problem: BackwardProblem
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
        family = next(f for f in BACKWARD_FAMILIES if f.name == self.backend)
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


@lru_cache(maxsize=4096)
def cached_backward_plan(
    problem: BackwardProblem, target: Target, backend: str, triton: tuple[int, ...] | None
) -> BackwardPlan:
    """The plan; raises Unsupported with every family's reason."""
    nearest = "the same call under torch.no_grad(), or backend='reference'"
    if backend != "auto":
        nearest = "backend='auto'"
    chosen = first_that_serves(problem, target, backend, triton, BACKWARD_FAMILIES, nearest)
    return BackwardPlan(problem, target.name, *chosen, triton=version_text(target, triton))


def backward_plan(
    problem: BackwardProblem | Problem, target: str | Target = "cpu", backend: str = "auto"
) -> BackwardPlan:
    """What would compute the gradients of a call on a target."""
    chip = target if isinstance(target, Target) else target_by_name(target)
    if not isinstance(problem, BackwardProblem):
        problem = BackwardProblem.of(problem)
    return cached_backward_plan(problem, chip, backend, None)
