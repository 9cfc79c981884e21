"""CDNA4's backward kernels on the simulator: right, clean under every schedule, deaf to poison."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.boundaries import UnevenMemory
from kernels.cdna4.backward.simulated import CDNA4
from kernels.far_memory import FarMemory
from kernels.gradients import FAR as NARROW_FAR
from kernels.gradients import as_built, deep_scores, forward, names_of, on, same_bits
from openmla.backward.operands import Wanted
from openmla.errors import Unsupported
from openmla.lab.testing.case import Case
from openmla.lab.testing.gradients import GradientCase

V3 = Case("dense", 2, 128, 64, 128, q_lens=(40, 5), k_lens=(150, 2), spare=3)
NARROW = replace(V3, heads=1, d_nope=64, d_rope=0, d_v=64, rope="none")
SHORT = replace(NARROW, q_lens=(33,), k_lens=(40,), spare=0)
# One row into a tile, a step, a wave; and one row less.
EDGES = replace(NARROW, q_lens=(3, 65, 129, 31), k_lens=(129, 64, 127, 33), spare=0)
CASES: dict[str, GradientCase] = {
    "causal": GradientCase(V3),
    "full": GradientCase(replace(V3, heads=1, causal=False, q_lens=(33,), k_lens=(70,))),
    "gradient of lse": GradientCase(replace(SHORT, d_rope=64, rope="shared"), d_lse=True),
    "sink": GradientCase(replace(SHORT, heads=2, sink="mixed")),
    "rope per head": GradientCase(replace(SHORT, heads=2, d_rope=64, rope="per_head")),
    "edges": GradientCase(EDGES),
    "edges, full, sink": GradientCase(replace(EDGES, causal=False, sink="normal")),
    "more queries than keys": GradientCase(
        replace(NARROW, q_lens=(140, 0, 3, 64), k_lens=(50, 10, 0, 64))
    ),
    "more keys than queries": GradientCase(replace(NARROW, q_lens=(1, 40), k_lens=(200, 170))),
    "no sequences": GradientCase(replace(NARROW, q_lens=(), k_lens=(), spare=4)),
    "9 sequences": GradientCase(replace(NARROW, q_lens=(1,) * 9, k_lens=(3,) * 9)),
    "negative scale": GradientCase(replace(NARROW, scale=-0.1)),
    "scale 0": GradientCase(replace(SHORT, scale=0.0)),
    "peaky": GradientCase(replace(SHORT, values="peaky")),
    "small gradients": GradientCase(replace(SHORT, values="normal"), d_out="small"),
    "strided": GradientCase(replace(SHORT, heads=2, layout="aligned")),
}


@pytest.mark.parametrize("name", names_of(CASES))
def test_right_clean_and_deaf_to_poison(name: str) -> None:
    CDNA4.assert_right_clean_and_deaf_to_poison(CASES[name])


FAR = replace(NARROW_FAR, case=replace(NARROW_FAR.case, d_rope=64))


def test_far_heads_have_the_same_gradients() -> None:
    assert CDNA4.is_right_and_clean_far_away(FAR, 1)


def test_far_rows_of_results_have_the_same_gradients() -> None:
    """Rows that are copied to LDS are refused there."""
    assert CDNA4.is_right_and_clean_in(FarMemory(0), FAR, operands=UnevenMemory())
    with pytest.raises(Unsupported, match="span 2 GiB"):
        CDNA4.is_right_and_clean_far_away(FAR, 0)


@pytest.mark.parametrize("causal", [True, False])
def test_lengths_at_the_edges_of_the_plan(causal: bool) -> None:
    """Where all scores are far below 0, a key that is not there would show."""
    case = CDNA4.at_edges(GradientCase(replace(NARROW, causal=causal)))
    change = as_built if causal else deep_scores
    CDNA4.assert_right_clean_and_deaf_to_poison(case, change=change)


@pytest.mark.parametrize("heads", [4, 1])
def test_rows_that_lie_unevenly_have_the_same_gradients(heads: int) -> None:
    """With one head, the stride of heads says nothing."""
    case = replace(FAR, case=replace(FAR.case, heads=heads))
    assert CDNA4.is_right_and_clean_in(UnevenMemory(), case)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["early", "late", "random", "unfair"])
@pytest.mark.parametrize("name", ["edges", "gradient of lse"])
def test_every_schedule_is_clean_and_has_the_same_bits(name: str, schedule: str) -> None:
    CDNA4.assert_same_bits_in_every_schedule(CASES[name], schedule)


@pytest.mark.slow
def test_a_sequence_has_the_gradients_that_it_has_alone() -> None:
    CDNA4.assert_same_bits_alone(CASES["edges"])


@pytest.mark.parametrize("wanted", [Wanted(kv=False, sink=False), Wanted(q=False)])
def test_what_is_not_wanted_is_not_written(wanted: Wanted) -> None:
    CDNA4.assert_what_is_not_wanted_is_not_written(CASES["sink"], wanted)


@pytest.mark.parametrize("lens", [((3,), (0,)), ((0,), (4,))], ids=["no keys", "no queries"])
def test_without_rows_gradients_are_zero(lens: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    q_lens, k_lens = lens
    built = on(GradientCase(replace(NARROW, q_lens=q_lens, k_lens=k_lens, spare=0)))
    gradients, reports = CDNA4.run(built, forward(built))
    assert not reports
    assert all(not x.any() and not x.signbit().any() for x in gradients.values())


def test_a_gradient_that_no_copy_can_read_is_copied() -> None:
    """autograd hands out expanded tensors: rows that are one row."""
    built = on(CASES["sink"])
    saved = forward(built)
    shape = built.d_out.shape
    row = torch.randn(max(shape)).to(built.d_out.dtype)
    d_out = row.as_strided(shape, (0, 0, 1))
    got, reports = CDNA4.run(replace(built, d_out=d_out), saved)
    want, _ = CDNA4.run(
        replace(built, d_out=d_out.clone(memory_format=torch.contiguous_format)), saved
    )
    assert all(report.ok for report in reports) and same_bits(got, want)


def test_nan_that_comes_back_to_a_row_without_keys_reaches_no_gradient() -> None:
    CDNA4.assert_blind_rows_are_not_read(GradientCase(replace(SHORT, q_lens=(40,), k_lens=(7,))))


def test_a_plan_says_what_a_lane_keeps_and_what_it_refuses() -> None:
    built = on(CASES["causal"])
    chosen = CDNA4.plan_of(built, forward(built))
    assert (chosen.config.query_registers, chosen.config.key_registers) == (224, 288)
    assert "4 waves" in chosen.explain() and "82944 bytes" in chosen.explain()
    wider = replace(chosen.config, d_nope=256, d_v=256)
    assert wider.why_unsupported() == ("registers: 480 > 352 of a lane for what the key pass keeps")
    assert "LDS" in replace(chosen.config, slots=5).why_unsupported()
    assert "copies" in replace(chosen.config, step_rows=16).why_unsupported()
