"""Calls over windows and lists, compiled and executed here: right, and the same bits under all
schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from gluon_sim.compiled import SCHEDULES
from openmla.dispatch import triton_version
from openmla.kernels.blackwell.pair.plan import FIRST_ROWS_PAIR
from openmla.kernels.launch import calls
from openmla.lab.testing.build import Outcome
from openmla.lab.testing.executed.calls import compiled_calls
from openmla.lab.testing.executed.prepare import SM_COUNT
from openmla.lab.testing.memory.poison import differences
from openmla.lab.testing.simulate import plan_on
from openmla.lab.testing.sources import SourcesCase, judged, new_results, operands
from openmla.operands import AttendOperands
from openmla.planning import Plan, target_by_name
from openmla.planning.registry import BLACKWELL

# Few tokens, and pools of a few pages: all of a pool is dequantized.
CASES = {
    "window, bf16": SourcesCase(
        kinds=("span",), formats=("bf16",), pages=(16,), first=(70, 0, 300), heads=8
    ),
    "window of DeepSeek-V4's rows": SourcesCase(kinds=("span",), pages=(16,), first=(65,), heads=8),
    "window and list": SourcesCase(
        kinds=("span", "list"), pages=(16, 2), first=(65, 0), second=(30, 260), heads=8, seed=1
    ),
    "two lists, 128 heads": SourcesCase(first=(65,), second=(1,), heads=128, sink=False, seed=2),
    "list of bf16 rows, turned back": SourcesCase(
        kinds=("list",), formats=("bf16",), pages=(16,), first=(70, 0), heads=70, turned=64, seed=3
    ),
}


def given(op: AttendOperands) -> Iterator[torch.Tensor]:
    """The tensors of a call, which no kernel may write."""
    yield op.q
    for source in op.sources:
        values = [*vars(source).values(), *vars(source.rows).values()]
        yield from (value for value in values if isinstance(value, torch.Tensor))
    if op.weights.sink is not None:
        yield op.weights.sink
    if op.turn_back is not None:
        yield from (op.turn_back.table, op.turn_back.positions)


def where_they_lie(plan: Plan) -> Plan:
    """The same over pools too large to be dequantized whole."""
    kernel = BLACKWELL.kernel_named("attend")
    config = kernel.choose(plan.problem, target_by_name("b200"))
    return replace(plan, backend="blackwell", kernel_name="attend", config=config)


def check(case: SourcesCase, schedules: int, change: Callable[[Plan], Plan] = lambda p: p) -> None:
    op = operands(case)
    results = new_results(op)
    plan = change(plan_on("b200", op, results, SM_COUNT))
    run = compiled_calls(calls(plan, op, results), "b200", given(op), results.tensors().values())
    first = None
    for schedule in SCHEDULES[:schedules]:
        assert [str(report) for report in run(schedule) if not report.ok] == []
        outcome = Outcome(*(t.clone() for t in (results.out, results.lse) if t is not None))
        first = first or outcome
        assert not differences(outcome, first), schedule
    assert first is not None
    verdict = judged(op, first)
    assert verdict.status == "right", verdict.message


@pytest.mark.executed
@pytest.mark.parametrize("name", CASES)
def test_windows_and_lists(name: str) -> None:
    if triton_version() < FIRST_ROWS_PAIR:
        pytest.skip("this Triton compiles no pair of CTAs")
    check(CASES[name], len(SCHEDULES))


LARGE = {
    "window": SourcesCase(kinds=("span",), pages=(16,), first=(65, 200), heads=8),
    "window and list": SourcesCase(
        kinds=("span", "list"), pages=(16, 2), first=(65, 0), second=(30, 140), heads=8, seed=1
    ),
    "two lists, 70 heads": SourcesCase(first=(70,), second=(65,), heads=70, seed=2),
    "two lists, turned back": SourcesCase(first=(70, 0), second=(65, 0), turned=64, seed=3),
}


@pytest.mark.executed
@pytest.mark.parametrize("name", LARGE)
def test_rows_of_large_pools(name: str) -> None:
    if triton_version()[:2] == (3, 8):
        pytest.skip("this Triton does not compile one CTA")
    check(LARGE[name], len(SCHEDULES), where_they_lie)
