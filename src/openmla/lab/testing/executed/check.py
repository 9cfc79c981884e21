"""One case on a target's compiled kernels, executed under several schedules and judged.

>>> from openmla.lab.testing.case import Case
>>> case = Case("dense", 1, 128, 64, 128, q_lens=(5,), k_lens=(65,))
>>> check_executed(case, "h200").kind                                      # doctest: +SKIP
''
"""

from __future__ import annotations

from collections.abc import Sequence

from gluon_sim.compiled import SCHEDULES, Report, Schedule
from openmla.errors import InvalidArgument, Unsupported
from openmla.lab.testing.build import Outcome
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.executed.prepare import PreparedCase, prepare
from openmla.lab.testing.memory.poison import differences
from openmla.lab.testing.result import Result


def check_executed(
    case: Case, target: str, deep: bool = True, schedules: Sequence[Schedule] = SCHEDULES
) -> Result:
    """What is wrong with a case on the target's compiled kernels. A refusal is raised.

    The first schedule's result is judged by the acceptance rule; the others must give its bits.
    All memory that a case does not name is poisoned in every run, so `deep` changes nothing.
    """
    return executed(case, target, schedules)[0]


def executed(case: Case, target: str, schedules: Sequence[Schedule]) -> tuple[Result, list[Report]]:
    """What `check_executed` finds, and the report of every launch, schedule by schedule."""
    reports: list[Report] = []
    try:
        prepared = prepare(case, target)
        outcome, result = _run(prepared, schedules, reports)
        if result is None:
            kernel = prepared.plan.kernel
            coarse = kernel.fp8_weights or bool(kernel.coarse)
            summed = target == "h200"  # FP8 products, as its tensor cores do
            verdict = judge(prepared.built, outcome, fp8_sums=summed, fp8_weights=coarse)
            result = Result("right", bound=verdict.bound, lse=verdict.lse)
            if not verdict.ok:
                result = Result("failed", "accuracy", verdict.report())
    except (InvalidArgument, Unsupported):
        raise
    except Exception as error:
        result = Result("failed", "error", f"{type(error).__name__}: {error}")
    return result, reports


def _run(
    prepared: PreparedCase, schedules: Sequence[Schedule], reports: list[Report]
) -> tuple[Outcome, Result | None]:
    """The first schedule's outcome, and what was found before any verdict on it."""
    first: Outcome | None = None
    for schedule in schedules:
        outcome, found = prepared.run(schedule)
        reports += found
        bad = [str(report) for report in found if not report.ok]
        if bad:
            return outcome, Result("failed", "fault", "\n".join(bad))
        first = first or outcome
        changed = differences(outcome, first)
        if changed:
            return outcome, Result("failed", "schedule", f"{schedule}: " + "\n".join(changed))
    return first or Outcome(prepared.results.out), None
