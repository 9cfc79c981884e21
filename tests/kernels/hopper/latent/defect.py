"""Runs of a mutant of the latent Hopper kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import openmla.kernels.hopper as package
import openmla.kernels.hopper.latent.launch as launcher
from gluon_sim import Kind, Limits, intercept
from kernels import mutants
from kernels.hopper.simulated import plan_of
from kernels.judging import Change, as_built, on
from kernels.mutants import load_mutant, once
from openmla.lab.testing.build import Outcome
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.simulate import new_results
from openmla.operands import LatentOperands, SparseOperands
from openmla.planning import Plan


@dataclass(frozen=True)
class SparseDefect:
    """Replace `old` by `new` in `file`. `kind` None: only the numbers are wrong."""

    name: str
    kind: Kind | None
    file: str
    old: str
    new: str
    case: str


Adjust = Callable[[Plan], Plan]


def as_planned(plan: Plan) -> Plan:
    """A plan as it is."""
    return plan


def run_on(
    launch: ModuleType, case: Case, adjust: Adjust, change: Change, schedule: str, seed: int
) -> tuple[set[Kind], bool]:
    """What the simulator found, and whether the numbers are right. Around the operands is NaN."""
    built = change(on(case, "nan"))
    op, results = built.operands, new_results(built)
    assert isinstance(op, SparseOperands | LatentOperands)
    outcome = Outcome(results.out, results.lse, results.max_logits)
    options = {"schedule": schedule, "seed": seed, "limits": Limits(steps=60_000)}
    with intercept(outputs=outcome.tensors(), **options) as reports:
        for call in launch.calls(adjust(plan_of(built)), op, results):
            call.run()
    kinds = {kind for report in reports for kind in report.kinds()}
    return kinds, judge(change(on(case)), outcome).ok


def assert_found(
    defect: SparseDefect,
    case: Case,
    folder: Path,
    adjust: Adjust = as_planned,
    change: Change = as_built,
) -> None:
    """A handful of runs, of the plan of a case as `adjust` changes it, show the defect."""
    edit = once(defect.old, defect.new)
    mutant = load_mutant(package, defect.file, edit, "latent.launch", folder)
    mutants.assert_found(defect.kind, partial(run_on, mutant, case, adjust, change))


def assert_clean_and_right(
    case: Case, adjust: Adjust = as_planned, change: Change = as_built
) -> None:
    """On a case that shows defects, nothing is found in the kernel itself, and it is right."""
    for schedule, seed in mutants.RUNS[:2]:
        assert run_on(launcher, case, adjust, change, schedule, seed) == (set(), True)
