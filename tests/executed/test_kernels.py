"""The compiled code of every kernel, executed here: accepted, the same bits under all schedules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from executed.cases import CASES, QUICK, QUICK_TRITON
from gluon_sim.compiled import SCHEDULES
from kernels.shared_keys import with_shared_keys
from openmla.dispatch import triton_version
from openmla.errors import Unsupported
from openmla.lab.testing.build import build
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.executed.check import check_executed
from openmla.lab.testing.executed.prepare import prepare_built
from openmla.lab.testing.memory.poison import differences

ALL = [(target, name) for target, cases in CASES.items() for name in cases]
KERNELS = [(target, name) for target, names in QUICK.items() for name in names]


def check(case: Case, target: str, schedules: int) -> None:
    found = check_executed(case, target, schedules=SCHEDULES[:schedules])
    assert found.status == "right", f"{case}: {found.message}"


@pytest.mark.compile
@pytest.mark.parametrize(("target", "name"), KERNELS)
def test_some_cases_of_a_kernel(target: str, name: str) -> None:
    """Two schedules of the first; what is not ordered is found under any of them."""
    if triton_version()[:2] != QUICK_TRITON[target]:
        pytest.skip("executed with the other Triton")
    for number, change in enumerate(QUICK[target][name]):
        check(replace(CASES[target][name], **change), target, 1 if number else 2)


def test_twelve_cases_of_every_target():
    assert {t: sum(map(len, names.values())) for t, names in QUICK.items()} == dict.fromkeys(
        QUICK, 12
    )


SHARED = {"mi355x": ("dense bf16", "dense, rope in pages", "dense key mask")}


@pytest.mark.executed
@pytest.mark.parametrize(("target", "name"), [(t, n) for t, names in SHARED.items() for n in names])
def test_sequences_that_share_keys(target: str, name: str) -> None:
    if triton_version()[:2] < QUICK_TRITON[target]:
        pytest.skip("another Triton compiles these kernels")
    case = replace(CASES[target][name], q_lens=(20, 33), k_lens=(70, 100))
    prepared = prepare_built(with_shared_keys(build(case), 2), target)
    outcomes = []
    for schedule in SCHEDULES:
        outcome, reports = prepared.run(schedule)
        assert [str(report) for report in reports if not report.ok] == []
        outcomes.append(outcome)
    assert not any(differences(outcome, outcomes[0]) for outcome in outcomes)
    verdict = judge(prepared.built, outcomes[0])
    assert verdict.ok, verdict.report()


@pytest.mark.executed
@pytest.mark.parametrize(("target", "name"), ALL)
def test_every_case(target: str, name: str) -> None:
    try:
        check(CASES[target][name], target, len(SCHEDULES))
    except Unsupported as error:
        if "Triton" not in error.reason:
            raise
        pytest.skip(error.reason)
