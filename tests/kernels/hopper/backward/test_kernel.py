"""Hopper's backward kernels on the simulator: right, clean under every schedule, deaf to poison."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.hopper.backward.simulated import (
    assert_right_clean_and_deaf_to_poison,
    forward,
    is_right_and_clean_far_away,
    on,
    plan_of,
    run,
    same_bits,
)
from openmla.backward.operands import Wanted
from openmla.backward.reference import Saved
from openmla.kernels.hopper.backward import launch
from openmla.lab.testing.case import Case
from openmla.lab.testing.gradients import GradientCase

V3 = Case("dense", 2, 128, 64, 128, q_lens=(70, 33, 5), k_lens=(70, 300, 2), spare=3)
NARROW = replace(V3, d_nope=64, d_rope=32, d_v=64)
# One row into a tile, a block, half of a tile; and one row less.
EDGES = replace(NARROW, heads=1, q_lens=(3, 65, 129, 63), k_lens=(129, 65, 257, 191), spare=0)
CASES: dict[str, GradientCase] = {
    "causal": GradientCase(V3),
    "full": GradientCase(replace(V3, causal=False)),
    "gradient of lse": GradientCase(V3, d_lse=True),
    "sink": GradientCase(replace(V3, sink="mixed")),
    "rope per head": GradientCase(replace(V3, rope="per_head")),
    "128+0": GradientCase(replace(V3, d_rope=0, rope="none")),
    "edges": GradientCase(EDGES),
    "edges, full, sink": GradientCase(replace(EDGES, causal=False, sink="normal")),
    "edges, 128+64": GradientCase(
        replace(V3, heads=1, q_lens=(129, 65), k_lens=(128, 257)), d_lse=True
    ),
    "more queries than keys": GradientCase(
        replace(NARROW, q_lens=(200, 0, 3, 64), k_lens=(50, 10, 0, 64))
    ),
    "more keys than queries": GradientCase(replace(NARROW, q_lens=(1, 40), k_lens=(300, 170))),
    "no sequences": GradientCase(replace(NARROW, q_lens=(), k_lens=(), spare=4)),
    "40 sequences": GradientCase(replace(NARROW, heads=1, q_lens=(1,) * 40, k_lens=(3,) * 40)),
    "negative scale": GradientCase(replace(NARROW, scale=-0.1)),
    "scale 0": GradientCase(replace(NARROW, scale=0.0)),
    "peaky": GradientCase(replace(NARROW, values="peaky")),
    "small gradients": GradientCase(replace(NARROW), d_out="small"),
    "strided": GradientCase(replace(NARROW, layout="aligned")),
    "5 heads": GradientCase(replace(NARROW, heads=5, q_lens=(20,), k_lens=(30,))),
}


@pytest.mark.parametrize("name", CASES)
def test_right_clean_and_deaf_to_poison(name: str) -> None:
    assert_right_clean_and_deaf_to_poison(CASES[name])


FAR = GradientCase(
    replace(NARROW, heads=4, q_lens=(8, 1), k_lens=(8, 70), rope="per_head"),
    d_lse=True,
)


@pytest.mark.parametrize("axis", [0, 1])
def test_far_rows_have_the_same_gradients(axis: int) -> None:
    assert is_right_and_clean_far_away(FAR, axis)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["early", "late", "random", "unfair"])
@pytest.mark.parametrize("name", ["causal", "full", "edges", "40 sequences"])
def test_every_schedule_is_clean_and_has_the_same_bits(name: str, schedule: str) -> None:
    built = on(CASES[name])
    saved = forward(built)
    want, _ = run(built, saved, seed=1)
    for seed in (2, 3):
        got, reports = run(built, saved, schedule=schedule, seed=seed)
        assert all(report.ok for report in reports) and same_bits(got, want)


def alone(case: GradientCase, number: int) -> dict[str, Any]:
    """Rows and keys of one sequence of a case."""
    q_first, k_first = sum(case.case.q_lens[:number]), sum(case.case.k_lens[:number])
    return {
        "rows": slice(q_first, q_first + case.case.q_lens[number]),
        "keys": slice(k_first, k_first + case.case.k_lens[number]),
    }


@pytest.mark.parametrize("name", ["causal", "edges", "rope per head"])
def test_a_sequence_has_the_gradients_that_it_has_alone(name: str) -> None:
    case = CASES[name]
    built = on(case)
    saved = forward(built)
    together, _ = run(built, saved)
    op = built.operands
    assert op.k_rope is not None
    for number in range(len(case.case.q_lens)):
        rows, keys = alone(case, number).values()
        single = replace(
            op,
            q=op.q[rows],
            k_nope=op.k_nope[keys],
            k_rope=op.k_rope[keys],
            v=op.v[keys],
            cu_seqlens_q=torch.tensor([0, rows.stop - rows.start], dtype=torch.int32),
            cu_seqlens_k=torch.tensor([0, keys.stop - keys.start], dtype=torch.int32),
        )
        apart = replace(built, built=replace(built.built, operands=single), d_out=built.d_out[rows])
        own = Saved(saved.out[rows], saved.lse[rows])
        got, _ = run(apart, own, seed=number)
        want = {n: x[rows if n == "q" else keys] for n, x in together.items()}
        assert same_bits(got, want), number


@pytest.mark.parametrize(
    "wanted", [Wanted(kv=False, sink=False), Wanted(q=False), Wanted(q=False, kv=False)]
)
def test_what_is_not_wanted_is_not_written(wanted: Wanted) -> None:
    built = on(CASES["sink"])
    saved = forward(built)
    every, _ = run(built, saved)
    some, reports = run(built, saved, wanted=wanted)
    assert all(report.ok for report in reports)
    assert set(some) < set(every) and same_bits(some, {name: every[name] for name in some})


def test_the_work_counter_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(launch, "launch_counter", lambda device: counter)
    built = on(CASES["40 sequences"])
    saved = forward(built)
    want, _ = run(built, saved)
    for sm_count in (2, 64):
        got, reports = run(built, saved, plan_of(built, saved, sm_count))
        assert all(report.ok for report in reports) and same_bits(got, want)
        assert int(counter) == 0


@pytest.mark.parametrize("lens", [((3,), (0,)), ((0,), (4,))], ids=["no keys", "no queries"])
def test_without_rows_gradients_are_zero(lens: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    q_lens, k_lens = lens
    built = on(GradientCase(replace(NARROW, q_lens=q_lens, k_lens=k_lens, spare=0)))
    gradients, reports = run(built, forward(built))
    assert not reports
    assert all(not x.any() and not x.signbit().any() for x in gradients.values())


@pytest.mark.parametrize("step", [(0, 0, 1), (1, 0, 0)], ids=["expanded", "columns first"])
def test_a_gradient_that_no_bulk_copy_can_read_is_copied(step: tuple[int, int, int]) -> None:
    """autograd hands out expanded tensors: rows that are one row."""
    built = on(CASES["5 heads"])
    saved = forward(built)
    shape = built.d_out.shape
    row = torch.randn(max(shape)).to(built.d_out.dtype)
    d_out = row.as_strided(shape, step) if step[2] else row.as_strided(shape, (0, 0, 1))
    odd = replace(built, d_out=d_out)
    got, reports = run(odd, saved)
    want, _ = run(replace(built, d_out=d_out.clone(memory_format=torch.contiguous_format)), saved)
    assert all(report.ok for report in reports) and same_bits(got, want)


def test_nan_that_comes_back_to_a_row_without_keys_reaches_no_gradient() -> None:
    built = on(CASES["more queries than keys"])
    saved = forward(built)
    want, _ = run(built, saved)
    blind = saved.lse == -torch.inf
    assert blind.any() and not blind.all()
    poisoned = built.d_out.masked_fill(blind[..., None], torch.nan)
    got, reports = run(replace(built, d_out=poisoned), saved)
    assert all(report.ok for report in reports) and same_bits(got, want)
