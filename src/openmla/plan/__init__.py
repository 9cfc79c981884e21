"""Planning: `plan(problem, target)` says what will run, or why nothing can.

Pure and deterministic: integers in, a frozen `Plan` out; no torch, no GPU, no environment. A plan
says what the planner would run; whether that kernel exists already is in `openmla.plan.support`.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from types import ModuleType

from openmla.errors import InvalidArgument, Unsupported
from openmla.plan.config import Plan
from openmla.plan.families import NEAR_MISSES, choose
from openmla.plan.target import TARGETS, Target, target_by_name
from openmla.problem import Problem

__all__ = ["BACKENDS", "TARGETS", "Plan", "Target", "plan", "target_by_name"]

BACKENDS = ("auto", "reference", "cpu", "portable", "hopper", "blackwell", "cdna4")


def plan(problem: Problem, target: str | Target = "cpu", backend: str = "auto") -> Plan:
    """The plan for a problem on a target; `backend` other than "auto" is never replaced.

    Raises `Unsupported` with the reason and the nearest form that would work.
    """
    if not isinstance(problem, Problem):
        raise InvalidArgument("problem", "a Problem", repr(problem))
    if not isinstance(target, str | Target):
        raise InvalidArgument("target", "the name of a target, or a Target", repr(target))
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise InvalidArgument("backend", "one of " + ", ".join(BACKENDS), repr(backend))
    return _cached_plan(problem, target, backend)


@lru_cache(maxsize=4096)
def _cached_plan(problem: Problem, target: str | Target, backend: str) -> Plan:
    return make_plan(problem, target, backend)


def make_plan(problem: Problem, target: str | Target = "cpu", backend: str = "auto") -> Plan:
    """`plan` without its cache and its argument checks."""
    chip = target if isinstance(target, Target) else target_by_name(target)
    if backend not in ("auto", "reference", *chip.families):
        others = ", ".join(chip.families)
        raise Unsupported(
            f"backend {backend!r} has no {problem.form} kernel for target {chip.name!r}",
            nearest=f"backend 'auto' (there: {others})",
        )
    passed_over = [NEAR_MISSES[chip.arch]] if chip.arch in NEAR_MISSES else []
    for family in chip.families if backend == "auto" else (backend,):
        config, reason = choose(family, problem, chip)
        if not reason:
            return Plan(problem, chip.name, family, config, tuple(passed_over))
        passed_over.append(f"{family}: {reason}")
    raise Unsupported("; ".join(passed_over), nearest=_nearest(problem, chip, backend))


def _nearest(problem: Problem, chip: Target, backend: str) -> str:
    """What to change so that something would serve the problem."""
    if backend != "auto" and len(chip.families) > 1:
        return "backend='auto', which may take another kernel family"
    dtypes = {problem.q_dtype, problem.kv_dtype, problem.v_dtype, problem.rope_dtype}
    if dtypes != {"bf16"}:
        return "bf16 tensors and a bf16 cache, or backend='reference'"
    return "the dims of a known model (openmla.plan.models), or backend='reference'"


class _CallablePackage(ModuleType):
    """Lets `openmla.plan(problem, target)` and `openmla.plan.blackwell` both be what they say."""

    def __call__(
        self, problem: Problem, target: str | Target = "cpu", backend: str = "auto"
    ) -> Plan:
        return plan(problem, target, backend)


sys.modules[__name__].__class__ = _CallablePackage
