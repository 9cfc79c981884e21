"""Random cases on the Gluon kernels in the simulator: a chunk here, any number by the command."""

from __future__ import annotations

import doctest
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gluon_sim.errors
from openmla.lab.testing import memory, simulate
from openmla.lab.testing.build import build
from openmla.lab.testing.case import Case
from openmla.lab.testing.simulate import FAMILIES, check_simulated, draw, fuzz, new_results, plan_on
from openmla.lab.testing.simulate.draw import MENUS, MOST_TILES, simulated_case, tiles
from openmla.lab.testing.simulate.fuzz import replay_simulated, run_simulated

SMALL = Case("dense", 1, 64, 32, 64, q_lens=(5,), k_lens=(33,), seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "seed", "cases"), [("h200", 0, 10), ("b200", 61, 5), ("mi355x", 0, 12)]
)
def test_random_cases_are_right_and_clean(
    target: str, seed: int, cases: int, tmp_path: Path
) -> None:
    """A few, from a seed on that soon has every kind of call: tests/executed runs compiled kernels,
    and `make test-all` 300 simulated cases."""
    report = run_simulated(cases, seed, target, save_dir=tmp_path)
    assert report.ok, [(f.kind, str(f.shrunk), f.message) for f in report.failures]
    assert {call for call, _ in report.served} == {*MENUS[target], "attend"}
    assert report.poisoned == -(-cases // 5)
    assert report.right == cases and report.cases == cases + report.refused.total()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", [memory, simulate, draw], ids=lambda m: m.__name__)
def test_examples(module: Any) -> None:
    assert doctest.testmod(module).failed == 0


# What is drawn.


@pytest.mark.parametrize("target", FAMILIES)
def test_draws_crowd_the_edges(target: str) -> None:
    drawn = [simulated_case(target, seed) for seed in range(600)]
    small = [tiles(case) <= MOST_TILES or max(case.k_lens) >= 2048 for case in drawn]
    assert all(small)
    keyed = [case for case in drawn if case.form != "sparse"]
    for edge in (17, 65, 129):
        assert any(edge in case.k_lens for case in keyed), edge
    keys = [k for case in keyed for k in case.k_lens if k]
    into, before = (sum(k % 16 == rest for k in keys) / len(keys) for rest in (1, 15))
    assert into > 0.3 and before > 0.1, "one key into a tile, one key less than it holds"
    assert any(q % 32 == 1 and q > 1 for case in keyed for q in case.q_lens)
    assert any(case.is_paged and case.spare == 0 and case.k_lens[0] > 0 for case in keyed)
    assert any(0 in case.q_lens for case in drawn) and any(0 in case.k_lens for case in drawn)
    scales = {case.scale for case in drawn}
    assert 0.0 in scales and min(s for s in scales if s is not None) < 0
    lists = [case for case in drawn if case.form == "sparse"]
    assert {c.index_kind for c in lists} >= {"block_end", "mixed", "invalid", "distinct"}
    assert {c.topk_lengths for c in lists} == {"none", "full", "ragged", "wild"}
    for name in ("layout", "out", "sink", "return_lse", "values"):
        assert len({getattr(case, name) for case in drawn}) > 1, name


@pytest.mark.parametrize("target", FAMILIES)
def test_a_third_of_the_widths_is_arbitrary(target: str) -> None:
    def is_served(case: Case) -> bool:
        menu = MENUS[target][case.form]
        v = case.d_v in menu.d_v or case.d_v == case.d_nope
        return case.d_nope in menu.d_nope and case.d_rope in menu.d_rope and v

    drawn = [simulated_case(target, seed) for seed in range(600)]
    assert 0.2 < sum(not is_served(case) for case in drawn) / len(drawn) < 0.5


@pytest.mark.parametrize(
    ("target", "form"), [(target, form) for target, menus in MENUS.items() for form in menus]
)
def test_menus_offer_choices_that_are_served(target: str, form: str) -> None:
    """They follow from what kernels declare, so a family that is renamed must not empty them."""
    menu = MENUS[target][form]
    assert len(menu.pages) > 5 and menu.dtypes and menu.heads and "bf16" in menu.kv
    options = {"topk": 64, "scale": 0.1} if form == "sparse" else {"scale": 0.1}
    source = "cache" if form == "dense" else "shared"
    wide = 128 if form == "dense" else 512
    assert wide in menu.d_nope and 64 in menu.d_rope and 64 in menu.pages
    case = Case(
        form,
        menu.heads[-1],
        wide,
        64,
        wide,
        (3,),
        (70,),
        rope=source,
        kv="bf16",  # type: ignore[arg-type]
        page_size=64,
        **options,
    )  # type: ignore[arg-type]
    built = build(case)
    assert plan_on(target, built.operands, new_results(built)).backend == FAMILIES[target]


# What counts as a failure, and what does not.


def test_a_case_that_is_right() -> None:
    assert check_simulated(SMALL, "h200").kind == ""


def test_a_wrong_result_is_shrunk_saved_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = simulate.simulated

    def wrong(*arguments: Any, **options: Any) -> Any:
        outcome, reports = right(*arguments, **options)
        outcome.out.mul_(1.05)
        return outcome, reports

    monkeypatch.setattr(simulate, "simulated", wrong)
    monkeypatch.setattr(
        fuzz, "simulated_case", lambda target, seed: replace(SMALL, heads=2, causal=False)
    )
    report = run_simulated(1, 0, "h200", save_dir=tmp_path)
    (failure,) = report.failures
    assert not report.ok and failure.kind == "accuracy"
    assert failure.shrunk.heads == 1 and failure.shrunk.k_lens == (1,)
    assert failure.path is not None and failure.path.parent == tmp_path / "h200"
    again = replay_simulated(failure.path, "h200")
    assert again is not None and again.kind == "accuracy"
    monkeypatch.undo()
    assert replay_simulated(failure.path, "h200") is None


def test_a_refusal_is_counted_and_the_next_case_drawn() -> None:
    seeds = range(100)
    cases = {s: simulated_case("mi355x", s) for s in seeds}
    refused = next(s for s, case in cases.items() if case.form != "dense" and case.q_scale)
    report = run_simulated(1, refused, "mi355x")
    assert report.right == 1 and report.refused.total() >= 1
    assert any("has_q_scale" in reason for reason in report.refused)


def test_a_run_that_only_meets_refusals_is_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    fp32 = replace(SMALL, dtype="fp32")
    monkeypatch.setattr(fuzz, "simulated_case", lambda target, seed: fp32)
    report = run_simulated(2, 0, "h200")
    assert report.cases == fuzz.MOST_REFUSED and report.right == 0 and not report.ok


def test_a_crash_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("width")

    monkeypatch.setattr(simulate, "calls", crash)
    found = check_simulated(SMALL, "h200")
    assert (found.kind, found.message) == ("error", "AssertionError: width")


def test_what_the_simulator_cannot_do_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Beyond:
        def run(self) -> None:
            raise gluon_sim.Unsupported("clusters of 4 CTAs")

    monkeypatch.setattr(simulate, "calls", lambda *arguments: [Beyond()])
    assert check_simulated(SMALL, "h200").message.startswith("Unsupported: clusters of 4")


def test_memory_that_is_read_without_being_addressed_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = simulate.simulated

    def reads_spare(plan: Any, operands: Any, results: Any, **options: Any) -> Any:
        outcome, reports = right(plan, operands, results, **options)
        outcome.out[: SMALL.total_q] += 0 * operands.v[-1, 0]  # a spare row
        return outcome, reports

    monkeypatch.setattr(simulate, "simulated", reads_spare)
    case = replace(SMALL, spare=2)
    assert check_simulated(case, "h200", deep=False).kind == ""
    assert check_simulated(case, "h200").kind == "poison"
