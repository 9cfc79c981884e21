"""mla_attend on CDNA4, on the simulator: lists and spans, one or two sources in one softmax."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

import openmla.kernels.cdna4 as package
import openmla.kernels.cdna4.sparse.launch as launcher
from gluon_sim import Kind, Limits, intercept
from kernels.judging import assert_clean
from kernels.mutants import RUNS, assert_found, controls, load_mutant, once
from openmla import reference
from openmla.lab.testing.build import Outcome
from openmla.lab.testing.compare import compare
from openmla.lab.testing.memory.poison import differences
from openmla.lab.testing.simulate import plan_on, simulated
from openmla.operands import AttendOperands, SparseOperands
from openmla.planning import NEWEST_TRITON, cached_plan, target_by_name
from openmla.sources import Listed
from two_sources import Setup, new_results, one_token, operands

# A block has 64 places, and the ring two slots.
EDGES = {"first": (0, 1, 63, 64, 65, 128, 129), "second": (65, 0, 1, 200, 64, 63, 0)}
SETUPS = {
    "two lists": Setup(**EDGES),
    "two lists without lengths, 70 heads": Setup(
        lengths=False, heads=70, first=(1, 64, 130), second=(130, 64, 0), pages=(256, 64)
    ),
    "span and list": Setup(**EDGES, kinds=("span", "list"), pages=(64, 2), seed=1),
    "list and span": Setup(kinds=("list", "span"), pages=(2, 64), sink=False, seed=2),
    "two spans": Setup(**EDGES, kinds=("span", "span"), pages=(16, 2), scale=-0.05, seed=3),
    "span": Setup(kinds=("span",), pages=(64,), first=(65, 0, 130, 0, 200, 64), seed=4),
    "bf16 span and V4's list": Setup(
        kinds=("span", "list"), formats=("bf16", "fp8_584"), pages=(16, 2), seed=5
    ),
    "V4's list and bf16 list": Setup(formats=("fp8_584", "bf16"), seed=6),
    "span and list, turned back": Setup(
        kinds=("span", "list"), pages=(64, 2), heads=70, turned=64, seed=11
    ),
    "list, turned back": Setup(kinds=("list",), first=(65, 0, 3, 130), turned=64, seed=12),
    "span, bf16": Setup(
        kinds=("span",), formats=("bf16",), pages=(24,), first=(65, 0, 63, 128, 140, 1), seed=9
    ),
}
SEEDS = int(os.environ.get("OPENMLA_SIM_SEEDS", "1"))


def attend(op: AttendOperands | SparseOperands, **options: object) -> Outcome:
    chosen = plan_on("mi355x", op, new_results(op))
    assert chosen.backend == "cdna4"
    outcome, reports = simulated(chosen, op, new_results(op), **options)
    assert_clean(reports)
    return outcome


def right(op: AttendOperands | SparseOperands, outcome: Outcome) -> bool:
    return compare(outcome, reference.of(op), columns=512).ok


@pytest.mark.parametrize("name", SETUPS)
def test_right_clean_and_deaf_to_poison(name: str) -> None:
    op = operands(SETUPS[name])
    outcome = attend(op, schedule="early")
    assert right(op, outcome)
    assert not differences(attend(operands(SETUPS[name], poisoned=False), schedule="late"), outcome)
    for seed in range(SEEDS - 1):
        assert not differences(attend(op, seed=seed), outcome)


def test_a_token_has_the_same_bits_alone() -> None:
    op = operands(SETUPS["span and list"])
    together = attend(op)
    for token in (0, 3, 6):
        alone = attend(one_token(op, token))
        for name, rows in alone.tensors().items():
            assert torch.equal(rows[0], together.tensors()[name][token])


def test_one_list_of_v4_rows_is_a_sparse_call() -> None:
    op = operands(Setup(kinds=("list",), first=(65, 0, 130)))
    (source,) = op.sources
    assert isinstance(source, Listed)
    alone = SparseOperands(op.q, source.rows, source.indices, source.lengths, 512, op.weights)
    assert plan_on("mi355x", alone, new_results(op)).kernel_name == "sparse"
    assert right(op, attend(alone))


def test_a_source_without_rows_is_left_out() -> None:
    op = operands(SETUPS["two lists"])
    first, second = op.sources
    assert isinstance(first, Listed)
    without = replace(op, sources=(replace(first, indices=first.indices[:, :0]), second))
    assert right(without, attend(without))
    neither = replace(op, sources=tuple(replace(s, indices=s.indices[:, :0]) for s in op.sources))
    assert right(neither, attend(neither))


@pytest.mark.parametrize("second", ["fp8_656", "fp8_528_v41"])
def test_rows_that_it_does_not_serve_go_to_the_portable_kernel(second: str) -> None:
    op = operands(SETUPS["span and list"])
    problem = op.problem(new_results(op))
    assert problem.second is not None
    other = replace(problem, second=replace(problem.second, kv_dtype=second))
    chosen = cached_plan(other, target_by_name("mi355x"), "auto", NEWEST_TRITON)
    assert chosen.backend == "portable" and "kv_dtype: bf16 or fp8_584" in chosen.passed_over[0]


@dataclass(frozen=True)
class SourceDefect:
    """Replace `old` by `new` in `file`; `kind` None: only the numbers are wrong."""

    name: str
    old: str
    new: str
    file: str = "sparse.sources"
    case: str = "span and list"
    kind: Kind | None = None


DEFECTS = [
    SourceDefect(
        "a position whose page is none of the pool's counts",
        "return (at < source.places) & (number >= 0) & (number < pages)",
        "return (at < source.places) & (number < pages)",
        "sparse.rows",
        "span",
    ),
    SourceDefect(
        "a page past the last counts",
        "pages = source.rows // HOW.page_size\n",
        "pages = source.rows\n",
        "sparse.rows",
        "two spans",
    ),
    SourceDefect(
        "a span begins with the first row of its page",
        "(position(at, source) % PAGE)",
        "(at % PAGE)",
        "sparse.rows",
    ),
    SourceDefect(
        "a span's pages are those from position 0 on",
        "entry = position(at, source) // HOW.page_size",
        "entry = at // HOW.page_size",
        "sparse.rows",
        "two spans",
    ),
    SourceDefect(
        "every token has the span of the first", "spans.begin_ptr + token", "spans.begin_ptr"
    ),
    SourceDefect(
        "a request that is not there is the first",
        "there = (request >= 0) & (request < spans.requests)",
        "there = (request < spans.requests)",
        case="span",
    ),
    SourceDefect(
        "a request past the last is the first",
        "there = (request >= 0) & (request < spans.requests)",
        "request = gl.where(request < spans.requests, request, 0)\n    there = (request >= 0)",
        case="span",
    ),
    SourceDefect(
        "a span ends past its table",
        "stop = gl.minimum(gl.load(spans.end_ptr + token), spans.most_keys)",
        "stop = gl.minimum(gl.load(spans.end_ptr + token), spans.most_keys + 1)",
        case="two spans",
    ),
    SourceDefect(
        "the second source forgets the first",
        "    visits = (",
        "    state = OnlineSoftmax(state.output, state.shift, state.row_sum * 0.0)\n    visits = (",
    ),
    SourceDefect(
        "the second source is read with the scales of the first",
        "scales=PagedRows(second_scale_ptr,",
        "scales=PagedRows(scale_ptr,",
        case="two lists",
    ),
    SourceDefect(
        "the wait leaves one group too many",
        "            async_copy.wait_group(1)\n",
        "            async_copy.wait_group(2)\n",
        case="span, bf16",
        kind=Kind.RACE,
    ),
    SourceDefect(
        "copies of the first source are in flight when the second begins",
        "    if not WIDENED:\n        async_copy.wait_group(0)\n    return",
        "    return",
        case="bf16 span and V4's list",
        kind=Kind.RACE,
    ),
    SourceDefect(
        "the scale of a chunk is that of the one before",
        "(word >> (c % 4 * 8)) & 255",
        "(word >> (c // 2 * 2 % 4 * 8)) & 255",
        "sparse.rows",
    ),
    SourceDefect(
        "the last chunks have the scales of the first",
        "word = fetched.low if c < 4 else fetched.high",
        "word = fetched.low",
        "sparse.rows",
    ),
    SourceDefect(
        "the tail is a chunk too early",
        "latent.slice(V4_CHUNKS * V4_CHUNK, V4_CHUNK, 1).store(fetched.tail)",
        "latent.slice(V4_CHUNKS * V4_CHUNK - V4_CHUNK, V4_CHUNK, 1).store(fetched.tail)",
        "sparse.rows",
        kind=Kind.UNWRITTEN,
    ),
]


def run_on(module: object, setup: Setup, schedule: str, seed: int) -> tuple[set[Kind], bool]:
    """What the simulator found, and whether the numbers are right."""
    op = operands(setup)
    results = new_results(op)
    chosen = plan_on("mi355x", op, results)
    options = {"schedule": schedule, "seed": seed, "limits": Limits(steps=60_000)}
    with intercept(outputs=results.tensors(), **options) as reports:
        for call in module.calls(chosen, op, results):  # type: ignore[attr-defined]
            call.run()
    return {kind for report in reports for kind in report.kinds()}, right(op, results)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_defect_is_found(defect: SourceDefect, tmp_path: Path) -> None:
    edit = once(defect.old, defect.new)
    mutant = load_mutant(package, defect.file, edit, "sparse.launch", tmp_path)
    assert_found(defect.kind, partial(run_on, mutant, SETUPS[defect.case]))


@pytest.mark.parametrize("name", controls((d.case for d in DEFECTS), SETUPS))
def test_the_kernel_itself_is_clean_and_right(name: str) -> None:
    for schedule, seed in RUNS[:2]:
        assert run_on(launcher, SETUPS[name], schedule, seed) == (set(), True)
