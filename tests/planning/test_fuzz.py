"""Random problems: only Unsupported is raised, plans keep the budget and repeat."""

from __future__ import annotations

import random
import sys

import pytest

from openmla.errors import InvalidArgument
from openmla.planning.registry import Plan
from openmla.planning.target import Target
from planning import fuzz
from planning.fuzz import check_one, main, random_problem, run


def test_twenty_thousand_problems() -> None:
    tally = run(20_000, seed=0)
    assert tally.findings == []
    assert set(tally.answers) == {
        "blackwell",
        "cdna4",
        "cpu",
        "hopper",
        "portable",
        "reference",
        "unsupported",
    }


def test_seeds_repeat() -> None:
    first, second = random.Random(7), random.Random(7)
    assert [random_problem(first) for _ in range(50)] == [random_problem(second) for _ in range(50)]


def test_a_plan_over_budget_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "over_budget", lambda plan: "threads 2048 of 1024")
    tally = run(50, seed=1)
    assert tally.findings and "threads 2048 of 1024" in tally.findings[0]


def test_a_wavering_planner_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def wavering(problem: object, target: Target, backend: str, triton: object) -> Plan:
        asked.append(problem)
        return Plan(random_problem(random.Random(0)), target.name, "cpu", "blocked", len(asked))

    monkeypatch.setattr(fuzz, "choose_plan", wavering)
    assert (
        check_one(random_problem(random.Random(0)), "cpu", "cpu")[1]
        == "two answers to one question"
    )


def test_another_exception_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(problem: object, target: Target, backend: str, triton: object) -> Plan:
        raise InvalidArgument("heads", "fewer", 7)

    monkeypatch.setattr(fuzz, "choose_plan", refusing)
    assert run(3, seed=0).answers == {"finding": 3}


def test_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fuzz", "--problems", "200", "--seed", "3"])
    assert main() == 0
    assert "200 problems planned twice" in capsys.readouterr().out
