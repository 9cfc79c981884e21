"""A plugin of pytest for a mutant: the tests that were chosen for it, in their order.

OPENMLA_DRAW_CHOSEN names a file with the seconds that each chosen test may take, and with all tests
that the control saw: a test that it did not see is there because of the change, and runs as well.
What became of them goes to the file OPENMLA_DRAW_RESULT.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from defects.drawing.environment import CHOSEN, RESULT, imported_package

_passed: list[str] = []
_failed: list[str] = []
_limits: dict[str, float] = {}


class TakesTooLong(BaseException):
    """A test on a mutant takes far longer than on the kernel; nothing in it may catch this."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what was chosen, and what the control did not see."""
    asked = json.loads(Path(os.environ[CHOSEN]).read_text())
    _limits.update(asked["limits"])
    places = {name: i for i, name in enumerate(_limits)}
    known = set(asked["known"])
    kept = [item for item in items if item.nodeid in places or item.nodeid not in known]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = sorted(kept, key=lambda item: places.get(item.nodeid, len(places)))


def _stop(number: int, frame: FrameType | None) -> None:
    raise TakesTooLong


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[Any]:
    """A test that hangs fails."""
    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, _limits.get(item.nodeid, 0.0))
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported fails."""
    if report.failed:
        _failed.append(report.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what became of a test."""
    if report.failed:
        hangs = TakesTooLong.__name__ in report.longreprtext
        _failed.append(report.nodeid + (", which hangs" if hangs else ""))
    elif report.when == "call" and report.passed:
        _passed.append(report.nodeid)


def pytest_sessionfinish() -> None:
    """Write down what was run."""
    whole = {"package": imported_package(), "passed": len(_passed), "failed": _failed}
    Path(os.environ[RESULT]).write_text(json.dumps(whole))
