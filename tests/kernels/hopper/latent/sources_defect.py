"""Runs of a mutant of the Hopper kernels over spans and second sources."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import openmla.kernels.hopper as package
import openmla.kernels.hopper.latent.launch as launcher
from gluon_sim import Kind, Limits, intercept
from kernels import mutants
from kernels.hopper.latent.defect import SparseDefect
from kernels.mutants import load_mutant, once
from openmla import reference
from openmla.lab.testing.compare import compare
from openmla.lab.testing.simulate import plan_on
from two_sources import Setup, new_results, operands, read_by


@dataclass(frozen=True)
class SourcesCase:
    """A call, and the way in which its rows are read."""

    setup: Setup
    way: str = "in_kernel"
    """As `CacheRead.by` takes it."""
    is_few: bool = False
    """Whether three launches for few queries take the place of one."""

    def run(self, launch: ModuleType, schedule: str, seed: int) -> tuple[set[Kind], bool]:
        """What the simulator found, and whether the numbers are right. Rows that no query sees are
        NaN."""
        op = operands(self.setup)
        results = new_results(op)
        chosen = read_by(plan_on("h200", op, results, 0 if self.is_few else 2), self.way)
        assert (chosen.variant.few is not None) == self.is_few
        options = {"schedule": schedule, "seed": seed, "limits": Limits(steps=60_000)}
        with intercept(outputs=results.tensors(), **options) as reports:
            for call in launch.calls(chosen, op, results):
                call.run()
        kinds = {kind for report in reports for kind in report.kinds()}
        return kinds, compare(results, reference.of(op), columns=512).ok

    def assert_found(self, defect: SparseDefect, tmp_path: Path) -> None:
        """A handful of runs show a defect."""
        edit = once(defect.old, defect.new)
        mutant = load_mutant(package, defect.file, edit, "latent.launch", tmp_path)
        mutants.assert_found(defect.kind, partial(self.run, mutant))

    def assert_clean_and_right(self) -> None:
        """The kernels as they are pass the same runs."""
        for schedule, seed in mutants.RUNS[:2]:
            assert self.run(launcher, schedule, seed) == (set(), True)
