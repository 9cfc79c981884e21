"""Results turned back on Hopper, on the simulator: in one launch, in three, over pools that are
dequantized before; and defects that are found there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gluon_sim import Kind
from kernels.hopper.latent.defect import SparseDefect
from kernels.hopper.latent.sources_defect import SourcesCase
from kernels.judging import assert_clean
from openmla import TurnBack, reference
from openmla.kernels.hopper.few.plan import WIDTHS
from openmla.lab.testing.build import Outcome
from openmla.lab.testing.compare import compare
from openmla.lab.testing.memory.poison import differences
from openmla.lab.testing.simulate import plan_on, simulated
from openmla.operands import AttendOperands
from openmla.planning import Plan, plan
from openmla.problem import Problem, RowSource
from two_sources import Setup, new_results, one_token, operands, read_by

# Tokens 3 and 7 have positions that the table does not have, and some see no row.
SETUPS = {
    "span and list, 70 heads": Setup(
        kinds=("span", "list"), pages=(64, 2), heads=70, turned=64, seed=1
    ),
    "two lists without lengths": Setup(
        lengths=False, first=(1, 128, 65, 3), second=(130, 64, 0, 2), sink=False, turned=64
    ),
    "one list": Setup(kinds=("list",), first=(1, 65, 0, 130, 64), heads=1, turned=64, seed=2),
    "bf16 span": Setup(
        kinds=("span",), formats=("bf16",), first=(65, 0, 63, 64, 130, 1), turned=64, seed=3
    ),
    "V4.1": Setup(
        kinds=("span", "list"),
        formats=("fp8_528_v41", "fp4_288"),
        first=(65, 0, 3, 9),
        second=(20, 0, 66, 1),
        pages=(32, 64),
        turned=64,
        seed=4,
    ),
}
FEW = Setup(first=(100, 0, 65, 128), second=(210, 0, 130, 200), turned=64)
FEW_SETUPS = {
    "32 columns": FEW,
    "32 columns, spans": replace(FEW, kinds=("span", "span"), pages=(64, 2), heads=70, seed=1),
    "one list": replace(FEW, kinds=("list",), first=(300, 0, 1, 257), seed=2),
}


def attend(op: AttendOperands, chosen: Plan | None = None, **options: Any) -> Outcome:
    """In one launch that reads rows as they lie, where they can be, unless planned otherwise."""
    if chosen is None:
        chosen = read_by(plan_on("h200", op, new_results(op), 2), "in_kernel")
        assert chosen.kernel_name == "attend" and chosen.variant.few is None
    outcome, reports = simulated(chosen, op, new_results(op), **options)
    assert_clean(reports)
    return outcome


def few_plan(op: AttendOperands, width: int = 32) -> Plan:
    """In three launches, with so many columns to a program of the last."""
    found = plan_on("h200", op, new_results(op))
    few = found.variant.few
    assert few is not None
    return replace(found, config=replace(found.config, few=replace(few, width=width)))


def assert_right(op: AttendOperands, outcome: Outcome) -> None:
    verdict = compare(outcome, reference.of(op), columns=512)
    assert verdict.ok, verdict.report()


@pytest.mark.parametrize("name", SETUPS)
def test_right_and_deaf_to_poison(name: str) -> None:
    """Lines of the table that no query names are NaN, and so is what lies around it."""
    op = operands(SETUPS[name])
    outcome = attend(op, seed=1, schedule="unfair")
    assert_right(op, outcome)
    assert not differences(attend(operands(SETUPS[name], poisoned=False)), outcome)
    empty = reference.of(op).keys == 0
    assert bool(empty.any()) == (name != "two lists without lengths")


@pytest.mark.parametrize(
    "name",
    [
        name if name == "one list" else pytest.param(name, marks=pytest.mark.long)
        for name in FEW_SETUPS
    ],
)
def test_three_launches_have_the_bits_of_one(name: str) -> None:
    op = operands(FEW_SETUPS[name])
    few = attend(op, few_plan(op), seed=1, schedule="unfair")
    assert_right(op, few)
    assert not differences(attend(operands(FEW_SETUPS[name], poisoned=False)), few)


@pytest.mark.parametrize("width", [w for w in WIDTHS if w > 32])
def test_whatever_columns_a_program_has(width: int) -> None:
    """64 turn in a program of their own; of 128, the last half does."""
    op = operands(replace(FEW, first=(100,), second=(210,)))
    assert not differences(attend(op, few_plan(op, width)), attend(op))


def test_pools_that_are_dequantized_once_have_the_bits_of_one_launch() -> None:
    op = operands(SETUPS["span and list, 70 heads"])
    once_read = read_by(plan_on("h200", op, new_results(op), 2), "whole")
    outcome, reports = simulated(once_read, op, new_results(op), seed=1, schedule="unfair")
    assert_clean(reports)
    assert len(reports) == 3 and not differences(attend(op), outcome)


def test_bits_of_a_row_are_its_own() -> None:
    op = operands(SETUPS["span and list, 70 heads"])
    whole = attend(op)
    for token in (1, 3, 5):
        here = slice(token, token + 1)
        assert whole.lse is not None
        alone = Outcome(whole.out[here], whole.lse[here])
        assert not differences(attend(one_token(op, token)), alone)


def test_only_the_last_columns_differ_from_a_call_that_turns_nothing() -> None:
    op = operands(SETUPS["span and list, 70 heads"])
    still, turned = attend(replace(op, turn_back=None)), attend(op)
    assert still.lse is not None and turned.lse is not None
    assert torch.equal(still.lse, turned.lse)
    assert torch.equal(still.out[..., :448], turned.out[..., :448])
    assert not torch.equal(still.out[1], turned.out[1])
    assert torch.equal(still.out[3], turned.out[3])  # its position is none of the table's


def test_rows_without_keys_stay_plus_zero() -> None:
    """Also where angles are NaN, or turn zeros to -0."""
    op = operands(replace(SETUPS["one list"], first=(0, 0, 5)))
    for value in (-1.0, torch.nan):
        turn = TurnBack(torch.full((2, 64), value), torch.zeros(3).int())
        out = attend(replace(op, turn_back=turn)).out
        assert not bool(out[1].view(torch.int16).any())


ENTRIES = RowSource(kv_dtype="fp8_584", page_size=64, topk=512, total_k=10**6)
V4 = Problem(
    *("sparse", 64, 512, 0, 512),
    kv_dtype="fp8_584",
    page_size=64,
    span=True,
    table_keys=16384,
    total_q=2048,
    total_k=10**6,
    second=ENTRIES,
    turned_back=64,
)


def test_what_is_served() -> None:
    for problem in (V4, replace(V4, second=None), replace(V4, span=False, topk=128, second=None)):
        chosen = plan(problem, "h200")
        assert (chosen.backend, chosen.kernel_name) == ("hopper", "attend")
        assert Plan.from_json(chosen.to_json()) == chosen
    other = plan(replace(V4, turned_back=32), "h200")
    assert other.backend == "portable"
    assert "turned_back 32: 0 or 64 are served" in " ".join(other.passed_over)


# Defects.

EPILOGUE, VALUES, TURNING = "latent.epilogue", "few.values", "turning"
CASES = {
    "one launch": Setup(
        kinds=("list",), first=(65, 0, 3, 130, 9), heads=3, pages=(64,), turned=64, seed=4
    ),
    "few": replace(FEW, heads=3, seed=5),
}


def wrong(name: str, file: str, old: str, new: str, case: str) -> SparseDefect:
    """Only the numbers are wrong."""
    return SparseDefect(name, None, file, old, new, case)


def outside(name: str, file: str, old: str, new: str, case: str) -> SparseDefect:
    """Angles are read where the table has none."""
    return SparseDefect(name, Kind.BOUNDS, file, old, new, case)


DEFECTS = [
    wrong(
        "turned on", TURNING, "gl.fma(a, cos, b * sin)", "gl.fma(a, cos, -(b * sin))", "one launch"
    ),
    wrong("a pair is no rotation", TURNING, "-(a * sin)", "a * sin", "few"),
    wrong(
        "sines lie where cosines do", TURNING, "line + (TURNED // 2) + pair", "line + pair", "few"
    ),
    wrong(
        "the first token's position", TURNING, "angles.positions + token", "angles.positions", "few"
    ),
    outside("positions are not checked", TURNING, "& (position < angles.lines)", "", "one launch"),
    outside("negative positions turn", TURNING, "(position >= 0) & (position", "(position", "few"),
    wrong("lines lie end to end", TURNING, "* angles.stride", "* TURNED", "one launch"),
    wrong("all columns turn", EPILOGUE, "if FIRST >= STILL:", "if FIRST >= 0:", "one launch"),
    wrong("nothing turns", EPILOGUE, "if FIRST >= STILL:", "if FIRST > STILL:", "one launch"),
    wrong(
        "earlier columns turn",
        EPILOGUE,
        "+ O.shape[1] - PART",
        "+ O.shape[1] - 2 * PART",
        "one launch",
    ),
    wrong(
        "empty rows turn",
        EPILOGUE,
        "gl.where(factors == 0.0, 0.0, result).to",
        "result.to",
        "one launch",
    ),
    wrong(
        "columns of a pair are exchanged",
        EPILOGUE,
        "a, b = gl.split(gl.reshape(result, [64, PART // 2, 2]))",
        "b, a = gl.split(gl.reshape(result, [64, PART // 2, 2]))",
        "one launch",
    ),
    wrong(
        "the angles of columns 0 …", TURNING, "(first - (D_V - TURNED)) // 2", "first // 2", "few"
    ),
    wrong("nothing turns, few", VALUES, "> D_V - TURNED:", "> D_V:", "few"),
]


def case_of(name: str) -> SourcesCase:
    """A case by its name."""
    return SourcesCase(CASES[name], is_few=name == "few")


@pytest.mark.seeded
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_defect_is_found(defect: SparseDefect, tmp_path: Path) -> None:
    case_of(defect.case).assert_found(defect, tmp_path)


@pytest.mark.seeded
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_themselves_are_clean_and_right(name: str) -> None:
    case_of(name).assert_clean_and_right()
