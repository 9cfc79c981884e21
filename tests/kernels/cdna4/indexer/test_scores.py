"""The indexer's scores on CDNA4, in the simulator: right, clean, inside their windows only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gluon_sim import intercept
from indexer.score_cases import SCHEDULES, SCORE_CASES, UNWRITTEN, paged, width_of
from openmla.aot.jobs import CompileJob, compile_job
from openmla.aot.table import jobs_of
from openmla.indexer.operands import ScoresOperands
from openmla.kernels.cdna4.indexer.jobs import JOBS
from openmla.kernels.cdna4.indexer.launch import calls
from openmla.planning.indexer import IndexPlan, index_plan
from openmla.testing.indexer import score_problems


def plan_of(op: ScoresOperands, out: torch.Tensor, **changes: int) -> IndexPlan:
    """Blocks of few keys."""
    chosen = index_plan(op.problem(out), "mi355x", "cdna4")
    return replace(chosen, config=replace(chosen.config, **{"chunk": 256} | changes))


def run(op: ScoresOperands, width: int, chosen: IndexPlan | None = None, **options: Any):
    out = torch.full((op.q.shape[0], width), UNWRITTEN)
    with intercept(**options) as reports:
        for call in calls(chosen or plan_of(op, out), op, out):
            call.run()
    assert all(report.ok for report in reports), "\n".join(map(str, reports))
    return out


@pytest.mark.parametrize("name", SCORE_CASES)
def test_right_and_clean(name: str) -> None:
    op = SCORE_CASES[name]
    for schedule, seed in SCHEDULES[2:3]:
        out = run(op, width_of(op), schedule=schedule, seed=seed)
        assert score_problems(op, out, UNWRITTEN) == []


def test_bits_depend_neither_on_the_batch_nor_on_the_pieces() -> None:
    op = paged([5, 4], [300, 200], 64, 64)
    whole = run(op, 320)
    other = run(op, 320, plan_of(op, whole, chunk=128))
    assert torch.equal(whole, other)
    for t in (2, 6):
        alone = replace(
            op, q=op.q[t : t + 1], weights=op.weights[t : t + 1], windows=op.windows.part(t, t + 1)
        )
        assert torch.equal(run(alone, 320)[0], whole[t])


@pytest.mark.compile
@pytest.mark.parametrize("job", list(jobs_of(JOBS)), ids=lambda job: job.name)
def test_compiles_as_planned(job: CompileJob) -> None:
    assert compile_job(job).differences(job.predicted) == []


def test_what_it_does_not_serve_is_portable() -> None:
    op = SCORE_CASES["pages of 64"]
    problem = op.problem(torch.zeros(16, 320))
    assert index_plan(problem, "mi355x").backend == "cdna4"
    other = index_plan(replace(problem, page_size=6), "mi355x")
    assert other.backend == "portable" and "page_size 6" in other.passed_over[0]
