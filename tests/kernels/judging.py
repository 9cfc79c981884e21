"""What every simulated kernel must show, whatever it computes.

`run` takes a built case and the options of `gluon_sim.intercept`, and returns the outcome and the
simulator's reports.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch

from gluon_sim import Report
from openmla.lab.testing.build import BuiltCase, Outcome, build
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.memory import Memory
from openmla.lab.testing.memory.poison import differences
from openmla.operands import DenseOperands, LatentOperands, SparseOperands

# CI looks at the earliest and the latest schedule; a changed kernel needs OPENMLA_SIM_SEEDS=50.
SEEDS = int(os.environ.get("OPENMLA_SIM_SEEDS", "2"))
Run = Callable[..., tuple[Outcome, list[Report]]]
Change = Callable[[BuiltCase], BuiltCase]


def on(case: Case, background: str = "zero") -> BuiltCase:
    """A case on the CPU; `background` fills what it does not address."""
    return build(case, memory=Memory("cpu", background))


def assert_clean(reports: list[Report]) -> None:
    """The simulator found nothing."""
    assert [str(f) for report in reports for f in report.findings] == []


def as_built(built: BuiltCase) -> BuiltCase:
    """A case as it is."""
    return built


def ends_with_invalid(built: BuiltCase, block: int = 64) -> BuiltCase:
    """A sparse case whose token t has its first index that does not count in the last place of
    block t: -1, or one past the pool."""
    op = built.operands
    assert isinstance(op, SparseOperands)
    for token in range(op.q.shape[0]):
        op.indices[token, (token + 1) * block - 1] = 2**31 - 1 if token % 2 else -1
    return built


def light_keys(built: BuiltCase) -> BuiltCase:
    """A dense case of one sequence and scale 1 with scores of 8 for its first key, whose value is
    0, and of 0 for the others: a weight of exp(-8) = 2^-11.5 each is all that the outputs show."""
    op = built.operands
    assert isinstance(op, DenseOperands) and op.k_rope is not None and op.weights.scale == 1.0
    for x in (op.q, op.k_nope, op.k_rope):
        x.fill_(0.0)
    op.q[..., 0] = 1.0
    op.k_nope[0, :, 0] = 8.0
    op.v[0] = 0.0
    return built


@lru_cache(maxsize=4)
def definition_of(case: Case) -> BuiltCase:
    """A case to judge by, never to run: tests that follow each other share its float64 truth."""
    return on(case)


def assert_right_clean_and_deaf_to_poison(
    case: Case, run: Run, seed: int = 1, change: Change = as_built, fp8_sums: bool = False
) -> None:
    """By the acceptance rule, and with the same bits when all around the operands is NaN and some
    partitions run far ahead of others."""
    outcomes = []
    for background, schedule in (("zero", "random"), ("nan", "unfair")):
        outcome, reports = run(change(on(case, background)), seed=seed, schedule=schedule)
        assert_clean(reports)
        outcomes.append(outcome)
    assert not differences(outcomes[1], outcomes[0])
    truth = definition_of(case) if change is as_built else change(on(case))
    verdict = judge(truth, outcomes[0], fp8_sums=fp8_sums)
    assert verdict.ok, verdict.report()


def assert_every_schedule_is_clean(case: Case, run: Run) -> None:
    """And gives the same bits."""
    first = None
    for seed in range(SEEDS):
        schedule = {0: "early", 1: "late"}.get(seed, "random")
        outcome, reports = run(on(case), seed=seed, schedule=schedule, resident=3)
        assert_clean(reports)
        assert first is None or not differences(outcome, first)
        first = outcome


def assert_requests_do_not_see_their_neighbors(case: Case, run: Run) -> None:
    """Each request of a latent call has the bits of out that it has alone."""
    built = on(case)
    together = run(built)[0].out
    op = built.operands
    assert isinstance(op, LatentOperands)
    start = 0
    for number, length in enumerate(case.q_lens):
        rows = slice(start, start + length)
        alone = replace(
            op,
            q=op.q[rows],
            block_table=op.block_table[number : number + 1],
            cache_lengths=op.cache_lengths[number : number + 1],
            cu_seqlens_q=torch.tensor([0, length]).int(),
        )
        assert torch.equal(run(replace(built, operands=alone))[0].out, together[rows])
        start += length
