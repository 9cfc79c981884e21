"""Every malformed call is refused, with a message that names argument, expectation and value."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from malformed.arguments import CALLS, Malformed, arguments_of, judge
from malformed.table import ENTRIES


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_refused_before_any_work(entry: Malformed):
    assert judge(entry) == ""


@pytest.mark.parametrize("name", CALLS)
def test_the_unchanged_call_is_accepted(name: str):
    """Otherwise its entries would prove nothing."""
    function, valid, _ = CALLS[name]
    function(**valid())
    function(**arguments_of(Malformed(name, "", "", "", change={})))


def test_every_call_is_covered_and_no_entry_stands_twice():
    assert len(ENTRIES) >= 150
    assert {entry.call for entry in ENTRIES} == set(CALLS)
    assert [str(e) for e, n in Counter(map(str, ENTRIES)).items() if n > 1] == []


def test_all_are_refused_without_assertions_too():
    """`python -O` removes assert statements; checks must not depend on them."""
    done = subprocess.run(
        [sys.executable, "-O", "-m", "malformed.table"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ENTRIES)} of {len(ENTRIES)} refused" in done.stdout
