"""An execution that goes wrong is seen; kernels are compiled as a launch compiles them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from executed.cases import CASES, QUICK_TRITON
from gluon_sim.compiled import SCHEDULES, parse
from gluon_sim.compiled.removal import synchronizations, without
from openmla.lab.testing.compare import judge
from openmla.lab.testing.executed.prepare import prepare

ROOT = Path(__file__).resolve().parents[2]


def test_make_test_executes_every_target():
    """With its environment's Triton, or with the one that `matrix` executes with."""
    rules = (ROOT / "Makefile").read_text()
    own = re.search(r"^triton==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    other = re.search(
        r"PYTHONPATH=\.tritons/(\d+)\.(\d+)\S+ .*\n\t\tgluon-sim/tests tests/executed", rules
    )
    assert own and other
    versions = {tuple(int(part) for part in found.groups()) for found in (own, other)}
    assert set(QUICK_TRITON.values()) == versions
    assert "--ignore tests/executed" not in rules


@pytest.mark.compile
@pytest.mark.parametrize(("kind", "which"), [("wait", 0), ("arrive", 0), ("wait for products", -1)])
def test_what_is_taken_out_is_missed(kind: str, which: int) -> None:
    """The first or last of its kind that ran, in the dense kernel for Hopper."""
    prepared = prepare(CASES["h200"]["dense causal"], "h200")
    outcome, (report,) = prepared.run(SCHEDULES[1])
    assert report.ok and judge(prepared.built, outcome).ok
    code = parse(prepared.launches[0].compiled)
    ran = [at for at, k in synchronizations(code).items() if k == kind and report.executed[at]]
    changed = without(code, ran[which])
    for schedule in SCHEDULES[:3]:
        outcome, (report,) = prepared.run(schedule, {0: changed})
        if not report.ok or not judge(prepared.built, outcome).ok:
            return
    pytest.fail(f"nobody misses {code.code[ran[which]].where}")
