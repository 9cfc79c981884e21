"""Blackwell's backward kernels on the simulator: right, clean in every schedule, deaf to poison."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels.blackwell.backward.simulated import BLACKWELL
from kernels.boundaries import UnevenMemory
from kernels.gradients import (
    CASES,
    FAR,
    NARROW,
    RINGS,
    as_built,
    deep_scores,
    forward,
    names_of,
    on,
)
from openmla.backward.operands import Wanted
from openmla.lab.testing.gradients import GradientCase


@pytest.mark.parametrize("name", names_of(CASES))
def test_right_clean_and_deaf_to_poison(name: str) -> None:
    BLACKWELL.assert_right_clean_and_deaf_to_poison(CASES[name])


def test_rings_that_turn_are_right_clean_and_deaf_to_poison() -> None:
    BLACKWELL.assert_right_clean_and_deaf_to_poison(RINGS)


@pytest.mark.parametrize("axis", [0, 1])
def test_far_rows_have_the_same_gradients(axis: int) -> None:
    assert BLACKWELL.is_right_and_clean_far_away(FAR, axis)


@pytest.mark.parametrize("causal", [True, False])
def test_lengths_at_the_edges_of_the_plan(causal: bool) -> None:
    """Where all scores are far below 0, a key that is not there would show."""
    case = BLACKWELL.at_edges(GradientCase(replace(NARROW, causal=causal)))
    BLACKWELL.assert_right_clean_and_deaf_to_poison(
        case, change=as_built if causal else deep_scores
    )


def test_far_statistics_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    BLACKWELL.assert_same_bits_with_far_statistics(FAR, monkeypatch)


@pytest.mark.parametrize("heads", [4, 1])
def test_rows_that_lie_unevenly_have_the_same_gradients(heads: int) -> None:
    """With one head, the stride of heads says nothing."""
    case = replace(FAR, case=replace(FAR.case, heads=heads))
    assert BLACKWELL.is_right_and_clean_in(UnevenMemory(), case)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["early", "late", "random", "unfair"])
@pytest.mark.parametrize("name", ["causal", "full", "edges", "40 sequences"])
def test_every_schedule_is_clean_and_has_the_same_bits(name: str, schedule: str) -> None:
    BLACKWELL.assert_same_bits_in_every_schedule(CASES[name], schedule)


@pytest.mark.parametrize("name", ["causal", "edges", "rope per head"])
def test_a_sequence_has_the_gradients_that_it_has_alone(name: str) -> None:
    BLACKWELL.assert_same_bits_alone(CASES[name])


@pytest.mark.parametrize(
    "wanted", [Wanted(kv=False, sink=False), Wanted(q=False), Wanted(q=False, kv=False)]
)
def test_what_is_not_wanted_is_not_written(wanted: Wanted) -> None:
    BLACKWELL.assert_what_is_not_wanted_is_not_written(CASES["sink"], wanted)


@pytest.mark.parametrize("lens", [((3,), (0,)), ((0,), (4,))], ids=["no keys", "no queries"])
def test_without_rows_gradients_are_zero(lens: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    q_lens, k_lens = lens
    built = on(GradientCase(replace(NARROW, q_lens=q_lens, k_lens=k_lens, spare=0)))
    gradients, reports = BLACKWELL.run(built, forward(built))
    assert not reports
    assert all(not x.any() and not x.signbit().any() for x in gradients.values())


def test_nan_that_comes_back_to_a_row_without_keys_reaches_no_gradient() -> None:
    BLACKWELL.assert_blind_rows_are_not_read(CASES["more queries than keys"])
