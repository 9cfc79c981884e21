"""Cases on the Blackwell kernels by way of the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gluon_sim import Report
from openmla.kernels.blackwell.dense.plan import following, in_a_pair, original_plan
from openmla.lab.testing.build import BuiltCase, Outcome
from openmla.lab.testing.simulate import new_results, plan_on, simulated
from openmla.planning import Plan

PAIR = 4
"""Tiles of 128 queries of a dense work item that two CTAs share."""


def plan_of(built: BuiltCase, num_qo: int = 0) -> Plan:
    """The plan of a case on a B200; `num_qo` 0: as planned."""
    chosen = plan_on("b200", built.operands, new_results(built))
    if not num_qo or num_qo == chosen.config.num_qo:
        return chosen
    original = original_plan(chosen.problem)
    if num_qo == PAIR:
        pair = following(original, in_a_pair(original))
        return replace(chosen, kernel_name="dense_pair", config=pair)
    return replace(chosen, config=following(original.with_num_qo(num_qo)))


def run(
    built: BuiltCase, chosen: Plan | None = None, **options: Any
) -> tuple[Outcome, list[Report]]:
    """What the kernel makes of a case, and what the simulator found."""
    return simulated(chosen or plan_of(built), built.operands, new_results(built), **options)
