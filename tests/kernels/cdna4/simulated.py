"""Cases on the CDNA4 kernels by way of the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gluon_sim import Report
from openmla.lab.testing.build import BuiltCase, Outcome
from openmla.lab.testing.simulate import new_results, plan_on, simulated
from openmla.planning import Plan


def plan_of(built: BuiltCase, **config: Any) -> Plan:
    """The plan of a case, with some fields of its config changed."""
    chosen = plan_on("mi355x", built.operands, new_results(built))
    return replace(chosen, config=replace(chosen.config, **config)) if config else chosen


def run(
    built: BuiltCase, config: dict[str, Any] | None = None, **options: Any
) -> tuple[Outcome, list[Report]]:
    """What the kernels make of a case, and what the simulator found."""
    chosen = plan_of(built, **(config or {}))
    return simulated(chosen, built.operands, new_results(built), **options)
