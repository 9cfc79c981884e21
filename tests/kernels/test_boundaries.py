"""Every Gluon kernel at the edges of its own plan, in uneven memory, and where one row is alone.

The cases follow from the plans and from the small cases of test_wild_values.py: a kernel that is
named there is tested here. Backward passes have theirs in kernels/gradients.py.
"""

from __future__ import annotations

import doctest
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kernels import boundaries
from kernels.boundaries import (
    UnevenMemory,
    at_edges,
    at_ranges,
    edges_of,
    list_lengths,
    lists_at_edges,
)
from kernels.boundaries import lone_row as alone
from kernels.judging import as_built, assert_clean, on
from kernels.test_wild_values import RUNS, PlanOf
from openmla.errors import Unsupported
from openmla.lab.testing.build import BuiltCase, build
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.memory import Memory
from openmla.lab.testing.simulate import new_results, simulated

OWN_LENGTHS = ("split", "40 requests", "one block")
"""Cases whose lengths are what they are for."""


def run_is_right(
    plan_of: PlanOf, case: Case, change: Callable[[BuiltCase], BuiltCase], schedule: str
) -> None:
    """In uneven memory full of NaN, by the definition of the same case in plain memory."""
    built = change(build(case, memory=UnevenMemory()))
    plan = plan_of(built)
    outcome, reports = simulated(
        plan, built.operands, new_results(built), seed=1, schedule=schedule
    )
    assert_clean(reports)
    verdict = judge(
        change(build(case, memory=Memory("cpu"))),
        outcome,
        fp8_sums=plan.backend == "hopper",
        fp8_weights=plan.kernel.fp8_weights or bool(plan.kernel.coarse),
    )
    assert verdict.ok, verdict.report()


EDGED = [name for name in RUNS if not any(word in name for word in OWN_LENGTHS)]


@pytest.mark.parametrize("name", EDGED)
def test_lengths_at_the_edges_of_the_plan(name: str) -> None:
    plan_of, case = RUNS[name]
    chosen = plan_of(on(case))
    edges = edges_of(chosen)

    def lists(built: BuiltCase) -> BuiltCase:
        return lists_at_edges(built, edges) if built.case.form == "sparse" else built

    run_is_right(plan_of, at_edges(case, chosen), lists, "unfair")


@pytest.mark.parametrize("name", RUNS)
def test_one_row_alone_or_all_in_uneven_memory(name: str) -> None:
    """Queries of 8 bits have no room for large ones: theirs are as they are."""
    plan_of, case = RUNS[name]
    run_is_right(plan_of, case, as_built if case.dtype == "e4m3" else alone, "random")


@pytest.mark.parametrize("name", ["hopper pages, split"])
def test_lengths_at_the_ends_of_ranges(name: str) -> None:
    plan_of, case = RUNS[name]
    chosen = at_ranges(case)
    assert chosen.k_lens == (4096, 4097, 4608, 4609)
    run_is_right(plan_of, chosen, as_built, "random")


PAGED = [name for name, (_, case) in RUNS.items() if case.is_paged and "split" not in name]


@pytest.mark.parametrize("name", PAGED)
def test_pages_of_one_row_that_lie_apart(name: str) -> None:
    """With one row the stride inside a page says nothing; who takes it for that of rows errs."""
    plan_of, case = RUNS[name]
    one = replace(case, page_size=1, q_lens=case.q_lens[:1], k_lens=case.k_lens[:1])
    if case.form == "sparse":
        one = replace(one, k_lens=case.k_lens)
    if name.startswith(("hopper dense", "blackwell dense")):
        with pytest.raises(Unsupported, match="page_size 1"):
            run_is_right(plan_of, one, as_built, "late")
        return
    run_is_right(plan_of, one, as_built, "late")


ONE_OF_EACH = [name for name in RUNS if "split" not in name]


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_one_query_one_key_and_one_page_whose_strides_are_never_used(name: str) -> None:
    """What lies between two of them may be any number, also one that no descriptor can have."""
    plan_of, case = RUNS[name]
    one = replace(case, q_lens=(1,), k_lens=(1,), spare=0)
    if name.startswith("cdna4 dense"):  # it copies to LDS by 32-bit offsets of a tile's rows
        with pytest.raises(Unsupported, match="span 2 GiB or more"):
            run_is_right(plan_of, one, as_built, "late")
        return
    run_is_right(plan_of, one, as_built, "late")


def test_examples() -> None:
    assert doctest.testmod(boundaries).failed == 0


@pytest.mark.parametrize("name", EDGED)
def test_the_edges_are_met(name: str) -> None:
    """One less than a block, as many, and one more; as many as a ring has, and more."""
    plan_of, case = RUNS[name]
    chosen = plan_of(on(case))
    edges, made = edges_of(chosen), at_edges(case, chosen)
    lengths = set(list_lengths(edges) if case.form == "sparse" else made.k_lens)
    assert edges.keys >= 16 and edges.ring >= 2
    assert {edges.keys - 1, edges.keys, edges.keys + 1, edges.keys * edges.ring + 1} <= lengths
    if case.form != "sparse":
        assert {edges.queries - 1, edges.queries, edges.queries + 1} <= set(made.q_lens)
    else:
        assert made.topk > edges.keys * edges.ring


def test_uneven_memory_has_other_strides_for_every_tensor() -> None:
    built = build(replace(RUNS["hopper dense"][1], rope="per_head"), memory=UnevenMemory())
    op: Any = built.operands
    strides = [x.stride()[:2] for x in (op.q, op.k_nope, op.k_rope, op.v)]
    assert len(set(strides)) == 4 and not any(x.is_contiguous() for x in (op.q, op.v))
