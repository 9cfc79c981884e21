"""What every simulated kernel must show, whatever it computes.

`run` takes a built case and the options of `openmla.sim.intercept`, and returns the outcome and the
simulator's reports.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from openmla.sim import Report
from openmla.testing.build import BuiltCase, Outcome, build
from openmla.testing.case import Case
from openmla.testing.compare import judge
from openmla.testing.memory import Memory
from openmla.testing.poison import differences

# CI looks at the earliest and the latest schedule; a changed kernel needs OPENMLA_SIM_SEEDS=50.
SEEDS = int(os.environ.get("OPENMLA_SIM_SEEDS", "2"))
Run = Callable[..., tuple[Outcome, list[Report]]]


def on(case: Case, background: str = "zero") -> BuiltCase:
    """A case on the CPU; `background` fills what it does not address."""
    return build(case, memory=Memory("cpu", background))


def assert_clean(reports: list[Report]) -> None:
    """The simulator found nothing."""
    assert [str(f) for report in reports for f in report.findings] == []


def assert_right_clean_and_deaf_to_poison(case: Case, run: Run, seed: int = 1) -> None:
    """By the acceptance rule, and with the same bits when all around the operands is NaN."""
    outcomes = []
    for background in ("zero", "nan"):
        outcome, reports = run(on(case, background), seed=seed)
        assert_clean(reports)
        outcomes.append(outcome)
    assert not differences(outcomes[1], outcomes[0])
    verdict = judge(on(case), outcomes[0])
    assert verdict.ok, verdict.report()


def assert_every_schedule_is_clean(case: Case, run: Run) -> None:
    """And gives the same bits."""
    first = None
    for seed in range(SEEDS):
        schedule = {0: "early", 1: "late"}.get(seed, "random")
        outcome, reports = run(on(case), seed=seed, schedule=schedule, resident=3)
        assert_clean(reports)
        assert first is None or not differences(outcome, first)
        first = outcome
