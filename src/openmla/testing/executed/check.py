"""One case on a target's compiled kernels, executed under several schedules and judged.

>>> from openmla.testing.case import Case
>>> case = Case("dense", 1, 128, 64, 128, q_lens=(5,), k_lens=(65,))
>>> check_executed(case, "h200").kind                                      # doctest: +SKIP
''
"""

from __future__ import annotations

from collections.abc import Sequence

from gluon_sim.compiled import SCHEDULES, Schedule
from openmla.errors import InvalidArgument, Unsupported
from openmla.testing.build import Outcome
from openmla.testing.case import Case
from openmla.testing.checker import Result
from openmla.testing.compare import judge
from openmla.testing.executed.prepare import prepare
from openmla.testing.memory.poison import differences


def check_executed(
    case: Case, target: str, deep: bool = True, schedules: Sequence[Schedule] = SCHEDULES
) -> Result:
    """What is wrong with a case on the target's compiled kernels. A refusal is raised.

    The first schedule's result is judged by the acceptance rule; the others must give its bits.
    All memory that a case does not name is poisoned in every run, so `deep` changes nothing.
    """
    try:
        prepared = prepare(case, target)
        first: Outcome | None = None
        for schedule in schedules:
            outcome, reports = prepared.run(schedule)
            bad = [str(report) for report in reports if not report.ok]
            if bad:
                return Result("failed", "fault", "\n".join(bad))
            first = first or outcome
            changed = differences(outcome, first)
            if changed:
                return Result("failed", "schedule", f"{schedule}: " + "\n".join(changed))
        outcome = first or Outcome(prepared.results.out)
        fp8_weights = prepared.plan.kernel.fp8_weights
        verdict = judge(prepared.built, outcome, fp8_weights=fp8_weights)
    except (InvalidArgument, Unsupported):
        raise
    except Exception as error:
        return Result("failed", "error", f"{type(error).__name__}: {error}")
    if not verdict.ok:
        return Result("failed", "accuracy", verdict.report())
    return Result("right", bound=verdict.bound, lse=verdict.lse)
