"""Which plan a call runs with: the planner's choice, among the kernels that exist today."""

from __future__ import annotations

from functools import lru_cache

import torch

from openmla.errors import Unsupported
from openmla.operands import Operands, Results
from openmla.plan import Plan, plan
from openmla.plan.support import is_implemented
from openmla.plan.target import Target, target_of_device
from openmla.problem import Problem


def plan_call(operands: Operands, results: Results, backend: str = "auto") -> Plan:
    """The plan for these tensors on their device; raises Unsupported if nothing can run."""
    return runnable_plan(operands.problem(results), device_target(operands.q.device), backend)


@lru_cache(maxsize=64)
def device_target(device: torch.device) -> Target:
    """The planning target that a device is, asked for once."""
    return target_of_device(device)


@lru_cache(maxsize=4096)
def runnable_plan(problem: Problem, target: Target, backend: str = "auto") -> Plan:
    """The first plan, in the planner's order, whose kernel exists. An explicit backend stays."""
    chosen = plan(problem, target, backend)
    if chosen.runs_today:
        return chosen
    if backend == "auto":
        for family in target.families:
            if is_implemented(family, problem.form):
                return plan(problem, target, family)
    raise Unsupported(
        f"{chosen.backend} is planned for {target.name}, but its {problem.form} kernel is not "
        "implemented yet",
        nearest="the same call on CPU tensors",
    )
