"""Plans of the selection hold what their rows need, on every chip that runs it."""

from __future__ import annotations

import pytest

from openmla.indexer.problem import IndexProblem
from openmla.kernels.gluon.select.plan import GluonSelectConfig
from openmla.planning import plan


@pytest.mark.parametrize(
    ("chip", "family"), [("h200", "hopper"), ("b200", "blackwell"), ("mi355x", "cdna4")]
)
@pytest.mark.parametrize("topk", [1, 2048, 2049, 4096])
@pytest.mark.parametrize("width", [1, 8192, 8193, 131072])
def test_rows_fit_the_registers_or_go_through_chunks(
    width: int, topk: int, chip: str, family: str
) -> None:
    problem = IndexProblem("select", topk=topk, total_q=64, width=width)
    config = plan(problem, chip, family).config
    assert isinstance(config, GluonSelectConfig)
    assert config.long_rows == (width > 8192)
    assert config.long_rows or width <= config.list_size
    assert not config.long_rows or topk <= config.list_size - config.chunk


@pytest.mark.parametrize("width", [8192, 131072])
@pytest.mark.parametrize("topk", [2048, 4096])
def test_a_wave_of_64_lanes_has_as_many_scores_as_a_warp_of_32(width: int, topk: int) -> None:
    problem = IndexProblem("select", topk=topk, total_q=64, width=width)
    ours, theirs = (plan(problem, chip).config for chip in ("mi355x", "h200"))
    assert (ours.lanes, theirs.lanes) == (64, 32) and ours.warps == theirs.warps
    assert (ours.chunk, ours.list_size) == (theirs.chunk, theirs.list_size)
    assert ours.blocks_per_sm * ours.smem_used <= 160 * 1024


@pytest.mark.parametrize(
    "problem",
    [
        IndexProblem("scores", heads=64, page_size=64, total_q=64, width=4096),
        IndexProblem("select", topk=2048, total_q=64, width=4096),
    ],
    ids=lambda problem: problem.form,
)
def test_a_b300_has_the_kernels_of_a_b200(problem: IndexProblem) -> None:
    chosen = plan(problem, "sm_103:160x232448")
    assert (chosen.backend, chosen.kernel_name) == ("blackwell", problem.form)
