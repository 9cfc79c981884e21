"""Random cases on a target's Gluon kernels, simulated on the CPU until so many of them have run.

Draw i of a run is `simulated_case(target, seed + i)`. What the kernels refuse is counted by reason
and the next one is drawn. Failures are shrunk and saved as JSON, which `replay_simulated` runs
again.

    report = run_simulated(cases=60, seed=0, target="h200")
    report.ok, report.summary()
"""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from openmla.errors import InvalidArgument, Unsupported
from openmla.testing.case import Case
from openmla.testing.fuzz import Failure, Progress, load, one_thread, save
from openmla.testing.shrink import shrink
from openmla.testing.simulate import check_simulated
from openmla.testing.simulate.draw import simulated_case

DEEP_EVERY = 5
"""Every fifth case is run again with NaN in all unused memory."""
MOST_FAILURES = 20
"""A run ends after so many."""
DRAWS_PER_CASE = 20
"""A run also ends when this many draws for each case asked for were not enough."""
SHRINK_ATTEMPTS = 80


@dataclass
class SimulatedReport:
    """What a run did."""

    target: str
    seed: int
    draws: int = 0
    ran: Counter[str] = field(default_factory=Counter)
    """Cases that ran, by form."""
    refused: Counter[str] = field(default_factory=Counter)
    """Draws that the kernels refused, by reason; numbers in it are written as N."""
    poisoned: int = 0
    failures: list[Failure] = field(default_factory=list)
    worst: float = 0.0
    """Largest share of the componentwise bound among accepted results."""
    seconds: float = 0.0

    @property
    def cases(self) -> int:
        """How many ran."""
        return self.ran.total()

    def ok(self, cases: int) -> bool:
        """No failure, and as many cases ran as were asked for."""
        return not self.failures and self.cases >= cases

    def summary(self) -> str:
        """One line."""
        forms = ", ".join(f"{number} {form}" for form, number in sorted(self.ran.items()))
        return (
            f"{self.target}: {self.cases} cases ({forms}) of {self.draws} draws (seeds {self.seed} "
            f"to {self.seed + max(self.draws - 1, 0)}), {self.refused.total()} refused, "
            f"{self.poisoned} poisoned, {len(self.failures)} failures, {self.seconds:.1f} s"
        )


def run_simulated(
    cases: int,
    seed: int,
    target: str,
    progress: Progress | None = None,
    save_dir: str | Path | None = None,
) -> SimulatedReport:
    """Draw from `seed` on until `cases` cases ran, or there were too many failures or refusals."""
    started = time.perf_counter()
    report = SimulatedReport(target, seed)
    tell = progress or (lambda done, total, note: None)
    with one_thread():
        while report.cases < cases and report.draws < DRAWS_PER_CASE * cases:
            case = simulated_case(target, seed + report.draws)
            report.draws += 1
            _check(case, report, save_dir)
            tell(report.cases, cases, str(case))
            if len(report.failures) >= MOST_FAILURES:
                break
    report.seconds = time.perf_counter() - started
    return report


def _check(case: Case, report: SimulatedReport, save_dir: str | Path | None) -> None:
    """One case into the report."""
    deep = report.cases % DEEP_EVERY == 0
    try:
        found = check_simulated(case, report.target, deep)
    except (InvalidArgument, Unsupported) as error:
        report.refused[_without_numbers(error)] += 1
        return
    report.ran[case.form] += 1
    report.poisoned += deep
    if found.kind:
        small = _shrunk(case, report.target, found.kind)
        failure = Failure(found.kind, case, small, found.message)
        path = None if save_dir is None else save(failure, Path(save_dir) / report.target)
        report.failures.append(replace(failure, path=path))
    report.worst = max(report.worst, found.bound)


def _without_numbers(error: InvalidArgument | Unsupported) -> str:
    reason = error.reason if isinstance(error, Unsupported) else str(error)
    return re.sub(r"\d+", "N", reason)


def _shrunk(case: Case, target: str, kind: str) -> Case:
    """The smallest case found that fails in the same way."""

    def fails(candidate: Case) -> bool:
        try:
            return check_simulated(candidate, target, deep=kind == "poison").kind == kind
        except (InvalidArgument, Unsupported):
            return False

    return shrink(case, fails, SHRINK_ATTEMPTS)


def replay_simulated(path: str | Path, target: str) -> Failure | None:
    """Run a saved case again with every check; None when nothing is wrong any more."""
    case = load(path)
    with one_thread():
        found = check_simulated(case, target)
    return Failure(found.kind, case, case, found.message, Path(path)) if found.kind else None
