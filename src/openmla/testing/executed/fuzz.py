"""Random cases on a target's compiled kernels, executed on the CPU until so many of them have run.

Draw i of a run is `simulated_case(target, seed + i)`, the same that the simulator takes. What the
kernels refuse is counted by reason and the next one is drawn. Most of the time goes into compiling:
seconds per kernel, once.

    report = run_executed(cases=12, seed=0, target="h200")
    report.ok(12), report.summary()
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from gluon_sim.compiled import SCHEDULES, Schedule
from openmla.errors import InvalidArgument, Unsupported
from openmla.testing.case import Case
from openmla.testing.executed.check import check_executed
from openmla.testing.fuzz import Failure, Progress, one_thread
from openmla.testing.simulate.draw import simulated_case

MOST_FAILURES = 5
"""A run ends after so many."""
DRAWS_PER_CASE = 20
"""A run also ends when this many draws for each case asked for were not enough."""


@dataclass
class ExecutedReport:
    """What a run did."""

    target: str
    seed: int
    draws: int = 0
    ran: Counter[str] = field(default_factory=Counter)
    """Cases that ran, by form."""
    refused: Counter[str] = field(default_factory=Counter)
    """Draws that the kernels refused, by reason; numbers in it are written as N."""
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
            f"{self.target}: {self.cases} cases ({forms}) of {self.draws} draws from seed "
            f"{self.seed} on, {self.refused.total()} refused, {len(self.failures)} failures, "
            f"{self.worst:.2f} of the error bound, {self.seconds:.0f} s"
        )


def run_executed(
    cases: int,
    seed: int,
    target: str,
    schedules: Sequence[Schedule] = SCHEDULES,
    progress: Progress | None = None,
) -> ExecutedReport:
    """Draw from `seed` on until `cases` cases ran, or there were too many failures or refusals."""
    started = time.perf_counter()
    report = ExecutedReport(target, seed)
    tell = progress or (lambda done, total, note: None)
    with one_thread():
        while report.cases < cases and report.draws < DRAWS_PER_CASE * cases:
            case = simulated_case(target, seed + report.draws)
            report.draws += 1
            _check(case, report, schedules)
            tell(report.cases, cases, str(case))
            if len(report.failures) >= MOST_FAILURES:
                break
    report.seconds = time.perf_counter() - started
    return report


def _check(case: Case, report: ExecutedReport, schedules: Sequence[Schedule]) -> None:
    """One case into the report."""
    try:
        found = check_executed(case, report.target, schedules)
    except (InvalidArgument, Unsupported) as error:
        reason = error.reason if isinstance(error, Unsupported) else str(error)
        report.refused[re.sub(r"\d+", "N", reason)] += 1
        return
    report.ran[case.form] += 1
    report.worst = max(report.worst, found.bound)
    if found.kind:
        report.failures.append(Failure(found.kind, case, case, found.message))
