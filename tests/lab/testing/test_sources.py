"""Calls over several sources as plain data, and their judgment: what is wrong is found."""

from __future__ import annotations

import doctest
from dataclasses import replace

import pytest
import torch

from openmla import reference
from openmla.errors import InvalidArgument
from openmla.lab.testing import isolate, sources
from openmla.lab.testing.build import Outcome
from openmla.lab.testing.case import Case
from openmla.lab.testing.checker import Checker
from openmla.lab.testing.checker import check as answer
from openmla.lab.testing.sources import SourcesCase, checked, judged, operands

CASE = SourcesCase(kinds=("span", "list"), first=(1, 65, 0), second=(3, 0, 70), pages=(16, 2))


def test_examples() -> None:
    assert doctest.testmod(sources).failed == 0


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_call_is_checked_here(backend: str) -> None:
    found = checked(CASE, backend, "cpu", deep=True)
    assert (found.status, found.family, found.poisoned) == ("right", backend, True)


def test_a_refusal_is_one() -> None:
    found = checked(CASE, "hopper", "cpu", deep=True)
    assert found.status == "refused" and found.message


def test_a_wrong_result_and_one_that_poison_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    op = operands(CASE)
    exact = reference.of(op).out.bfloat16()
    assert judged(op, Outcome(exact)).status == "right"
    exact[1, 0, 7] += 1.0
    assert judged(op, Outcome(exact)).kind == "accuracy"
    ran, calls = sources._ran, iter((0.0, 1e-7))

    def differs(*given: object) -> tuple[Outcome, str]:
        outcome, family = ran(*given)
        assert outcome.lse is not None
        return replace(outcome, lse=outcome.lse + next(calls)), family

    monkeypatch.setattr(sources, "_ran", differs)
    assert checked(CASE, "cpu", "cpu", deep=True).kind == "poison"


def test_a_child_process_is_asked() -> None:
    """In its own words: fields as JSON."""
    for case in (CASE, Case("dense", 1, 8, 4, 8)):
        assert isolate._decoded(case.to_json()) == case
    options = {"checker": vars(Checker("cpu")), "deep_every": 1}
    assert answer(CASE, options)["status"] == "right"
    with pytest.raises(InvalidArgument, match="heads"):
        SourcesCase.from_json(CASE.to_json() | {"heads": "many"})


def test_poison_is_where_nobody_looks() -> None:
    clean, poisoned = operands(CASE, poisoned=False), operands(CASE)
    for a, b in zip(clean.sources, poisoned.sources, strict=True):
        seen = torch.cat([a.seen(token) for token in range(CASE.tokens)])
        pool = a.rows
        assert not torch.equal(pool.data, b.rows.data)
        assert torch.equal(pool.gather(seen), b.rows.gather(seen))
