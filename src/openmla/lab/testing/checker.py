"""What one case is checked for, here or in a child process.

    accuracy   the acceptance rule, for every case
    poison     unused memory must not matter, for deep cases
    neighbors  the order of queries must not matter, for deep calls of mla_attend
    guard      nothing beside a tensor is touched, for deep cases: margins on a GPU, guard pages on
               the CPU (where a fault ends the process: only in a child)

A case is right, refused (the call raised one of openmla's own errors before anything ran) or
failed; there is nothing else.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from openmla.dispatch import plan_call
from openmla.errors import InvalidArgument, Unsupported
from openmla.lab.testing.build import BuiltCase, Outcome, build
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.isolate import AnyCase, named
from openmla.lab.testing.memory.guard import guard_problems
from openmla.lab.testing.memory.margin import margin_problems
from openmla.lab.testing.memory.neighbors import neighbor_problems, turned_round
from openmla.lab.testing.memory.poison import poison_problems
from openmla.lab.testing.result import Result, refusal
from openmla.lab.testing.sources import SourcesCase, checked

DEEP_EVERY = 10
"""Cases whose seed is a multiple of this are deep."""


@dataclass(frozen=True)
class Checker:
    """How a case is run and judged."""

    backend: str = "auto"
    device: str = "cpu"
    implementation: str = ""
    """"module:function" that takes a BuiltCase; empty: the public call."""
    guard_pages: bool = False
    """Whether this process may die of a fault."""

    def run(self, built: BuiltCase) -> Outcome:
        """The call."""
        if self.implementation:
            outcome: Outcome = named(self.implementation)(built)
            return outcome
        return built.run(backend=self.backend)

    def result(self, case: Case, deep: bool) -> Result:
        """Everything that is checked of a case."""
        try:
            return self._result(case, deep)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            return Result("failed", "error", message, fatal=not self._device_works())

    def _result(self, case: Case, deep: bool) -> Result:
        built = build(case, device=self.device)
        try:
            outcome = self.run(built)
        except (Unsupported, InvalidArgument) as error:
            return Result("refused", message=refusal(error))
        plan = plan_call(built.operands, outcome, self.backend)
        if plan.kernel.coarse:
            return Result("refused", message=plan.kernel.coarse)  # the rule would only confirm it
        family = plan.backend
        verdict = judge(built, outcome, fp8_weights=plan.kernel.fp8_weights)
        if not verdict.ok:
            return Result("failed", "accuracy", verdict.report(), family)
        right = Result("right", family=family, bound=verdict.bound, lse=verdict.lse)
        if not deep:
            return right
        if problems := poison_problems(case, self.run, self.device):
            return Result("failed", "poison", "\n".join(problems), family)
        if case.sources:
            turned = self.run(turned_round(build(case, device=self.device)))
            if problems := neighbor_problems(turned, outcome):
                return Result("failed", "neighbors", "\n".join(problems), family)
        guarded = self.guard_pages or torch.device(self.device).type != "cpu"
        if guarded and (problems := self._guard_problems(case)):
            return Result("failed", "guard", "\n".join(problems), family)
        return replace(right, poisoned=True, guarded=guarded)

    def _guard_problems(self, case: Case) -> list[str]:
        if torch.device(self.device).type == "cpu":
            return guard_problems(case, self.run)
        return margin_problems(case, self.run, self.device)

    def _device_works(self) -> bool:
        """After an illegal access, a CUDA context fails in everything it is asked."""
        try:
            return bool(torch.ones(1, dtype=torch.int32, device=self.device).item() == 1)
        except Exception:
            return False


def check(case: AnyCase, options: dict[str, Any]) -> dict[str, Any]:
    """An answer of a child process; see openmla.lab.testing.isolate."""
    deep, checker = case.seed % options["deep_every"] == 0, Checker(**options["checker"])
    if isinstance(case, SourcesCase):
        return asdict(checked(case, checker.backend, checker.device, deep))
    return asdict(checker.result(case, deep))
