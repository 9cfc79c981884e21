"""A plugin of pytest for the control: each test runs in a process of its own, and is recorded.

The tests are collected once; then each is run by a fork of that process, so that no test profits
from what another has cached. Which lines of the package it executed, how long it took and what came
of it goes to the file OPENMLA_DRAW_RESULT.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from defects.drawing.environment import JOBS, LINES, PACKAGE, RESULT, imported_package
from defects.drawing.lines import TRACED, Lines, together, write

ENDED = "ended.json"

_lines = Lines(os.environ[PACKAGE])
_lines.begin()


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


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported is the end of a control."""
    if report.failed:
        told = {"name": report.nodeid, "failed": [report.longreprtext]}
        leave([{**told, "passed": False, "seconds": 0.0, "lines": {}}])


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run all tests, several at a time, until one fails."""
    if session.testsfailed:
        return None
    at_import = _lines.taken()
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    tests: list[dict[str, Any]] = []
    running: dict[int, tuple[pytest.Item, Path]] = {}
    waiting = list(reversed(session.items))
    with tempfile.TemporaryDirectory() as place:
        while running or waiting:
            while waiting and len(running) < int(os.environ[JOBS]):
                item, folder = waiting.pop(), Path(place) / str(len(waiting))
                running[forked(item, folder)] = item, folder
            child, _ = os.wait()
            if child in running:
                tests.append(told(*running.pop(child)))
                if tests[-1]["failed"]:
                    waiting.clear()
                    session.testsfailed += 1
    leave(tests, at_import)
    return True


def leave(tests: list[dict[str, Any]], at_import: Any = ()) -> None:
    """Write down what was run."""
    whole = {"package": imported_package(), "at_import": dict(at_import), "tests": tests}
    Path(os.environ[RESULT]).write_text(json.dumps(whole))
