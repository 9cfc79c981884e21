"""The indexer's compiled kernels, executed here: right, and the same bits under all schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gluon_sim.compiled import SCHEDULES
from indexer import cases
from indexer.score_cases import UNWRITTEN, paged, pair
from openmla.dispatch import triton_version
from openmla.indexer import reference
from openmla.indexer.operands import ScoresOperands, SelectOperands, SelectResults, Windows
from openmla.kernels.gluon.indexer_operands import WINDOW_POINTERS
from openmla.kernels.launch import calls
from openmla.lab.testing.executed.calls import compiled_calls
from openmla.lab.testing.indexer import score_problems
from openmla.planning import plan

CHIPS = {"h200": "hopper", "b200": "blackwell", "mi355x": "cdna4"}
WITHOUT_FAMILY = ("a100", "sm_86:82x101376", "l40s", "rtx5090")
"""Chips whose selection is that of Hopper."""
SMALL = {"warps": 2, "long_rows": True, "sm_count": 1}
VECTORS = {
    "h200": {"chunk_vectors": 2, "list_vectors": 4},
    "mi355x": {"chunk_vectors": 1, "list_vectors": 2},
}
"""Vectors of a small block: rows of more than 1024 scores are long ones."""


def selection(kind: str, width: int, topk: int, **how: Any) -> SelectOperands:
    starts = torch.tensor([0, 7, 30], dtype=torch.int32)
    ends = torch.tensor([width, width - 9, 20], dtype=torch.int32)
    lines = torch.tensor([0, 0, 1], dtype=torch.int32)
    scores = cases.scores_of(kind, 5, width)[:3].clone()
    return SelectOperands(scores, topk, Windows(starts, ends, lines), **how)


def results_of(op: SelectOperands) -> SelectResults:
    rows, words = op.scores.shape[0], -(-op.scores.shape[1] // 32)
    sizes = ((rows, op.topk), (rows,), (rows, words))
    return SelectResults(*(torch.full(size, 99, dtype=torch.int32) for size in sizes))


def check_selection(op: SelectOperands, chip: str, schedules: int, **changes: Any) -> None:
    got, want = results_of(op), results_of(op)
    chosen = plan(op.problem(got), chip, CHIPS.get(chip, "portable"))
    if changes:
        vectors = VECTORS["mi355x" if chip == "mi355x" else "h200"]
        chosen = replace(chosen, config=replace(chosen.config, **vectors, **changes))
    windows = (op.windows.starts, op.windows.ends, op.windows.sequences)
    inputs = [op.scores, *windows, *([] if op.block_table is None else [op.block_table])]
    names = ("out", "counts", "mask")
    run = compiled_calls(
        calls(chosen, op, got), chip, inputs, [getattr(got, name) for name in names]
    )
    reference.write_selection(op, want, reference.select(op))
    for schedule in SCHEDULES[:schedules]:
        assert [str(report) for report in run(schedule) if not report.ok] == []
        for name in names:
            assert torch.equal(getattr(got, name), getattr(want, name)), f"{name}, {schedule}"


def check_scores(op: ScoresOperands, chip: str, schedules: int) -> None:
    out = torch.full((op.q.shape[0], 320), UNWRITTEN)
    chosen = plan(op.problem(out), chip, CHIPS[chip])
    if chip != "mi355x":
        chosen = replace(chosen, config=replace(chosen.config, sm_count=2))
    made = list(calls(chosen, op, out))
    finds = chosen.kernel.finds_windows(chosen.config)  # and writes them
    named = WINDOW_POINTERS if finds else ()
    windows = [made[0].arguments[name] for name in named]
    read = [
        t for call in made for name, t in call.arguments.items() if name not in (*WRITTEN, *named)
    ]
    tensors = [getattr(value, "base", value) for value in read]
    inputs = [t for t in tensors if isinstance(t, torch.Tensor)]
    run = compiled_calls(made, chip, inputs, [out, *windows])
    first = None
    for schedule in SCHEDULES[:schedules]:
        assert [str(report) for report in run(schedule) if not report.ok] == []
        assert score_problems(op, out, UNWRITTEN) == []
        first = out.clone() if first is None else first
        assert torch.equal(out, first), schedule


WRITTEN = ("out_ptr", "counter_ptr")
each_chip = pytest.mark.parametrize("chip", CHIPS)
TABLE = torch.randperm(2 * 150, generator=torch.Generator().manual_seed(1)).int().view(2, -1)
LISTS = {
    "short rows": (selection("random", 700, 90), {}),
    "long rows": (selection("random", 1500, 200), SMALL),
    "long rows, ties": (selection("coarse", 1500, 100), SMALL),
    "long rows, pages": (selection("nan", 1500, 100, block_table=TABLE, page_size=10), SMALL),
}


@pytest.mark.executed
@pytest.mark.parametrize("chip", [*CHIPS, *WITHOUT_FAMILY])
@pytest.mark.parametrize("name", LISTS)
def test_selection(chip: str, name: str) -> None:
    skip_without(chip)
    op, changes = LISTS[name]
    check_selection(op, chip, len(SCHEDULES), **changes)


def skip_without(chip: str) -> None:
    """CDNA4 needs a newer Triton."""
    if chip == "mi355x" and triton_version() < (3, 9):
        pytest.skip("CDNA4 is executed with Triton 3.9")


SCORES = {
    "pages of 64": paged([3, 2], [300, 200], 64, 64),
    "contiguous keys": pair([0] * 5, [300] * 5, 300, 64),
}


def fp4(q_lens: list[int], k_lens: list[int], heads: int) -> ScoresOperands:
    """FP4 keys, some of whose blocks lie many octaves below others."""
    op = paged(q_lens, k_lens, heads, 64, "mxfp4")
    cases.spread(op.keys)
    return op


FP4 = {
    "many queries": fp4([3, 2], [300, 200], 64),
    "one query": fp4([1, 1], [300, 200], 64),
    "two queries, 32 heads": fp4([2, 2], [300, 200], 32),
}


@pytest.mark.executed
@each_chip
@pytest.mark.parametrize("name", SCORES)
def test_scores(chip: str, name: str) -> None:
    skip_without(chip)
    check_scores(SCORES[name], chip, len(SCHEDULES))


@pytest.mark.executed
@pytest.mark.parametrize("name", FP4)
def test_scores_over_fp4_keys(name: str) -> None:
    check_scores(FP4[name], "h200", len(SCHEDULES))


@pytest.mark.compile
@pytest.mark.parametrize("name", ["short rows", "long rows"])
def test_some_selections(name: str) -> None:
    op, changes = LISTS[name]
    check_selection(op, "b200", 2, **changes)
