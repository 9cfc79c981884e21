"""Runs of a mutant of the latent Hopper kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import openmla.kernels.hopper as package
from gluon_sim import Kind, Limits, intercept
from kernels import mutants
from kernels.hopper.simulated import plan_of
from kernels.judging import Change, as_built, on
from kernels.mutants import load_mutant, once
from openmla.operands import LatentOperands, SparseOperands
from openmla.planning import Plan
from openmla.testing.build import Outcome
from openmla.testing.case import Case
from openmla.testing.compare import judge
from openmla.testing.simulate import new_results


@dataclass(frozen=True)
class SparseDefect:
    """Replace `old` by `new` in `file`. `kind` None: only the numbers are wrong."""

    name: str
    kind: Kind | None
    file: str
    old: str
    new: str
    case: str


def assert_found(
    defect: SparseDefect, case: Case, folder: Path, adjust: Callable[[Plan], Plan] = lambda p: p,
    change: Change = as_built,
) -> None:  # fmt: skip
    """A handful of runs, of the plan of a case as `adjust` changes it, show the defect."""
    edit = once(defect.old, defect.new)
    mutant = load_mutant(package, defect.file, edit, "latent.launch", folder)

    def run(schedule: str, seed: int) -> tuple[set[Kind], bool]:
        built = change(on(case, "nan"))
        op, results = built.operands, new_results(built)
        assert isinstance(op, SparseOperands | LatentOperands)
        outcome = Outcome(results.out, results.lse, results.max_logits)
        options = {"schedule": schedule, "seed": seed, "limits": Limits(steps=20_000)}
        with intercept(outputs=outcome.tensors(), **options) as reports:
            for call in mutant.calls(adjust(plan_of(built)), op, results):
                call.run()
        kinds = {kind for report in reports for kind in report.kinds()}
        return kinds, judge(change(on(case)), outcome).ok

    mutants.assert_found(defect.kind, run)
