"""From a problem and a chip to a Plan: the first kernel, in the families' order, that serves it.

One function and one cache for both questions: what could run (no Triton version given), and what
runs with a version of Triton, which leaves out kernels that are not there yet.
"""

from __future__ import annotations

from functools import lru_cache

from openmla.errors import Unsupported
from openmla.planning.config import Plan
from openmla.planning.registry import FAMILIES, families_of, family_named
from openmla.planning.target import Target
from openmla.problem import Problem

NEWEST_TRITON = (3, 9)
"""The newest version that kernels are compiled with."""


def choose_plan(
    problem: Problem, target: Target, backend: str, triton: tuple[int, ...] | None
) -> Plan:
    """The plan; raises Unsupported with every family's reason and the nearest supported form."""
    families = families_of(target)
    names = [family.name for family in families]
    if backend not in ("auto", "reference", *names):
        raise Unsupported(
            f"backend {backend!r} has no {problem.form} kernel for target {target.name!r}",
            nearest=f"backend 'auto' (there: {', '.join(names)})",
        )
    passed_over = [
        f"{family.name}: {family.near_misses[target.arch]}"
        for family in FAMILIES
        if target.arch in family.near_misses
    ]
    for family in families if backend == "auto" else (family_named(backend),):
        choice = family.choose(problem, target, triton, named=backend != "auto")
        if not choice.reason:
            kept = (*passed_over, *choice.passed_over)
            return Plan(problem, target.name, family.name, choice.config, kept)
        passed_over.append(choice.reason)
    raise Unsupported("; ".join(passed_over), nearest=_nearest(problem, len(families), backend))


cached_plan = lru_cache(maxsize=4096)(choose_plan)


def _nearest(problem: Problem, families: int, backend: str) -> str:
    """What to change so that something would serve the problem."""
    if backend != "auto" and families > 1:
        return "backend='auto', which may take another kernel family"
    dtypes = {problem.q_dtype, problem.kv_dtype, problem.v_dtype, problem.rope_dtype}
    if dtypes != {"bf16"}:
        return "bf16 tensors and a bf16 cache, or backend='reference'"
    return "the dims of a known model (openmla.planning.models), or backend='reference'"
