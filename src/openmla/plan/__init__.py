"""Planning: `plan(problem, target)` says what will run, or why nothing can.

Pure and deterministic: integers in, a frozen `Plan` out; no torch, no GPU, no environment.
"""

from __future__ import annotations

from functools import lru_cache

from openmla.errors import Unsupported
from openmla.plan.config import Plan
from openmla.plan.cpu import plan_cpu
from openmla.plan.target import Target, target_by_name
from openmla.problem import Problem

__all__ = ["Plan", "Target", "plan"]

BACKENDS = ("auto", "reference", "cpu", "portable", "hopper", "blackwell", "cdna4")


@lru_cache(maxsize=4096)
def plan(problem: Problem, target: str = "cpu", backend: str = "auto") -> Plan:
    """The plan for a problem on a target; `backend` other than "auto" is never replaced."""
    chip = target_by_name(target)
    family = chip.backend if backend == "auto" else backend
    if family == "reference":
        return Plan(problem, target, family, None)
    if family == "cpu" and chip.name == "cpu":
        return Plan(problem, target, family, plan_cpu(problem))
    raise Unsupported(
        f"backend {family!r} has no {problem.form} kernel for target {target!r}",
        nearest="CPU tensors with backend='auto'",
    )
