"""From a problem and a chip to a Plan: the first kernel, in the families' order, that serves it.

One function and one cache for both questions: what could run (no Triton version given), and what
runs with a version of Triton, which leaves out kernels that are not there yet.
"""

from functools import lru_cache
from typing import Any

from openmla.errors import Unsupported
from openmla.planning.config import Plan
from openmla.planning.family import Family
from openmla.planning.registry import FAMILIES, families_of
from openmla.planning.target import Target
from openmla.problem import Problem

NEWEST_TRITON = (3, 9)
"""The newest version that kernels are compiled with."""


def choose_plan(
    problem: Problem, target: Target, backend: str, triton: tuple[int, ...] | None
) -> Plan:
    """The plan; raises Unsupported with every family's reason and the nearest supported form."""
    nearest = _nearest(problem, len(families_of(target)), backend)
    name, config, passed_over = first_that_serves(
        problem, target, backend, triton, FAMILIES, nearest
    )
    return Plan(problem, target.name, name, config, passed_over)


def first_that_serves(
    problem: Any, target: Target, backend: str, triton: tuple[int, ...] | None,
    table: tuple[Family, ...], nearest: str,
) -> tuple[str, Any, tuple[str, ...]]:  # fmt: skip
    """Of a table of families: the name of the one that serves, its config, and who was passed over.

    `nearest` is what to suggest when none does.
    """
    families = [f for f in table if f.name != "reference" and f.runs_on(target)]
    names = [family.name for family in families]
    if backend not in ("auto", "reference", *names):
        raise Unsupported(
            f"backend {backend!r} has no {problem.form} kernel for target {target.name!r}",
            nearest=f"backend 'auto' (there: {', '.join(names)})",
        )
    passed_over = [
        f"{family.name}: {family.near_misses[target.arch]}"
        for family in table
        if target.arch in family.near_misses
    ]
    for family in families if backend == "auto" else [f for f in table if f.name == backend]:
        choice = family.choose(problem, target, triton, named=backend != "auto")
        if not choice.reason:
            return family.name, choice.config, (*passed_over, *choice.passed_over)
        passed_over.append(choice.reason)
    raise Unsupported("; ".join(passed_over), nearest=nearest)


cached_plan = lru_cache(maxsize=4096)(choose_plan)


def _nearest(problem: Problem, families: int, backend: str) -> str:
    """What to change so that something would serve the problem."""
    if backend != "auto" and families > 1:
        return "backend='auto', which may take another kernel family"
    dtypes = {problem.q_dtype, problem.kv_dtype, problem.v_dtype, problem.rope_dtype}
    if dtypes != {"bf16"}:
        return "bf16 tensors and a bf16 cache, or backend='reference'"
    return "the dims of a known model (openmla.planning.models), or backend='reference'"
