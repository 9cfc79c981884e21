"""Every result file says where its figures come from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks/results"
FILES = sorted(RESULTS.glob("*.json"))
# What files of the first day do not have, and cannot be given any more. No file is added here.
MISSING = {
    "cpu-2026-11-15": {"commit"},
    "hopper-dense-h200-2026-11-15": {"commit", "clocks"},
    "hopper-fp8-h200-2026-11-15": {"clocks"},
    "hopper-sparse-h200-2026-11-15": {"clocks"},
    "portable-h200-2026-11-15": {"commit"},
}


def missing(record: dict[str, Any]) -> set[str]:
    """What a record does not say of date, commit, command, versions, machine and clocks."""
    given = record.get("provenance", record)
    text = json.dumps({k: v for k, v in given.items() if isinstance(v, str)})
    lacks = {
        name for name in ("date", "commit", "command", "torch", "python") if not given.get(name)
    }
    if "processor" in given:
        return lacks | ({"threads"} - set(given))
    lacks |= {name for name in ("gpu", "triton") if not given.get(name)}
    return lacks | (set() if re.search(r"\d+ MHz", text) else {"clocks"})


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_it_carries_commit_versions_clocks_and_command(path: Path):
    assert missing(json.loads(path.read_text())) == MISSING.get(path.stem, set())


def test_names_end_in_the_date_of_the_run():
    for path in FILES:
        given = json.loads(path.read_text())
        assert path.stem.endswith(given.get("provenance", given)["date"][:10])


def test_a_record_that_says_nothing_is_caught():
    assert missing({}) >= {"date", "commit", "command", "torch", "python", "gpu", "clocks"}
