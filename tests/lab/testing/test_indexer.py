"""The judges of the indexer reject what is wrong."""

from __future__ import annotations

import doctest

import pytest
import torch

from indexer import cases
from openmla.indexer.cache import quantize
from openmla.indexer.operands import ScoresOperands, Windows
from openmla.lab.testing import indexer
from openmla.lab.testing.indexer import score_problems, selection_fits


def test_examples() -> None:
    assert doctest.testmod(indexer).failed == 0


@pytest.fixture
def step() -> tuple[ScoresOperands, torch.Tensor]:
    q, weights = cases.queries(3, 8)
    values, scales = quantize(cases.keys(40), "fp32")
    starts, ends = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 9], [40, 20, 9]))
    op = ScoresOperands(q, weights, (values, scales), Windows(starts, ends))
    out = torch.full((3, 40), 7.0)
    exact = cases.formula(q, values, scales, weights).float()
    out[0], out[1, 5:20] = exact[0], exact[1, 5:20]
    return op, out


def test_right_scores_pass(step) -> None:
    assert score_problems(*step, 7.0) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda out: out[1].__setitem__(4, 0.0),
        lambda out: out[2].__setitem__(9, 7.5),
        lambda out: out[0].mul_(1.01),
        lambda out: out[0].__setitem__(3, torch.nan),
        lambda out: out[1, 5:20].copy_(out[1, 5:20].roll(1)),
    ],
    ids=["before the window", "an empty window", "scale", "NaN", "shifted"],
)
def test_wrong_scores_do_not(step, change) -> None:
    op, out = step
    change(out)
    assert score_problems(op, out, 7.0) != []


@pytest.mark.parametrize("positions", [[0, 3], [1, 0], [0, -1], [0, 0], [0, 4], [0, 1, 2]], ids=str)
def test_wrong_selections_do_not(positions: list[int]) -> None:
    exact = torch.tensor([3.0, 2.0, 1.0, 0.0])
    assert not selection_fits(torch.tensor(positions), exact, torch.full((4,), 0.4), 2)
