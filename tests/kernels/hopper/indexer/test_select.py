"""The selection in the simulator: the tie rule on rows of every kind, short and long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gluon_sim import Limits, intercept
from indexer import cases
from openmla.indexer import reference
from openmla.indexer.operands import SelectOperands, SelectResults, Windows
from openmla.kernels.gluon.select.launch import calls
from openmla.planning import Plan, plan

SMALL = {
    "warps": 1,
    "chunk_vectors": 2,
    "list_vectors": 4,
    "long_rows": True,
    "sm_count": 1,
    "max_registers": 255,
}
"""Rows of 513 scores are long ones; two blocks do all rows."""
HALVES = {"chunk_vectors": 1, "list_vectors": 2}
"""Vectors of a thread where a warp has 64: as many scores as with 32."""
on_both = pytest.mark.parametrize("chip", ["h200", "mi355x"])


def plan_of(op: SelectOperands, results: SelectResults, chip: str = "h200", **changes: Any) -> Plan:
    chosen = plan(op.problem(results), chip)
    small = SMALL | HALVES if chip == "mi355x" else SMALL
    return replace(chosen, config=replace(chosen.config, **small | changes))


def results_of(op: SelectOperands) -> SelectResults:
    rows, words = op.scores.shape[0], -(-op.scores.shape[1] // 32)
    sizes = ((rows, op.topk), (rows,), (rows, words))
    return SelectResults(*(torch.full(size, 99, dtype=torch.int32) for size in sizes))


def problems_of(
    op: SelectOperands, changes: dict[str, Any] | None = None, chip: str = "h200", **options: Any
) -> list[str]:
    """What the kernel writes besides what the definition writes."""
    got, want = results_of(op), results_of(op)
    with intercept(limits=Limits(load_alignment=16), **options) as reports:
        for call in calls(plan_of(op, got, chip, **changes or {}), op, got):
            call.run()
    reference.write_selection(op, want, reference.select(op))
    found = [str(report) for report in reports if not report.ok]
    for name in ("out", "counts", "mask"):
        a, b = getattr(got, name), getattr(want, name)
        rows = (a != b).view(a.shape[0], -1).any(1).nonzero().flatten().tolist()
        found += [f"{name} differ in rows {rows}"] if rows else []
    return found


def operands(kind: str, width: int, topk: int, **how: Any) -> SelectOperands:
    scores = cases.scores_of(kind, 5, width)
    starts = torch.tensor([0, 7, 30, 2, -4], dtype=torch.int32)
    ends = torch.tensor([width, width - 9, 20, min(topk + 2, width), 2 * width], dtype=torch.int32)
    lines = torch.tensor([0, 0, 1, 1, 1], dtype=torch.int32)
    return SelectOperands(scores, topk, Windows(starts, ends, lines), **how)


@on_both
@pytest.mark.parametrize("width", [512, 1500])
@pytest.mark.parametrize("kind", cases.KINDS)
def test_selection_is_the_definition(kind: str, width: int, chip: str) -> None:
    topk = {"random": 1, "coarse": 256, "equal": 255}.get(kind, 100)
    assert problems_of(operands(kind, width, topk), chip=chip) == []


@pytest.mark.parametrize("kind", ["random", "coarse", "ascending"])
@pytest.mark.parametrize("shape", [(2, 1, 2), (4, 1, 2), (2, 2, 8)])
def test_several_warps(kind: str, shape: tuple[int, int, int]) -> None:
    """Warps add up one another's hits; eight vectors in a thread take a word of 64 bits."""
    changes = dict(zip(("warps", "chunk_vectors", "list_vectors"), shape, strict=True))
    assert problems_of(operands(kind, 3000, 200), changes) == []


@pytest.mark.parametrize("kind", ["random", "coarse", "equal"])
@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 2, 4)])
def test_several_warps_of_64_lanes(kind: str, shape: tuple[int, int, int]) -> None:
    """Four vectors in a thread, of up to 256 hits in a warp each, take a word of 64 bits."""
    changes = dict(zip(("warps", "chunk_vectors", "list_vectors"), shape, strict=True))
    assert problems_of(operands(kind, 5000, 200), changes, "mi355x") == []


@on_both
@pytest.mark.parametrize("schedule", ["early", "late", "random"])
def test_every_schedule(schedule: str, chip: str) -> None:
    assert problems_of(operands("random", 1500, 200), None, chip, schedule=schedule, seed=4) == []


@on_both
def test_a_sample_that_sees_nothing_of_the_large_scores(chip: str) -> None:
    """Then too few pass the pivot, and the row is walked again."""
    op = operands("random", 2048, 100)
    step = 2048 // 128  # of 128 vectors
    sampled = torch.arange(2048) % step < 4
    op.scores[:, sampled] = 5 + op.scores[:, sampled].abs()  # it sees only these, and all of them
    assert problems_of(op, chip=chip) == []
    op.scores[:, sampled] = -5 - op.scores[:, sampled].abs()
    assert problems_of(op, chip=chip) == []


@on_both
def test_what_lies_behind_a_row_is_not_counted(chip: str) -> None:
    """The sample sees all of the large scores, so that too few pass the pivot. Scores are negative,
    and the last chunk ends with zeros."""
    width = 1900
    op = operands("random", width, 100)
    number, step = torch.arange(128), width // 4
    vectors = number * (step // 128) + number * (step % 128) // 128
    sampled = (4 * vectors[:, None] + torch.arange(4)).flatten()
    op.scores.abs_().neg_().sub_(50)
    op.scores[:, sampled] += 49
    assert problems_of(op, chip=chip) == []


@on_both
@pytest.mark.parametrize("width", [512, 1500])
def test_how_positions_are_written(width: int, chip: str) -> None:
    assert problems_of(operands("coarse", width, 90, add_starts=True), chip=chip) == []
    table = torch.randperm(2 * -(-width // 10)).int().view(2, -1)
    paged = {"block_table": table, "page_size": 10}
    assert problems_of(operands("coarse", width, 90, **paged), chip=chip) == []


@pytest.mark.parametrize("width", [512, 1500])
@pytest.mark.parametrize("how", ["positions", "columns", "rows"])
def test_counts_and_bits_are_written_only_where_they_are_asked_for(how: str, width: int) -> None:
    table = torch.randperm(2 * -(-width // 10)).int().view(2, -1)
    shown_as: dict[str, dict[str, Any]] = {
        "positions": {},
        "columns": {"add_starts": True},
        "rows": {"block_table": table, "page_size": 10},
    }
    op = operands("coarse", width, 90, **shown_as[how])
    got, want = replace(results_of(op), counts=None, mask=None), results_of(op)
    with intercept() as reports:
        for call in calls(plan_of(op, got), op, got):
            call.run()
    reference.write_selection(op, want, reference.select(op))
    assert [str(report) for report in reports if not report.ok] == []
    assert torch.equal(got.out, want.out)


@pytest.mark.parametrize("kind", ["random", "coarse"])
def test_rows_that_fit_the_registers_need_no_list(kind: str) -> None:
    assert problems_of(operands(kind, 512, 100), {"long_rows": False}) == []


def test_rows_shorter_than_topk_are_not_read() -> None:
    op = operands("nan", 512, 256)
    short = replace(op, windows=replace(op.windows, ends=op.windows.starts + 200))
    assert problems_of(short) == []


@on_both
def test_a_row_does_not_see_its_neighbors(chip: str) -> None:
    op = operands("half zeros", 1500, 100)
    together = results_of(op)
    alone = results_of(op)
    with intercept():
        for call in calls(plan_of(op, together, chip), op, together):
            call.run()
        for row in range(5):
            part = replace(
                op, scores=op.scores[row : row + 1], windows=op.windows.part(row, row + 1)
            )
            result = alone.part(row, row + 1)
            for call in calls(plan_of(part, result, chip), part, result):
                call.run()
    assert torch.equal(together.out, alone.out) and torch.equal(together.mask, alone.mask)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"keeps": True}, "keeps True"),
        ({"topk": 4097, "width": 8193}, "topk 4097"),
        ({"aligned_16": False}, "16"),
    ],
)
@pytest.mark.parametrize("chip", ["h200", "b200", "mi355x"])
def test_what_it_does_not_serve_is_portable(chip: str, change: dict, reason: str) -> None:
    op = operands("random", 512, 100)
    problem = replace(op.problem(results_of(op)), **change)
    chosen = plan(problem, chip)
    assert chosen.backend == "portable" and reason in chosen.passed_over[0]


def test_a_table_that_ends_before_the_row() -> None:
    """Positions past the table are shown as -1, and nothing past it is read."""
    table = torch.arange(160, dtype=torch.int32).view(2, 80)
    op = operands("ascending", 700, 100, block_table=table, page_size=8)
    assert problems_of(op) == []
