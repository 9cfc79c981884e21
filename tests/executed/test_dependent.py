"""Compiled kernels that may begin before the launch in front has ended wait where they must."""

from __future__ import annotations

import pytest

from executed.cases import latent, sparse
from gluon_sim.compiled import SCHEDULES, Kind, parse
from gluon_sim.compiled.removal import synchronizations, without
from kernels.hopper.few.test_few import few_plan
from openmla.lab.testing.case import Case
from openmla.lab.testing.executed import prepare as prepare_module
from openmla.lab.testing.executed.prepare import PreparedCase, prepare
from openmla.lab.testing.simulate import plan_on

WAIT = "wait for the launch in front"
CASES: dict[str, Case] = {
    "lists of few queries": sparse("bf16", q_lens=(1,), topk=200, seed=21),
    "rows in a workspace": sparse("fp8_656", q_lens=(40,), seed=23),
    "split sequences": latent("bf16", q_lens=(1,), k_lens=(5000,), seed=22),
}


FEW = {"lists of few queries"}
"""Cases that are planned in three launches, which two SMs alone would not be."""


def waits(prepared: PreparedCase) -> list[tuple[int, int]]:
    """(launch, instruction) of every wait."""
    return [
        (number, at)
        for number, launch in enumerate(prepared.launches)
        if launch.dependent
        for at, kind in synchronizations(parse(launch.compiled)).items()
        if kind == WAIT
    ]


@pytest.mark.slow
@pytest.mark.seeded
@pytest.mark.parametrize("name", CASES)
def test_every_wait_is_missed_when_it_goes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in FEW:
        monkeypatch.setattr(prepare_module, "plan_on", lambda *args: few_plan(plan_on(*args), 64))
    prepared = prepare(CASES[name], "h200")
    _, reports = prepared.run(SCHEDULES[1])
    assert all(report.ok for report in reports), [str(report) for report in reports]
    found = waits(prepared)
    assert found and {number for number, _ in found} == {
        number for number, launch in enumerate(prepared.launches) if launch.dependent
    }
    for number, at in found:
        changed = without(parse(prepared.launches[number].compiled), at)
        _, reports = prepared.run(SCHEDULES[1], {number: changed})
        assert Kind.RACE in {one.kind for report in reports for one in report.findings}
