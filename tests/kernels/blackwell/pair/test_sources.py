"""mla_attend on Blackwell, on the simulator: lists and spans, one or two sources in one softmax."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import openmla.kernels.blackwell.pair.launch as launcher
from gluon_sim import Kind, Limits, intercept
from kernels.blackwell.pair.test_kernel import ONE_PAIR, SEEDS
from kernels.blackwell.sparse.defects import SparseDefect, load_defect
from kernels.judging import assert_clean
from kernels.mutants import RUNS, assert_found
from openmla import reference
from openmla.kernels.blackwell.pair.plan import FIRST_ROWS_PAIR, MOST_JOINED
from openmla.kernels.triton_version import TRITON
from openmla.lab.testing.build import Outcome
from openmla.lab.testing.compare import compare
from openmla.lab.testing.memory.poison import differences
from openmla.lab.testing.simulate import plan_on, simulated
from openmla.operands import AttendOperands, SparseOperands
from openmla.planning import NEWEST_TRITON, Plan, cached_plan, target_by_name
from openmla.problem import Problem, RowSource
from openmla.sources import Listed
from two_sources import Setup, new_results, operands

pair = pytest.mark.skipif(TRITON < FIRST_ROWS_PAIR, reason="no pairs in this Triton")
# A step has 256 keys: tokens end at its edges, and a step begins with the second source.
EDGES = {"first": (0, 1, 255, 256, 257, 0), "second": (65, 0, 1, 300, 256, 0)}
SETUPS = {
    "two lists": Setup(**EDGES),
    "two lists without lengths, 70 heads": Setup(
        lengths=False, heads=70, first=(1, 128, 256), second=(130, 64, 0), pages=(256, 64)
    ),
    "span and list": Setup(**EDGES, kinds=("span", "list"), pages=(64, 2), seed=1),
    "list and span": Setup(kinds=("list", "span"), pages=(2, 64), sink=False, seed=2),
    "two spans": Setup(**EDGES, kinds=("span", "span"), pages=(16, 2), seed=3),
    "span": Setup(kinds=("span",), pages=(64,), first=(65, 0, 255, 0, 300, 256), seed=4),
    "bf16 span and V4's list": Setup(
        kinds=("span", "list"), formats=("bf16", "fp8_584"), pages=(16, 2), seed=5
    ),
    "V4's list and bf16 list": Setup(formats=("fp8_584", "bf16"), seed=6),
    "span and list, turned back": Setup(
        kinds=("span", "list"), pages=(64, 2), heads=70, turned=64, seed=11
    ),
    "bf16 list, turned back": Setup(
        kinds=("list",), formats=("bf16",), first=(65, 0, 3, 130), turned=64, seed=12
    ),
    "span, bf16": Setup(
        kinds=("span",), formats=("bf16",), pages=(24,), first=(65, 0, 63, 256, 270, 1), seed=9
    ),
}
QUICK = ("span and list", "span", "V4's list and bf16 list")
QUICK += ("span and list, turned back", "bf16 list, turned back")


def plan_of(op: AttendOperands | SparseOperands) -> Plan:
    """One pair takes all tokens in turn."""
    found = plan_on("b200", op, new_results(op))
    assert found.kernel_name == "attend_pair"
    return replace(found, target=ONE_PAIR)


def attend(op: AttendOperands | SparseOperands, **options: object) -> Outcome:
    outcome, reports = simulated(plan_of(op), op, new_results(op), **options)
    assert_clean(reports)
    return outcome


def right(op: AttendOperands | SparseOperands, outcome: Outcome) -> bool:
    return compare(outcome, reference.of(op), columns=512).ok


@pair
@pytest.mark.compile
@pytest.mark.parametrize("name", SETUPS if SEEDS else QUICK)
def test_right_clean_and_deaf_to_poison(name: str) -> None:
    op = operands(SETUPS[name])
    outcome = attend(op, schedule="early")
    assert right(op, outcome)
    assert not differences(attend(operands(SETUPS[name], poisoned=False), schedule="late"), outcome)
    for seed in range(SEEDS):
        assert not differences(attend(op, seed=seed), outcome)


@pair
@pytest.mark.compile
def test_one_list_of_v4_rows_is_a_sparse_call() -> None:
    op = operands(Setup(kinds=("list",), first=(65, 0, 257)))
    (source,) = op.sources
    assert isinstance(source, Listed)
    alone = SparseOperands(op.q, source.rows, source.indices, source.lengths, 512, op.weights)
    outcome = attend(alone)
    assert right(op, outcome)


WINDOW = Problem(
    *("sparse", 64, 512, 0, 512),
    **{"kv_dtype": "fp8_584", "span": True, "table_keys": 4096, "page_size": 64},
    total_q=4096,
    total_k=4096,
    second=RowSource(kv_dtype="fp8_584", page_size=64, topk=512, total_k=1024),
)


def test_what_decides_is_how_many_rows_the_pools_have() -> None:
    """Neither the queries nor the lengths of lists: other kernels give other bits."""
    b200 = target_by_name("b200")
    most = MOST_JOINED - WINDOW.total_k
    for total_q in (1, 4096):
        for rows, kernel in ((most, "attend_pair"), (most + 1, "attend")):
            second = replace(WINDOW.second, total_k=rows)  # type: ignore[type-var]
            problem = replace(WINDOW, total_q=total_q, second=second)
            for backend in ("auto", "blackwell"):
                chosen = cached_plan(problem, b200, backend, NEWEST_TRITON)
                assert (chosen.backend, chosen.kernel_name) == ("blackwell", kernel)
    beside_bf16 = replace(problem, kv_dtype="bf16", v_dtype="bf16", rope_dtype="bf16")
    chosen = cached_plan(beside_bf16, b200, "auto", NEWEST_TRITON)
    assert chosen.backend == "portable"
    assert "are dequantized whole in every call" in chosen.passed_over[0]
    assert cached_plan(beside_bf16, b200, "blackwell", NEWEST_TRITON).kernel_name == "attend_pair"
    assert "in one workspace" in cached_plan(WINDOW, b200, "auto", NEWEST_TRITON).explain()


def defect(name: str, old: str, new: str, file: str, case: str = "span and list") -> SparseDefect:
    """Only the numbers are wrong."""
    return SparseDefect(name, None, file, old, new, case)


DEFECTS = [
    defect(
        "a position whose page is none of the pool's counts",
        "there = there & (page < keys.pool.rows // TABLE)",
        "there = there & (page * TABLE < keys.pool.rows)",
        "sparse.rows",
        "span",
    ),
    defect(
        "a span begins with position 0",
        "first = gl.where(there, first, 0)",
        "first *= 0",
        "sparse.rows",
    ),
    defect(
        "every token has the span of the first",
        "spans.request + token",
        "spans.request",
        "sparse.rows",
    ),
    defect(
        "a request that is not there is the first",
        "there = (line >= 0) & (line < lists.spans.requests) & (first < stop)\n",
        "line = gl.maximum(line, 0)\n"
        "        there = (line < lists.spans.requests) & (first < stop)\n",
        "sparse.rows",
        "span",
    ),
    defect(
        "a request past the last is the first",
        "there = (line >= 0) & (line < lists.spans.requests) & (first < stop)\n",
        "line = gl.where(line < lists.spans.requests, line, 0)\n"
        "        there = (line >= 0) & (first < stop)\n",
        "sparse.rows",
        "span",
    ),
    defect(
        "the second source begins a step late",
        "own.first - own.after * KEYS",
        "own.first - own.after * KEYS + KEYS",
        "items",
    ),
    defect(
        "keys of the first source are its own but for the last step",
        "rows = descriptor_rows(keys, first + k * KEYS + offset",
        "rows = descriptor_rows(keys, first + offset",
        "items",
        "two lists",
    ),
    defect(
        "keys of the second source count like those of the first",
        "_, ok = listed(more, start + k * KEYS, KEYS, LAYOUT, INDEXING.second)",
        "_, ok = listed(keys, first + k * KEYS, KEYS, LAYOUT, INDEXING)",
        "items",
        "two lists",
    ),
    defect(
        "the steps of the first source are counted only",
        "gl.maximum(after + whole_steps(more.length - more.first, KEYS), 1)",
        "gl.maximum(after, 1)",
        "items",
    ),
    defect("the second pool lies over the first", "row += pool.base", "row += 0", "sparse.rows"),
    defect(
        "pools are joined one row late",
        'arguments["second_base"] = bases[1]',
        'arguments["second_base"] = bases[1] - 1',
        "launch",
    ),
]


def run_on(module: object, setup: Setup, schedule: str, seed: int) -> tuple[set[Kind], bool]:
    """What the simulator found, and whether the numbers are right."""
    op = operands(setup)
    results = new_results(op)
    options = {"schedule": schedule, "seed": seed, "limits": Limits(steps=20_000)}
    with intercept(outputs=results.tensors(), **options) as reports:
        for call in module.calls(plan_of(op), op, results):  # type: ignore[attr-defined]
            call.run()
    return {kind for report in reports for kind in report.kinds()}, right(op, results)


@pair
@pytest.mark.compile
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_defect_is_found(defect: SparseDefect, tmp_path: Path) -> None:
    mutant = load_defect(defect, tmp_path, "pair")
    assert_found(defect.kind, partial(run_on, mutant, SETUPS[defect.case]))


@pair
@pytest.mark.compile
@pytest.mark.parametrize("name", sorted({d.case for d in DEFECTS}))
def test_the_kernel_itself_is_clean_and_right(name: str) -> None:
    for schedule, seed in RUNS[:2]:
        assert run_on(launcher, SETUPS[name], schedule, seed) == (set(), True)
