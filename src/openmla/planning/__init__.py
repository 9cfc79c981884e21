"""Planning: `plan(problem, target)` says what will run, or why nothing can.

Pure and deterministic: integers in, a frozen `Plan` out; no torch, no GPU, no environment. A plan
says what the planner would run; `openmla.dispatch.plan_for` says what runs with the Triton that is
installed. This package holds what no family owns; the plan of a kernel lies beside the kernel.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from openmla.errors import InvalidArgument
from openmla.planning.problems import AnyProblem
from openmla.planning.target import TARGETS, Target, target_by_name
from openmla.problem import Backend

if TYPE_CHECKING:
    from openmla.planning.registry import BACKENDS, NEWEST_TRITON, Plan, cached_plan

__all__ = [
    "BACKENDS",
    "NEWEST_TRITON",
    "TARGETS",
    "Plan",
    "Target",
    "cached_plan",
    "plan",
    "target_by_name",
]


OF_REGISTRY = ("BACKENDS", "NEWEST_TRITON", "Plan", "cached_plan")


def __getattr__(name: str) -> Any:
    """The registry imports the plans of all kernels, and these import modules of this package: so
    it is imported when one of its names is asked for."""
    if name not in OF_REGISTRY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("openmla.planning.registry"), name)


def plan(problem: AnyProblem, target: str | Target = "cpu", backend: Backend = "auto") -> Plan:
    """The plan for a problem on a target. Nothing is launched, and no GPU is asked.

    Args:
        problem: a Problem, or an IndexProblem of the indexer.
        target: the name of a chip ("h200", "b200", "mi355x", "cpu" …), or a Target.
        backend: "auto" takes the best kernel of the chip; another name is never replaced.

    Raises:
        InvalidArgument: there is no such target or backend, or the problem is none.
        Unsupported: no kernel serves it; the reason, and the nearest form that would work.

    >>> from openmla.problem import Problem
    >>> dense = Problem(form="dense", heads=128, d_nope=128, d_rope=64, d_v=128, total_q=4096)
    >>> chosen = plan(dense, "h200")  # no GPU is asked
    >>> chosen.backend, chosen.block.tile_rows, chosen.block.tile_keys
    ('hopper', 128, 128)
    """
    from openmla.planning.registry import BACKENDS, cached_plan

    if not isinstance(problem, AnyProblem):
        raise InvalidArgument("problem", "a Problem or an IndexProblem", repr(problem))
    if not isinstance(target, str | Target):
        raise InvalidArgument("target", "the name of a target, or a Target", repr(target))
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise InvalidArgument("backend", "one of " + ", ".join(BACKENDS), repr(backend))
    chip = target if isinstance(target, Target) else target_by_name(target)
    return cached_plan(problem, chip, backend, None)
