"""DeepSeek-V4's rows where they lie, on the simulator: lists and spans, one or two sources, over
pools that are too large to be dequantized whole."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import openmla.kernels.blackwell.sparse.launch as launcher
from gluon_sim import Kind, Limits, intercept
from kernels.blackwell.sparse.defects import SparseDefect, load_defect
from kernels.blackwell.sparse.test_kernel import SEEDS
from kernels.judging import assert_clean
from kernels.mutants import RUNS, assert_found, controls
from openmla import reference
from openmla.kernels.blackwell.pair.plan import MOST_JOINED
from openmla.lab.testing.build import Outcome
from openmla.lab.testing.compare import compare
from openmla.lab.testing.memory.poison import differences
from openmla.lab.testing.simulate import plan_on, simulated
from openmla.operands import AttendOperands, SparseOperands
from openmla.planning import Plan, cached_plan, target_by_name
from openmla.planning.registry import BLACKWELL
from openmla.problem import Problem, RowSource
from openmla.sources import Listed
from two_sources import Setup, new_results, operands

# A step has 64 keys: tokens end at its edges, and a step begins with the second source.
EDGES = {"first": (0, 1, 63, 64, 65, 0), "second": (65, 0, 1, 130, 64, 0)}
SETUPS = {
    "two lists": Setup(**EDGES),
    "two lists without lengths, 70 heads": Setup(
        lengths=False, heads=70, first=(1, 128, 64), second=(130, 64, 0), pages=(256, 64)
    ),
    "span and list": Setup(**EDGES, kinds=("span", "list"), pages=(64, 2), seed=1),
    "list and span": Setup(kinds=("list", "span"), pages=(2, 64), sink=False, seed=2),
    "two spans": Setup(**EDGES, kinds=("span", "span"), pages=(16, 2), seed=3),
    "span": Setup(kinds=("span",), pages=(64,), first=(65, 0, 255, 0, 300, 256), seed=4),
    "six steps of each": Setup(first=(330,), second=(333,), seed=5),
    "span and list, turned back": Setup(
        kinds=("span", "list"), pages=(64, 2), heads=70, turned=64, seed=11
    ),
    "list, turned back": Setup(kinds=("list",), first=(65, 0, 3, 130), turned=64, seed=12),
}
KERNEL = BLACKWELL.kernel_named("attend")
B200 = target_by_name("b200")


def plan_of(op: AttendOperands | SparseOperands) -> Plan:
    """That of a large pool, whatever the pool."""
    found = plan_on("b200", op, new_results(op))
    assert not KERNEL.serves.why_not(found.problem)
    config = KERNEL.choose(found.problem, B200)
    return replace(found, backend="blackwell", kernel_name=KERNEL.name, config=config)


def attend(op: AttendOperands | SparseOperands, **options: object) -> Outcome:
    outcome, reports = simulated(plan_of(op), op, new_results(op), **options)
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
    for seed in range(SEEDS):
        assert not differences(attend(op, seed=seed), outcome)


def test_one_list_is_a_sparse_call() -> None:
    op = operands(Setup(kinds=("list",), first=(65, 0, 257)))
    (source,) = op.sources
    assert isinstance(source, Listed)
    alone = SparseOperands(op.q, source.rows, source.indices, source.lengths, 512, op.weights)
    assert right(op, attend(alone))


@pytest.mark.parametrize("empty", [0, 1])
def test_a_source_without_entries_is_left_out(empty: int) -> None:
    """A descriptor cannot describe rows that are not there."""
    op = operands(Setup(**EDGES))
    sources = list(op.sources)
    source = sources[empty]
    assert isinstance(source, Listed)
    sources[empty] = replace(source, indices=source.indices[:, :0])
    op = replace(op, sources=tuple(sources))
    assert right(op, attend(op))


WINDOW = Problem(
    *("sparse", 64, 512, 0, 512),
    **{"kv_dtype": "fp8_584", "v_dtype": "fp8_584", "rope_dtype": "fp8_584"},
    **{"span": True, "table_keys": 4096, "page_size": 64, "rope": "none"},
    total_q=4096,
    total_k=MOST_JOINED,
    second=RowSource(kv_dtype="fp8_584", page_size=64, topk=512, total_k=1 << 28),
)


@pytest.mark.parametrize("triton", [(3, 6), (3, 7), (3, 9)])
def test_large_pools_run_on_the_chips_own_kernel(triton: tuple[int, int]) -> None:
    """Of any size; and whatever the queries, since other kernels give other bits."""
    for total_q in (1, 4096):
        for problem in (WINDOW, replace(WINDOW, second=None, total_k=1 << 28)):
            chosen = cached_plan(replace(problem, total_q=total_q), B200, "auto", triton)
            assert (chosen.backend, chosen.kernel_name) == ("blackwell", "attend")


def test_bf16_rows_beside_large_pools_go_to_the_portable_kernel() -> None:
    mixed = replace(WINDOW, kv_dtype="bf16", v_dtype="bf16", rope_dtype="bf16")
    assert cached_plan(mixed, B200, "auto", (3, 9)).backend == "portable"


def defect(
    name: str, old: str, new: str, file: str, case: str = "span and list", kind: Kind | None = None
) -> SparseDefect:
    return SparseDefect(name, kind, file, old, new, case)


DEFECTS = [
    defect(
        "an exponent is a scale one octave off",
        "exponent << 23",
        "(exponent + 1) << 23",
        "rows_fp8",
    ),
    defect(
        "K's 16-bit columns are gathered from its scales",
        "plain_column=plain.offset // ELEMENT",
        "plain_column=plain.offset // ELEMENT - 1",
        "launch",
    ),
    defect(
        "V's second half has the 16-bit columns of the first",
        "tile = wide.index(half * (RAW + PLAIN) + RAW)",
        "tile = wide.index(RAW)",
        "rows_fp8",
        kind=Kind.RACE,
    ),
    defect(
        "V's second half is dequantized from a raw tile further on",
        "at = 2 * ATOMS * PER_ATOM + HALF * RAW + g",
        "at = 2 * ATOMS * PER_ATOM + HALF * (RAW + 1) + g",
        "rows_fp8",
        "span",
    ),
    defect(
        "the second source has the scales of the first",
        "store_scales(sources.second.scales, index, ok, tile, SECOND)",
        "store_scales(sources.scales, index, ok, tile, CACHE)",
        "rows_fp8",
        "two lists",
    ),
    defect(
        "the second source's 16-bit columns are the first's",
        "tma.async_gather(sources.second.plain, rows",
        "tma.async_gather(sources.plain, rows",
        "rows_fp8",
        "two lists",
    ),
    defect(
        "K of the second source is gathered from the first pool",
        "gather_tiles(sources.second.raw, rows, ready",
        "gather_tiles(sources.k, rows, ready",
        "rows_fp8",
        "two lists",
    ),
    defect(
        "V of the second source is gathered from the first pool",
        "gather_tiles(sources.second.raw, rows, done",
        "gather_tiles(sources.v, rows, done",
        "rows_fp8",
        "two lists",
    ),
    defect(
        "16-bit columns of V are not announced",
        "2 * (RAW + 2 * PLAIN) * KEYS * GATHERED",
        "2 * RAW * KEYS * GATHERED",
        "rows_fp8",
        kind=Kind.BYTES,
    ),
    defect(
        "the second source begins a step late",
        "(k - second.after) * HOW.b_topk + offset",
        "(k - second.after + 1) * HOW.b_topk + offset",
        "rows",
    ),
    defect(
        "the steps of the first source are counted only",
        "gl.maximum(after + whole_steps(more.length - more.first, B_TOPK), 1)",
        "gl.maximum(after, 1)",
        "kernel",
    ),
    defect(
        "keys of the second source count like those of the first",
        "_, ok = second_listed(keys.second, k, 0, HOW.b_topk, LAYOUT, HOW)",
        "_, ok = listed(keys, k * HOW.b_topk, HOW.b_topk, LAYOUT, INDEXING)",
        "rows",
        "two lists",
    ),
    defect(
        "a span begins with position 0",
        "first=more.first,",
        "first=more.first * 0,",
        "kernel",
        "list and span",
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


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_defect_is_found(defect: SparseDefect, tmp_path: Path) -> None:
    mutant = load_defect(defect, tmp_path)
    assert_found(defect.kind, partial(run_on, mutant, SETUPS[defect.case]))


@pytest.mark.parametrize("name", controls((d.case for d in DEFECTS), SETUPS))
def test_the_kernel_itself_is_clean_and_right(name: str) -> None:
    for schedule, seed in RUNS[:2]:
        assert run_on(launcher, SETUPS[name], schedule, seed) == (set(), True)
