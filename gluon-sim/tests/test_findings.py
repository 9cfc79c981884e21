"""A report says the likely cause first and in full, and folds what may follow from it."""

from __future__ import annotations

import pytest

from gluon_sim.report.findings import RANK, Finding, Kind, Report


def report(*findings: Finding) -> Report:
    return Report(findings, "deadlock", steps=9, seconds=0.1, seed=3, schedule="random")


STUCK = Finding(Kind.DEADLOCK, "nobody arrives", "k.py", 50, "consumer")
EARLY = [Finding(Kind.RACE, f"read of byte {i}", "k.py", 40, f"consumer {i}") for i in range(3)]
CAUSE = Finding(Kind.BYTES, "expects 64, gets 128", "k.py", 12, "producer")


def test_every_kind_has_a_rank():
    assert set(RANK) == set(Kind)


def test_the_cause_comes_first_and_in_full_and_the_rest_is_folded():
    assert str(report(*EARLY, STUCK, CAUSE)).splitlines() == [
        "deadlock after 9 steps, seed 3, random: 5 findings",
        "k.py:12: wrong byte expectation: expects 64, gets 128 [partition producer]",
        "may follow from it (`details()` has them in full):",
        "  k.py:40: race, 3 times",
        "  k.py:50: deadlock",
    ]


def test_nothing_is_lost():
    found = report(*EARLY, STUCK, CAUSE)
    assert found.findings == (*EARLY, STUCK, CAUSE)  # in the order of time
    assert found.ranked() == [CAUSE, *EARLY, STUCK]
    assert found.details() == "\n".join(map(str, found.ranked()))
    with pytest.raises(AssertionError, match="read of byte 2"):
        found.raise_if_bad()


def test_one_finding_has_nothing_under_it():
    assert str(report(CAUSE)).count("\n") == 1
    assert str(report()).count("\n") == 0
