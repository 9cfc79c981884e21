"""Synchronization taken out of compiled kernels, one at a time: what is needed is missed."""

from __future__ import annotations

from collections import Counter

import pytest

from executed.cases import dense
from openmla.errors import Unsupported
from openmla.testing.case import Case
from openmla.testing.executed.prepare import prepare
from openmla.testing.executed.sensitivity import sensitivity

CASES = {"mi355x": dense(40, 300, heads=1, seed=1)}
REDUNDANT = {
    # The wait behind Q's copies, which a later one covers; the barrier behind the last wait, where
    # every wave only reads what it has waited for itself.
    "mi355x": {"wait for copies": 1, "barrier": 1},
}


@pytest.mark.executed
@pytest.mark.parametrize("target", CASES)
def test_what_is_needed_is_missed(target: str) -> None:
    case: Case = CASES[target]
    try:
        removals = list(sensitivity(prepare(case, target)))
    except Unsupported as error:
        pytest.skip(error.reason)
    assert len(removals) > sum(REDUNDANT[target].values())
    assert Counter(r.kind for r in removals if not r.noticed) == REDUNDANT[target]
