"""Hopper's sparse backward on the simulator: right, clean under every schedule, deaf to poison."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import openmla
from kernels.gradients import same_bits
from kernels.hopper.sparse_backward.simulated import (
    assert_right_clean_and_deaf_to_poison,
    forward,
    is_right_and_clean_far_away,
    of_query,
    on,
    run,
)
from openmla import Unsupported
from openmla.backward.problem import BackwardProblem
from openmla.backward.sparse_operands import WantedRows
from openmla.lab.testing.case import Case
from openmla.lab.testing.gradients import GradientCase
from openmla.problem import Problem

# Several steps of a list, the last of one entry.
NARROW = Case(
    "sparse",
    5,
    128,
    64,
    128,
    q_lens=(3,),
    k_lens=(200,),
    topk=129,
    index_kind="mixed",
    scale=0.1,
    spare=2,
)
SMALL = replace(NARROW, d_nope=512, d_v=512, q_lens=(1,), scale=0.05, spare=0)
CASES: dict[str, GradientCase] = {
    "lists": GradientCase(NARROW),
    "512+64": GradientCase(replace(NARROW, d_nope=512, d_v=512, q_lens=(2,), scale=0.05)),
    "128+0": GradientCase(replace(NARROW, d_rope=0, rope="none")),
    "256+64, lengths": GradientCase(
        replace(NARROW, d_nope=256, d_v=256, topk_lengths="ragged", topk=70)
    ),
    "lengths": GradientCase(replace(NARROW, topk_lengths="ragged", q_lens=(6,))),
    "two blocks of heads": GradientCase(replace(NARROW, heads=65, topk=64)),
    "gradient of lse": GradientCase(NARROW, d_lse=True),
    "sink": GradientCase(replace(NARROW, sink="mixed")),
    "duplicates": GradientCase(replace(NARROW, index_kind="duplicates")),
    "negative scale": GradientCase(replace(NARROW, scale=-0.1)),
    "scale 0": GradientCase(replace(NARROW, scale=0.0)),
    "peaky": GradientCase(replace(NARROW, values="peaky")),
    "one entry": GradientCase(replace(NARROW, topk=1)),
    # Drawn on an H200. Gradients of lse alone count, and are as large as the sum of their absolute
    # terms: a row is off by the rounding of every score's gradient, of every part and of itself.
    "small gradients, duplicates": GradientCase(
        replace(SMALL, heads=1, k_lens=(300,), topk=200, seed=11), "small", d_lse=True
    ),
    "small gradients, two blocks of heads": GradientCase(
        replace(
            SMALL,
            heads=128,
            k_lens=(100,),
            topk=63,
            index_kind="duplicates",
            values="peaky",
            spare=3,
            seed=55,
        ),
        "small",
        d_lse=True,
    ),
}
V32 = BackwardProblem.of(
    Problem(
        form="sparse",
        heads=128,
        d_nope=512,
        d_rope=64,
        d_v=512,
        total_q=4096,
        total_k=8192,
        topk=2048,
        causal=False,
    )
)


@pytest.mark.parametrize("name", CASES)
def test_right_clean_and_deaf_to_poison(name: str) -> None:
    assert_right_clean_and_deaf_to_poison(CASES[name])


FAR = GradientCase(replace(NARROW, q_lens=(4,), k_lens=(70,), topk=65), d_lse=True)


@pytest.mark.parametrize("axis", [0, 1])
def test_far_rows_have_the_same_gradients(axis: int) -> None:
    assert is_right_and_clean_far_away(FAR, axis)


def test_lists_may_lie_column_by_column() -> None:
    built = on(CASES["lists"])
    saved = forward(built)
    want, _ = run(built, saved)
    op = built.operands
    turned = replace(op, indices=op.indices.t().contiguous().t())
    assert turned.indices.stride(0) == 1
    got, reports = run(replace(built, built=replace(built.built, operands=turned)), saved)
    assert all(report.ok for report in reports) and same_bits(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["early", "late", "random", "unfair"])
@pytest.mark.parametrize("name", ["lists", "two blocks of heads"])
def test_every_schedule_is_clean_and_has_the_same_bits(name: str, schedule: str) -> None:
    built = on(CASES[name])
    saved = forward(built)
    want, _ = run(built, saved, seed=1)
    got, reports = run(built, saved, schedule=schedule, seed=2)
    assert all(report.ok for report in reports) and same_bits(got, want)


def test_a_query_has_the_gradient_that_it_has_alone() -> None:
    built = on(CASES["lists"])
    saved = forward(built)
    together, _ = run(built, saved)
    for query in range(2):
        apart, own = of_query(built, saved, query)
        got, _ = run(apart, own, seed=query)
        assert same_bits({"q": got["q"]}, {"q": together["q"][query : query + 1]})


@pytest.mark.parametrize(
    "wanted", [WantedRows(rows=False, sink=False), WantedRows(q=False), WantedRows(False, False)]
)
def test_what_is_not_wanted_is_not_written(wanted: WantedRows) -> None:
    built = on(CASES["sink"])
    saved = forward(built)
    every, _ = run(built, saved)
    some, reports = run(built, saved, wanted=wanted)
    assert all(report.ok for report in reports)
    assert set(some) < set(every) and same_bits(some, {name: every[name] for name in some})


def test_nan_that_comes_back_to_a_query_without_keys_reaches_no_gradient() -> None:
    built = on(CASES["lengths"])
    lengths = built.operands.topk_lengths
    assert lengths is not None
    lengths[1] = 0
    saved = forward(built)
    want, _ = run(built, saved)
    blind = saved.lse == -torch.inf
    assert blind.any() and not blind.all() and not want["q"][1].any()
    poisoned = built.d_out.masked_fill(blind[..., None], torch.nan)
    got, reports = run(replace(built, d_out=poisoned), saved)
    assert all(report.ok for report in reports) and same_bits(got, want)


@pytest.mark.parametrize(("heads", "tokens"), [(64, 373), (128, 196)])
def test_the_workspace_is_bounded_and_launches_are_whole_waves(heads: int, tokens: int) -> None:
    plan = openmla.plan(replace(V32, heads=heads), "h200", backend="hopper")
    assert plan.runs_today and plan.variant.tokens == tokens
    # 132 SMs, three waves.
    assert 2 * 132 < tokens * -(-heads // 64) <= 3 * 132
    assert plan.config.workspace(replace(V32, heads=heads)) < 1.2e9
    assert "parts an entry" in plan.explain()


def test_what_is_not_served_is_refused() -> None:
    others = {
        "sink beside": replace(V32, has_sink=True, has_d_lse=True),
        "d_rope": replace(V32, d_rope=32),
        "16": replace(V32, aligned_16=False),
    }
    for reason, problem in others.items():
        with pytest.raises(Unsupported, match=reason):
            openmla.plan(problem, "h200", backend="hopper")


def test_entries_that_do_not_count_have_no_weights() -> None:
    """Their rows are zeros, which multiply to nothing; but not with a weight that overflows, as
    exp(0 - lse) does where all scores are below -88."""
    built = on(GradientCase(replace(NARROW, topk=65, index_kind="mixed")))
    op = built.operands
    assert isinstance(op.cache, torch.Tensor)
    op.cache.fill_(1.0)
    op.q.fill_(-6.0)
    saved = forward(built)
    assert saved.lse.max() < -100 and (op.indices < 0).any()
    got, reports = run(built, saved)
    assert all(report.ok for report in reports)
    assert all(x.isfinite().all() for x in got.values())
