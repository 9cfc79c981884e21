"""Which plan a call runs with: the planner's choice, among the kernels that exist today."""

from __future__ import annotations

from functools import lru_cache

import torch

from openmla.operands import Operands, Results
from openmla.plan import Plan
from openmla.plan.support import runnable_plan
from openmla.plan.target import Target, target_of_device


def plan_call(operands: Operands, results: Results, backend: str = "auto") -> Plan:
    """The plan for these tensors on their device; raises Unsupported if nothing can run."""
    return runnable_plan(operands.problem(results), device_target(operands.q.device), backend)


@lru_cache(maxsize=64)
def device_target(device: torch.device) -> Target:
    """The planning target that a device is, asked for once."""
    return target_of_device(device)
