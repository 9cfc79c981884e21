"""Plans of the selection on Hopper hold what their rows need."""

from __future__ import annotations

import pytest

from openmla.indexer.problem import IndexProblem
from openmla.kernels.hopper.indexer.plan import HopperSelectConfig
from openmla.planning import plan


@pytest.mark.parametrize("topk", [1, 2048, 2049, 4096])
@pytest.mark.parametrize("width", [1, 8192, 8193, 131072])
def test_rows_fit_the_registers_or_go_through_chunks(width: int, topk: int) -> None:
    problem = IndexProblem("select", topk=topk, total_q=64, width=width)
    config = plan(problem, "h200", "hopper").config
    assert isinstance(config, HopperSelectConfig)
    assert config.long_rows == (width > 8192)
    assert config.long_rows or width <= config.list_size
    assert not config.long_rows or topk <= config.list_size - config.chunk
