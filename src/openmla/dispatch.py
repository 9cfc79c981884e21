"""Which plan a call runs with: the planner's choice among kernels that run with this Triton."""

from functools import lru_cache

import torch

from openmla.kernels.fallback import without_failed
from openmla.operands import Operands, Results
from openmla.planning import NEWEST_TRITON, Plan, cached_plan
from openmla.planning.target import Target, target_of_device
from openmla.problem import Problem


def plan_call(operands: Operands, results: Results, backend: str = "auto") -> Plan:
    """The plan for these tensors on their device; raises Unsupported if nothing can run."""
    return plan_for(operands.problem(results), device_target(operands.q.device), backend)


def plan_for(problem: Problem, target: Target, backend: str = "auto") -> Plan:
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
