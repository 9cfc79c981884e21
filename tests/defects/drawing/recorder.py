"""A plugin of pytest for the control: each test runs in a process of its own, and is recorded.

The tests are collected once; then each is run by a fork of that process, so that no test profits
from what another has cached. Which lines of the package it executed, how long it took and what came
of it goes to a file of its own in OPENMLA_DRAW_RECORDS; a test that has one is not run again.
Tests that `make test` leaves to `make test-all` are left out here too.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from defects.drawing.environment import (
    EVERY,
    JOBS,
    LINES,
    PACKAGE,
    RECORDS,
    RESULT,
    imported_package,
)
from defects.drawing.lines import TRACED, Lines, together, write

ENDED = "ended.json"
LATER = ("long", "seeded", "executed")
"""Marks of tests that `make test` leaves out."""

_lines = Lines(os.environ[PACKAGE])
_lines.begin()
_collected: list[str] = []
"""All tests, also those that do not run here."""


def alone(item: pytest.Item, folder: Path) -> None:
    """Run one test in this process, and leave what came of it in `folder`."""
    os.environ[LINES] = str(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([TRACED, os.environ.get("PYTHONPATH", "")])
    _lines.taken()
    started = time.monotonic()
    reports = runtestprotocol(item, log=False, nextitem=None)
    seconds = time.monotonic() - started
    write(_lines.taken(), folder)
    failed = [report.longreprtext for report in reports if report.failed]
    passed = any(report.when == "call" and report.passed for report in reports)
    ended = {"failed": failed, "passed": passed, "seconds": seconds}
    (folder / ENDED).write_text(json.dumps(ended))


def forked(item: pytest.Item, folder: Path) -> int:
    """The number of a process that runs a test."""
    folder.mkdir()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            alone(item, folder)
        finally:
            os._exit(0)
    return child


def told(item: pytest.Item, folder: Path) -> dict[str, Any]:
    """What came of a test."""
    ended: dict[str, Any] = {"failed": ["its process died"], "passed": False, "seconds": 0.0}
    if (folder / ENDED).exists():
        ended = json.loads((folder / ENDED).read_text())
    parts = [json.loads(path.read_text()) for path in sorted(folder.glob("lines-*.json"))]
    return {"name": item.nodeid, **ended, "lines": together(parts)}


def record_of(name: str) -> Path:
    """The file of a test among the records."""
    number = hashlib.sha256(name.encode()).hexdigest()[:32]
    return Path(os.environ[RECORDS]) / f"{number}.json"


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported is the end of a control."""
    if report.failed:
        leave([], failed={report.nodeid: report.longreprtext})


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep what `make test` runs."""
    _collected.extend(item.nodeid for item in items)
    items[:] = [item for item in items if not any(map(item.get_closest_marker, LATER))]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run all tests that have no record, several at a time, until one fails."""
    if session.testsfailed:
        return None
    remember_import()
    known = {item.nodeid for item in session.items if record_of(item.nodeid).exists()}
    sample = session.items[:: int(os.environ[EVERY])]
    waiting = [item for item in reversed(sample) if item.nodeid not in known]
    names = [item.nodeid for item in session.items if item in sample or item.nodeid in known]
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    running: dict[int, tuple[pytest.Item, Path]] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as place:
        while running or waiting:
            while waiting and len(running) < int(os.environ[JOBS]):
                item, folder = waiting.pop(), Path(place) / str(len(waiting))
                running[forked(item, folder)] = item, folder
            child, _ = os.wait()
            if child not in running:
                continue
            item, folder = running.pop(child)
            ended = told(item, folder)
            if ended["failed"]:
                failed[item.nodeid] = "\n".join(ended["failed"])
                waiting.clear()
            else:
                record_of(item.nodeid).write_text(json.dumps(ended))
    leave(names, failed)
    return True


def remember_import() -> None:
    """Add the lines that ran before any test to what is known of them."""
    path = record_of("import")
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(together([before, _lines.taken()])))


def leave(names: list[str], failed: dict[str, str]) -> None:
    """Write down what was run."""
    whole = {
        "package": imported_package(),
        "at_import": str(record_of("import")),
        "tests": {name: str(record_of(name)) for name in names},
        "collected": _collected,
        "failed": failed,
    }
    Path(os.environ[RESULT]).write_text(json.dumps(whole))
