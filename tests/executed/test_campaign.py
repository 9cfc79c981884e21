"""The recorded campaign: every case right under every schedule, and every note explained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from executed.campaign import draws, profile, variant
from executed.cases import CASES

RESULTS = {
    path.stem: json.loads(path.read_text())["cases"]
    for path in Path(__file__).with_name("results").glob("*.json")
}
README = Path(__file__).parents[2] / "gluon-sim/src/gluon_sim/compiled/README.md"
SCHEDULES = 5


@pytest.mark.parametrize("target", CASES)
def test_every_case_was_right_under_every_schedule(target: str):
    assert len(RESULTS[target]) >= len(CASES[target])
    for case, line in RESULTS[target].items():
        assert line["status"] == "right" and line["runs"] >= SCHEDULES, case


def test_every_note_is_explained():
    """Notes are no faults: the interpreters' table says why."""
    noted = {
        note for lines in RESULTS.values() for line in lines.values() for note in line["notes"]
    }
    text = README.read_text()
    assert noted and [note for note in noted if f"| {note} |" not in text] == []


def test_cases_differ_and_share_compiled_kernels():
    drawn = list(draws("h200", 4, 2))
    assert len(drawn) == 4 and len({profile(case) for case in drawn}) == 2
    assert len({variant(case, "h200") for case in drawn}) == 2
