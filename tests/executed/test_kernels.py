"""The compiled code of every kernel, executed here: accepted, the same bits under all schedules."""

from __future__ import annotations

import pytest

from executed.cases import CASES, QUICK
from gluon_sim.compiled import SCHEDULES
from openmla.errors import Unsupported
from openmla.testing.executed.check import check_executed

ALL = [(target, name) for target, cases in CASES.items() for name in cases]


def check(target: str, name: str, schedules: int) -> None:
    try:
        found = check_executed(CASES[target][name], target, schedules=SCHEDULES[:schedules])
    except Unsupported as error:
        if "Triton" not in error.reason:
            raise
        pytest.skip(error.reason)
    assert found.status == "right", found.message


@pytest.mark.compile
@pytest.mark.parametrize(("target", "name"), sorted(QUICK))
def test_a_case_of_each_family(target: str, name: str) -> None:
    check(target, name, 3)


@pytest.mark.executed
@pytest.mark.parametrize(("target", "name"), ALL)
def test_every_case(target: str, name: str) -> None:
    check(target, name, len(SCHEDULES))
