"""Which plan a call runs with: the planner's choice among kernels that run with this Triton.

A call is one of attention, its backward pass, or a step of the indexer: its operands pose a
problem, the problem has a plan, and the plan's kernels are launched.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from openmla.kernels.fallback import run_plan, without_failed
from openmla.kernels.launch import launch
from openmla.operands import AnyOperands
from openmla.planning import NEWEST_TRITON, Plan, cached_plan
from openmla.planning.problems import AnyProblem
from openmla.planning.target import Target, target_of_device

if TYPE_CHECKING:
    from openmla.kernels.call import Call


def run_call(
    operands: AnyOperands,
    results: Any,
    backend: str = "auto",
    before: Callable[[Plan], None] | None = None,
) -> "tuple[Plan, list[tuple[Call, Any]]]":
    """Plan and launch; returns the plan, and what was launched with its compiled kernels.

    before: what has to be launched first is decided by the plan.
    """

    def launched(plan: Plan) -> "list[tuple[Call, Any]]":
        if before is not None:
            before(plan)
        return launch(plan, operands, results)

    return run_plan(lambda: plan_call(operands, results, backend), launched)


def plan_call(operands: AnyOperands, results: Any, backend: str = "auto") -> Plan:
    """The plan for these tensors on their device; raises Unsupported if nothing can run."""
    return plan_for(operands.problem(results), device_target(operands.device), backend)


def plan_for(problem: AnyProblem, target: Target, backend: str = "auto") -> Plan:
    """The plan that runs with the Triton that is installed; an explicit backend stays."""
    triton = NEWEST_TRITON if target.vendor == "cpu" else triton_version()
    return without_failed(lambda name: cached_plan(problem, target, name, triton), backend)


def triton_version() -> tuple[int, ...]:
    """Major and minor number of the installed Triton, which a CPU does without."""
    from openmla.kernels.triton_version import TRITON

    return TRITON


@lru_cache(maxsize=64)
def device_target(device: torch.device) -> Target:
    """The planning target that a device is, asked for once."""
    return target_of_device(device)
