"""Random cases on a target's Gluon kernels, simulated on the CPU until so many of them have run.

Draw i of a run is `simulated_case(target, seed + i)`. What the kernels refuse is counted by reason
and the next one is drawn. Failures are shrunk and saved as JSON, which `replay_simulated` runs
again.

    report = run_simulated(cases=60, seed=0, target="h200")
    report.ok, report.summary()
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from openmla.errors import InvalidArgument, Unsupported
from openmla.testing.case import Case
from openmla.testing.checker import Result, refusal
from openmla.testing.fuzz import (
    MAX_FAILURES,
    Failure,
    FuzzReport,
    Progress,
    load,
    one_thread,
    saved,
)
from openmla.testing.shrink import shrink
from openmla.testing.simulate import FAMILIES, check_simulated
from openmla.testing.simulate.draw import simulated_case

Check = Callable[[Case, str, bool], Result]
DEEP_EVERY = 5
"""Every fifth case is run again with NaN in all unused memory."""
DRAWS_PER_CASE = 20
"""A run also ends when this many draws for each case asked for were not enough."""
SHRINK_ATTEMPTS = 80


def run_simulated(
    cases: int, seed: int, target: str, progress: Progress | None = None,
    save_dir: str | Path | None = None, check: Check | None = None,
) -> FuzzReport:  # fmt: skip
    """Draw from `seed` on until `cases` cases ran, or there were too many failures or refusals.

    `check` says of a case, a target and whether to look deeper what is wrong; it may refuse.
    """
    judge = check or check_simulated
    started = time.perf_counter()
    report = FuzzReport(seed, FAMILIES[target], target, asked=DRAWS_PER_CASE * cases, least=cases)
    tell = progress or (lambda done, total, note: None)
    ran = 0
    with one_thread():
        while ran < cases and report.cases < report.asked:
            case = simulated_case(target, seed + report.cases)
            report.add(case, _checked(judge, case, report, ran % DEEP_EVERY == 0, save_dir))
            ran = report.cases - report.refused.total()
            tell(ran, cases, str(case))
            if len(report.failures) >= MAX_FAILURES:
                break
    report.asked = report.cases
    report.seconds = time.perf_counter() - started
    return report


def _checked(
    check: Check, case: Case, report: FuzzReport, deep: bool, save_dir: str | Path | None
) -> Result:
    """What a case is; failures go into the report, shrunk."""
    target = report.device
    try:
        found = check(case, target, deep)
    except (InvalidArgument, Unsupported) as error:
        return Result("refused", message=refusal(error))
    if found.status == "failed":
        small = _shrunk(check, case, target, found.kind)
        folder = None if save_dir is None else Path(save_dir) / target
        report.failures.append(saved(Failure(found.kind, case, small, found.message), folder))
    return replace(found, family=report.backend, poisoned=deep)


def _shrunk(check: Check, case: Case, target: str, kind: str) -> Case:
    """The smallest case found that fails in the same way."""

    def fails(candidate: Case) -> bool:
        try:
            return check(candidate, target, kind == "poison").kind == kind
        except (InvalidArgument, Unsupported):
            return False

    return shrink(case, fails, SHRINK_ATTEMPTS)


def replay_simulated(path: str | Path, target: str) -> Failure | None:
    """Run a saved case again with every check; None when nothing is wrong any more."""
    case = load(path)
    with one_thread():
        found = check_simulated(case, target)
    return Failure(found.kind, case, case, found.message, Path(path)) if found.kind else None
