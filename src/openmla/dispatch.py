"""Which plan a call runs with: the planner's choice, among the kernels that exist today."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from openmla.errors import Unsupported
from openmla.operands import Operands, Results
from openmla.plan import Plan
from openmla.plan.support import runnable_plan
from openmla.plan.target import Target, target_of_device
from openmla.problem import Problem

# The first Triton that compiles a family's kernels, where older ones do not. In 3.6 copies to LDS
# take their addresses only in layouts that cannot describe the slots of K and V.
FIRST_TRITON = {"cdna4": (3, 9)}


def plan_call(operands: Operands, results: Results, backend: str = "auto") -> Plan:
    """The plan for these tensors on their device; raises Unsupported if nothing can run."""
    return plan_here(operands.problem(results), device_target(operands.q.device), backend)


@lru_cache(maxsize=4096)
def plan_here(problem: Problem, target: Target, backend: str = "auto") -> Plan:
    """The plan that runs with the Triton that is installed."""
    chosen = runnable_plan(problem, target, backend)
    needed = FIRST_TRITON.get(chosen.backend)
    if needed is None or triton_version() >= needed:
        return chosen
    reason = f"{chosen.backend}: its kernels need Triton {needed[0]}.{needed[1]} or later"
    if backend != "auto":
        raise Unsupported(reason, nearest="backend='auto', which may take another kernel family")
    other = runnable_plan(problem, target, "portable")
    return replace(other, passed_over=(*chosen.passed_over, reason))


def triton_version() -> tuple[int, ...]:
    """Major and minor number."""
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])


@lru_cache(maxsize=64)
def device_target(device: torch.device) -> Target:
    """The planning target that a device is, asked for once."""
    return target_of_device(device)
