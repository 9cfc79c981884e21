"""Hopper's backward kernels on the simulator: right, clean under every schedule, deaf to poison."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gluon_sim import Kind, Limits, intercept
from kernels.boundaries import UnevenMemory
from kernels.gradients import (
    CASES,
    FAR,
    NARROW,
    as_built,
    deep_scores,
    forward,
    names_of,
    on,
    same_bits,
)
from kernels.hopper.backward.simulated import HOPPER, MASKED, WIDE
from kernels.wild_values import KINDS, with_wild_values
from openmla.backward.operands import Gradients, Wanted
from openmla.kernels.hopper.backward import launch
from openmla.lab.testing.gradients import GradientCase

EVERY_CASE = {**CASES, **MASKED, **WIDE}


@pytest.mark.parametrize("name", names_of(EVERY_CASE))
def test_right_clean_and_deaf_to_poison(name: str) -> None:
    HOPPER.assert_right_clean_and_deaf_to_poison(EVERY_CASE[name])


@pytest.mark.parametrize("axis", [0, 1])
def test_far_rows_have_the_same_gradients(axis: int) -> None:
    assert HOPPER.is_right_and_clean_far_away(FAR, axis)


@pytest.mark.parametrize("causal", [True, False])
def test_lengths_at_the_edges_of_the_plan(causal: bool) -> None:
    """Where all scores are far below 0, a key that is not there would show."""
    case = HOPPER.at_edges(GradientCase(replace(NARROW, causal=causal)))
    change = as_built if causal else deep_scores
    HOPPER.assert_right_clean_and_deaf_to_poison(case, change=change)


def test_far_statistics_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    HOPPER.assert_same_bits_with_far_statistics(FAR, monkeypatch)


@pytest.mark.parametrize("heads", [4, 1])
def test_rows_that_lie_unevenly_have_the_same_gradients(heads: int) -> None:
    """With one head, the stride of heads says nothing."""
    case = replace(FAR, case=replace(FAR.case, heads=heads))
    assert HOPPER.is_right_and_clean_in(UnevenMemory(), case)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["early", "late", "random", "unfair"])
@pytest.mark.parametrize(
    "name", ["causal", "full", "edges", "40 sequences", "key mask, rings", "192+64→256, rings"]
)
def test_every_schedule_is_clean_and_has_the_same_bits(name: str, schedule: str) -> None:
    HOPPER.assert_same_bits_in_every_schedule(EVERY_CASE[name], schedule)


@pytest.mark.parametrize("name", ["causal", "edges", "rope per head", "key mask", "192+64→256"])
def test_a_sequence_has_the_gradients_that_it_has_alone(name: str) -> None:
    HOPPER.assert_same_bits_alone(EVERY_CASE[name])


@pytest.mark.parametrize(
    "wanted", [Wanted(kv=False, sink=False), Wanted(q=False), Wanted(q=False, kv=False)]
)
def test_what_is_not_wanted_is_not_written(wanted: Wanted) -> None:
    HOPPER.assert_what_is_not_wanted_is_not_written(CASES["sink"], wanted)


def test_the_work_counter_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(launch, "launch_counter", lambda device: counter)
    built = on(CASES["40 sequences"])
    saved = forward(built)
    want, _ = HOPPER.run(built, saved)
    for sm_count in (2, 64):
        got, reports = HOPPER.run(built, saved, HOPPER.plan_of(built, saved, sm_count=sm_count))
        assert all(report.ok for report in reports) and same_bits(got, want)
        assert int(counter) == 0


@pytest.mark.parametrize("lens", [((3,), (0,)), ((0,), (4,))], ids=["no keys", "no queries"])
def test_without_rows_gradients_are_zero(lens: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    q_lens, k_lens = lens
    built = on(GradientCase(replace(NARROW, q_lens=q_lens, k_lens=k_lens, spare=0)))
    gradients, reports = HOPPER.run(built, forward(built))
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
    got, reports = HOPPER.run(odd, saved)
    want, _ = HOPPER.run(
        replace(built, d_out=d_out.clone(memory_format=torch.contiguous_format)), saved
    )
    assert all(report.ok for report in reports) and same_bits(got, want)


@pytest.mark.parametrize("name", ["more queries than keys", "few bits, full, gradient of lse"])
def test_nan_that_comes_back_to_a_row_without_keys_reaches_no_gradient(name: str) -> None:
    HOPPER.assert_blind_rows_are_not_read(EVERY_CASE[name])


@pytest.mark.parametrize("name", ["causal", "edges, full, sink", "more queries than keys"])
def test_a_mask_of_all_bits_changes_no_bit(name: str) -> None:
    case = CASES[name]
    built, masked = on(case), on(replace(case, case=replace(case.case, key_mask="all")))
    saved = forward(built)
    want, _ = HOPPER.run(built, saved)
    op = replace(built.operands, key_mask=masked.operands.key_mask)
    got, _ = HOPPER.run(replace(built, built=replace(built.built, operands=op)), saved)
    assert same_bits(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_masks_of_wild_sequences_stay_inside_their_tensors(kind: str) -> None:
    for seed in range(2):
        built = on(MASKED["key mask"])
        saved = forward(built)
        with_wild_values(built.built, kind, seed)
        op = built.backward(saved)
        gradients = Gradients.allocate(op.forward)
        # Tiles of sequences that overlap are written by several programs.
        options = {"ignore": (Kind.RACE,), "limits": Limits(steps=200_000), "seed": seed}
        with intercept(**options) as reports:
            for call in launch.calls(HOPPER.plan_of(built, saved), op, gradients):
                call.run()
        assert [str(report) for report in reports if not report.ok] == []
