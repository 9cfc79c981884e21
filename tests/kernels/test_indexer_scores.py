"""The indexer's scores in Gluon, in the simulator: right, clean, inside their windows only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import pytest
import torch

from gluon_sim import intercept
from indexer.score_cases import SCHEDULES, SCORE_CASES, UNWRITTEN, among_many, paged, width_of
from kernels.far_memory import FarMemory
from openmla.indexer.operands import ScoresOperands
from openmla.lab.compiling.jobs import CompileJob, compile_job
from openmla.lab.compiling.table import jobs_of
from openmla.lab.testing.indexer import score_problems
from openmla.planning import Plan, plan


@dataclass(frozen=True)
class Chip:
    """A family of kernels, where it runs, and a config of short pieces of work."""

    family: str
    target: str
    small: dict[str, int]
    other: dict[str, int]
    """Another division of the same work."""
    page_size: int
    """One that it does not serve."""

    def part(self, module: str) -> Any:
        return import_module(f"openmla.kernels.{self.family}.indexer.{module}")

    def plan_of(self, op: ScoresOperands, out: torch.Tensor, **changes: int) -> Plan:
        chosen = plan(op.problem(out), self.target, self.family)
        return replace(chosen, config=replace(chosen.config, **self.small | changes))

    def run(
        self, op: ScoresOperands, width: int, changes: dict[str, int] | None = None, **options: Any
    ) -> torch.Tensor:
        out = torch.full((op.q.shape[0], width), UNWRITTEN)
        with intercept(**options) as reports:
            for call in self.part("launch").calls(self.plan_of(op, out, **changes or {}), op, out):
                call.run()
        assert all(report.ok for report in reports), "\n".join(map(str, reports))
        return out


# Few SMs, so that blocks do several pieces.
HOPPER = Chip("hopper", "h200", {"sm_count": 2, "chunk": 256}, {"sm_count": 3, "chunk": 128}, 16)
BLACKWELL = replace(HOPPER, family="blackwell", target="b200")
CDNA4 = Chip("cdna4", "mi355x", {"chunk": 256}, {"chunk": 128}, 6)
CHIPS = (HOPPER, BLACKWELL, CDNA4)
each_chip = pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.family)


@each_chip
@pytest.mark.parametrize("name", SCORE_CASES)
def test_right_and_clean(chip: Chip, name: str) -> None:
    op = SCORE_CASES[name]
    every = name == "pages of 64" and chip is not CDNA4
    for schedule, seed in SCHEDULES if every else SCHEDULES[2:3]:
        out = chip.run(op, width_of(op), schedule=schedule, seed=seed)
        assert score_problems(op, out, UNWRITTEN) == []


@each_chip
def test_bits_depend_neither_on_the_batch_nor_on_the_pieces(chip: Chip) -> None:
    op = paged([5, 4], [300, 200], 64, 64)
    whole = chip.run(op, 320)
    assert torch.equal(whole, chip.run(op, 320, chip.other))
    for t in (2, 6):
        alone = replace(
            op, q=op.q[t : t + 1], weights=op.weights[t : t + 1], windows=op.windows.part(t, t + 1)
        )
        assert torch.equal(chip.run(alone, 320)[0], whole[t])


@pytest.mark.parametrize("chip", [HOPPER, BLACKWELL], ids=lambda chip: chip.family)
def test_one_program_does_all_work_items(chip: Chip) -> None:
    """Its ring of queries turns more than twice."""
    op = SCORE_CASES["causal, several pieces"]
    alone = {"sm_count": 1, "chunk": 128}
    for seed in (1, 2):
        out = chip.run(op, width_of(op), alone, schedule="unfair", seed=seed)
        assert score_problems(op, out, UNWRITTEN) == []


@pytest.mark.parametrize("chip", [HOPPER, BLACKWELL], ids=lambda chip: chip.family)
def test_many_contiguous_keys(chip: Chip) -> None:
    """They are one page of a descriptor, whose page stride must stay below 2^40 bytes."""
    op = among_many(100_000, 140)
    assert score_problems(op, chip.run(op, 140), UNWRITTEN) == []


def test_three_consumers() -> None:
    op = SCORE_CASES["pages of 64"]
    assert score_problems(op, HOPPER.run(op, 320, {"consumers": 3}), UNWRITTEN) == []


def test_a_narrow_output_cuts_rows() -> None:
    op = SCORE_CASES["causal, several pieces"]
    got, whole = HOPPER.run(op, 100), HOPPER.run(op, 600)
    assert torch.equal(got, whole[:, :100])


@each_chip
def test_rows_of_scores_may_be_far_apart(chip: Chip) -> None:
    """Four queries of 32 heads share a tile, and three strides are more than 2^31 elements."""
    op = paged([4, 1], [300, 200], 32, 64)
    out = FarMemory().new((5, 320), torch.float32)
    assert 3 * out.stride(0) > 2**31
    out.fill_(UNWRITTEN)
    with intercept() as reports:
        for call in chip.part("launch").calls(chip.plan_of(op, out), op, out):
            call.run()
    assert all(report.ok for report in reports), "\n".join(map(str, reports))
    assert torch.equal(out, chip.run(op, 320))


@each_chip
def test_weights_may_lie_head_by_head(chip: Chip) -> None:
    op = SCORE_CASES["pages of 32"]
    other = replace(op, weights=op.weights.t().contiguous().t())
    assert other.weights.stride(0) == 1
    assert torch.equal(chip.run(other, width_of(op)), chip.run(op, width_of(op)))


def test_the_counter_is_left_zero() -> None:
    op = SCORE_CASES["random windows"]
    out = torch.full((10, 600), UNWRITTEN)
    (call,) = HOPPER.part("launch").calls(HOPPER.plan_of(op, out), op, out)
    with intercept() as reports:
        call.run()
        first = out.clone()
        call.run()
    assert all(r.ok for r in reports) and torch.equal(first, out)
    assert int(call.arguments["counter_ptr"]) == 0


@pytest.mark.compile
@pytest.mark.parametrize(
    "job", [job for chip in CHIPS for job in jobs_of(chip.part("jobs").JOBS)], ids=lambda j: j.name
)
def test_compiles_as_planned(job: CompileJob) -> None:
    report, planned = compile_job(job), job.predicted
    if job.name.startswith("hopper") and not report.triton.startswith("3.6"):
        planned = replace(planned, shared=None)
    assert report.differences(planned) == []


@each_chip
@pytest.mark.parametrize("field", ["heads", "page_size", "aligned_16"])
def test_what_it_does_not_serve_is_portable(chip: Chip, field: str) -> None:
    problem = SCORE_CASES["pages of 64"].problem(torch.zeros(16, 320))
    assert plan(problem, chip.target).backend == chip.family
    value = {"heads": 48, "page_size": chip.page_size, "aligned_16": False}[field]
    other = plan(replace(problem, **{field: value}), chip.target)
    assert other.backend == "portable"
    reason = "16 bytes" if field == "aligned_16" else f"{field} {value}"
    assert any(reason in why for why in other.passed_over)
