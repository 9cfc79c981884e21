"""Gradient cases on CDNA4's backward kernels by way of the simulator."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from gluon_sim import Kind, Limits, Report
from kernels.hopper.backward import simulated
from kernels.hopper.backward.simulated import forward, on, same_bits
from openmla.backward.operands import EVERY, Wanted
from openmla.backward.reference import Saved
from openmla.kernels.cdna4.backward import launch as own_launch
from openmla.lab.testing.compare_gradients import judge_twice
from openmla.lab.testing.gradients import BuiltGradients, GradientCase
from openmla.planning import Plan, cached_plan, target_by_name

LIMITS = Limits(steps=20_000)


def plan_of(built: BuiltGradients, saved: Saved) -> Plan:
    """The plan of a case."""
    return cached_plan(built.backward(saved).problem(), target_by_name("mi355x"), "cdna4", (3, 8))


def run(
    built: BuiltGradients,
    saved: Saved,
    wanted: Wanted = EVERY,
    launch: ModuleType = own_launch,
    **options: Any,
) -> tuple[dict[str, Tensor], list[Report]]:
    """Gradients by name, every element of which is written exactly once, and the reports."""
    return simulated.run(built, saved, plan_of(built, saved), wanted, launch, **options)


def assert_right_clean_and_deaf_to_poison(case: GradientCase, seed: int = 1) -> None:
    """By the acceptance rule, and with the same bits when all around the operands is NaN."""
    found = []
    for background, schedule in (("zero", "random"), ("nan", "unfair")):
        built = on(case, background)
        gradients, reports = run(built, forward(built), seed=seed, schedule=schedule)
        assert [str(f) for report in reports for f in report.findings] == []
        found.append(gradients)
    assert same_bits(found[1], found[0])
    built = on(case)
    for verdict in judge_twice(built, found[0], forward(built)):
        assert verdict.ok, verdict.report()


def check(
    launch: ModuleType, case: GradientCase, schedule: str, seed: int
) -> tuple[set[Kind], bool]:
    """What the simulator found, and whether the numbers are right. Around the operands is NaN."""
    built = on(case, "nan")
    saved = forward(built)
    options = {"schedule": schedule, "seed": seed, "limits": LIMITS}
    gradients, reports = run(built, saved, launch=launch, **options)
    kinds = {kind for report in reports for kind in report.kinds()}
    return kinds, all(verdict.ok for verdict in judge_twice(on(case), gradients, saved))
