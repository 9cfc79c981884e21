"""Synchronization taken out of compiled kernels, one at a time: what is needed is missed."""

from __future__ import annotations

import pytest

from executed.redundant import REDUNDANT, Redundant, unexplained
from executed.removals import CASES, SCHEDULE_OF
from gluon_sim.compiled import Location
from openmla.errors import Unsupported
from openmla.lab.testing.executed.prepare import prepare
from openmla.lab.testing.executed.sensitivity import Removal, sensitivity

LEAST = 0.95
"""The share of what a kernel needs whose removal is noticed."""


@pytest.mark.executed
@pytest.mark.parametrize(
    ("target", "name"), [(target, name) for target, cases in CASES.items() for name in cases]
)
def test_what_is_needed_is_missed(target: str, name: str) -> None:
    try:
        prepared = prepare(CASES[target][name], target)
    except Unsupported as error:
        pytest.skip(error.reason)
    removals = list(sensitivity(prepared, len(prepared.launches) - 1, SCHEDULE_OF[target]))
    missed = unexplained(target, removals)
    needed = sum(bool(removal.noticed) for removal in removals) + len(missed)
    assert needed >= 5
    assert len(missed) <= (1 - LEAST) * needed, [f"{r.kind}: {r.where}" for r in missed]


def test_the_table_explains_only_what_it_lists():
    place = Location("mbarrier.try_wait", 7, "/kernels/load.py", 3)
    (entry,) = [r for r in REDUNDANT["b200"] if (r.kind, r.file) == ("wait", "load.py")]
    assert isinstance(entry, Redundant) and entry.most == 1
    silent, noticed = Removal("wait", place, ""), Removal("wait", place, "deadlock")
    assert unexplained("b200", [silent, noticed]) == []
    assert unexplained("b200", [silent, silent]) == [silent]
    assert unexplained("b200", [Removal("arrive", place, "")]) != []
