"""Random cases on a target's Gluon kernels, simulated on the CPU until so many of them have run.

Draw i of a run is `simulated_case(target, seed + i)`. What the kernels refuse is counted by reason
and the next one is drawn. Failures are shrunk and saved as JSON, which `replay_simulated` runs
again.

    report = run_simulated(cases=60, seed=0, target="h200")
    report.ok, report.summary()
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

from openmla.errors import InvalidArgument, Unsupported
from openmla.lab.testing.case import Case
from openmla.lab.testing.fuzz import (
    MAX_FAILURES,
    Failure,
    FuzzReport,
    Progress,
    load,
    one_thread,
    reported,
    saved,
)
from openmla.lab.testing.result import Result, refusal
from openmla.lab.testing.shrink import shrink
from openmla.lab.testing.simulate import FAMILIES, check_simulated
from openmla.lab.testing.simulate.draw import simulated_case

Check = Callable[[Case, str, bool], Result]
DEEP_EVERY = 5
"""Every fifth case is run again with NaN in all unused memory."""
MOST_REFUSED = 100
"""In a row: every family takes a third of the cases that are drawn for it, or more."""
SHRINK_ATTEMPTS = 80


def run_simulated(
    cases: int,
    seed: int,
    target: str,
    progress: Progress | None = None,
    save_dir: str | Path | None = None,
    check: Check | None = None,
) -> FuzzReport:
    """Draw from `seed` on until `cases` cases ran, or there were too many failures or refusals.

    `check` says of a case, a target and whether to look deeper what is wrong; it may refuse. Ctrl-C
    raises Interrupted, with the report of what ran.
    """
    judge = check or check_simulated
    report = FuzzReport(seed, FAMILIES[target], target, least=cases)
    folder = None if save_dir is None else Path(save_dir) / target
    tell = progress or (lambda done, total, note: None)
    with one_thread(), reported(report):
        for case, result in answers(cases, seed, target, judge):
            if result.status == "failed":
                small = _shrunk(judge, case, target, result.kind)
                failure = Failure(result.kind, case, small, result.message)
                report.failures.append(saved(failure, folder))
            report.add(case, replace(result, family=report.backend))
            report.asked = report.cases
            tell(report.cases - report.refused.total(), cases, str(case))
            if len(report.failures) >= MAX_FAILURES:
                break
    return report


def answers(cases: int, seed: int, target: str, check: Check) -> Iterator[tuple[Case, Result]]:
    """What a check says of each case from `seed` on, until it took `cases` of them.

    A refusal is one answer more, and the next case is drawn; after MOST_REFUSED of them in a row
    there is nothing that the target's kernels take.
    """
    taken = in_a_row = 0
    for number in count(seed):
        if taken == cases or in_a_row == MOST_REFUSED:
            return
        case, deep = simulated_case(target, number), taken % DEEP_EVERY == 0
        try:
            result = replace(check(case, target, deep), poisoned=deep)
            taken, in_a_row = taken + 1, 0
        except (InvalidArgument, Unsupported) as error:
            result = Result("refused", message=refusal(error))
            in_a_row += 1
        yield case, result


def _shrunk(check: Check, case: Case, target: str, kind: str) -> Case:
    """The smallest case found that fails in the same way."""

    def fails(candidate: Case) -> bool:
        try:
            return check(candidate, target, kind in ("poison", "neighbors")).kind == kind
        except (InvalidArgument, Unsupported):
            return False

    return shrink(case, fails, SHRINK_ATTEMPTS)


def replay_simulated(path: str | Path, target: str, check: Check | None = None) -> Failure | None:
    """Run a saved case again with every check; None when nothing is wrong any more."""
    case = load(path)
    with one_thread():
        found = (check or check_simulated)(case, target, True)
    return Failure(found.kind, case, case, found.message, Path(path)) if found.kind else None
