"""The acceptance rule for gradients: it rejects seeded defects, and accepts what is right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backward.blocked import BlockedBackward
from backward.defects import REGISTER, SEEDS, SHOWCASES, defect, slipped, verdicts
from openmla.lab.testing.compare_gradients import GradientFigures, judge_gradients
from openmla.lab.testing.gradients import build_gradients, random_gradient_case


def test_there_are_many_and_their_names_differ() -> None:
    names = [d.name for d in REGISTER]
    assert len(names) >= 55 and len(set(names)) == len(names)
    assert all(d.breaks and d.shows for d in REGISTER)


@pytest.mark.parametrize(
    "seed", [SEEDS[0], *(pytest.param(s, marks=pytest.mark.long) for s in SEEDS[1:])]
)
@pytest.mark.parametrize("name", SHOWCASES)
def test_the_correct_implementation_is_accepted_on_every_showcase(name: str, seed: int) -> None:
    case = SHOWCASES[name]
    both = verdicts(BlockedBackward, replace(case, case=replace(case.case, seed=seed)))
    assert [v.report() for v in both if not v.ok] == []


# `make test` has a tenth of them, `make test-all` the others.
@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 10))]
)
def test_every_defect_is_rejected_wherever_it_shows(number: int) -> None:
    missed = {d.name: [str(case) for case in slipped(d)] for d in REGISTER[number::10]}
    assert {name: cases for name, cases in missed.items() if cases} == {}


# More of them, 2026-11-18: seeds 100 to 499 and 1000 to 1399, none rejected.
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_the_correct_implementation_is_accepted_on_random_cases(first: int) -> None:
    for seed in range(first, first + 10):
        case = random_gradient_case(seed)
        both = verdicts(BlockedBackward, case)
        assert [f"{case}\n{v.report()}" for v in both if not v.ok] == []


def test_random_cases_have_every_option() -> None:
    cases = [random_gradient_case(seed) for seed in range(300)]
    assert {c.case.dtype for c in cases} == {"bf16", "fp16", "fp32"}
    assert {c.d_out for c in cases} == {"normal", "small", "few", "ones"}
    assert {c.d_lse for c in cases} == {True, False} == {c.case.causal for c in cases}
    assert {c.case.rope for c in cases} == {"none", "shared", "shared_3d", "per_head"}
    assert {c.case.sink for c in cases} == {"none", "normal", "low", "high", "mixed"}
    assert {c.case.key_mask for c in cases} == {"none", "half", "few", "all"}
    assert not any(c.case.q_scale or c.case.k_scale for c in cases)


def test_a_missing_gradient_and_another_shape_are_rejected() -> None:
    built = build_gradients(SHOWCASES["sink"])
    good = {name: torch.zeros_like(x) for name, x in _inputs(built).items()}
    found = judge_gradients(built, {n: x for n, x in good.items() if n != "v"})
    assert "d_v is missing" in found.problems
    found = judge_gradients(built, {**good, "q": good["q"][:-1]})
    assert found.problems[0].startswith("d_q has shape")
    assert found.figures["q"] == GradientFigures(0.0, 0.0, 0.0, 0.0)


def _inputs(built) -> dict[str, torch.Tensor]:
    op = built.operands
    rope, sink = op.k_rope, op.weights.sink
    return {"q": op.q, "k_nope": op.k_nope, "k_rope": rope, "v": op.v, "sink": sink}


def test_nan_is_rejected() -> None:
    built = build_gradients(SHOWCASES["plain"])
    for name, x in _inputs(built).items():
        if x is not None:
            broken = {n: torch.zeros_like(y) for n, y in _inputs(built).items() if y is not None}
            broken[name].view(-1)[0] = torch.nan
            problems = judge_gradients(built, broken).problems
            assert any("not finite" in p and f"d_{name}" in p for p in problems)


def test_an_unknown_showcase_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown showcases"):
        defect("nothing", "no such showcase")
