"""Cases on the Hopper kernels by way of the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gluon_sim import Report
from openmla.lab.testing.build import BuiltCase, Outcome
from openmla.lab.testing.simulate import new_results, plan_on, simulated
from openmla.planning import Plan


def plan_of(built: BuiltCase, sm_count: int = 2, num_qo: int = 0) -> Plan:
    """The plan of a case, for a small chip so that blocks do several work items of work, and few
    queries are taken for many."""
    chosen = plan_on("h200", built.operands, new_results(built))
    config = replace(chosen.config, sm_count=sm_count)
    if built.case.form == "sparse":
        config = replace(config, few=None)
    return replace(chosen, config=config.with_num_qo(num_qo) if num_qo else config)


def run(
    built: BuiltCase, chosen: Plan | None = None, **options: Any
) -> tuple[Outcome, list[Report]]:
    """What the kernels make of a case, and what the simulator found."""
    return simulated(chosen or plan_of(built), built.operands, new_results(built), **options)
