"""A process that has imported what all tests need, and runs pytest in forks of itself.

Its arguments are the names of what it imports. It reads requests, one line of JSON each, and
answers each with a line: the exit status of pytest, or null where it did not end in time. What it
imports ahead is no part of the package under test: a fork finds that on its own path, which is in
front.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import time
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

PAUSE = 0.02


@dataclass(frozen=True)
class Request:
    """One run of pytest."""

    arguments: list[str]
    path: list[str]
    """Folders that are searched first."""
    environment: dict[str, str]
    output: str
    """A file for what it prints."""
    seconds: float
    gib: float = 0.0

    def line(self) -> str:
        """As it is sent."""
        return json.dumps(asdict(self)) + "\n"


_running: list[int] = []


def end_running() -> None:
    """End the processes of the run that is under way."""
    for group in _running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def asked_to_stop(number: int, frame: FrameType | None) -> None:
    """Leave nothing behind."""
    end_running()
    os._exit(128 + number)


def run(request: Request) -> Any:
    """pytest in this process, which does nothing else; never returns."""
    status = 3
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(request.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if request.gib:
            most = int(request.gib * 2**30)
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        os.environ.update(request.environment)
        sys.path[:0] = request.path
        import pytest

        status = int(pytest.main(request.arguments))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def status_of(child: int, seconds: float) -> int | None:
    """The exit status of a process that may take so long."""
    last = time.monotonic() + seconds
    while time.monotonic() < last:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(PAUSE)
    return None


def main() -> None:
    """Answer until nobody asks any more."""
    signal.signal(signal.SIGTERM, asked_to_stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asks ends this process as well
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        request = Request(**json.loads(line))
        child = os.fork()
        if not child:
            run(request)
        _running.append(child)
        status = status_of(child, request.seconds)
        end_running()
        if status is None:
            os.waitpid(child, 0)
        _running.clear()
        print(json.dumps(status), flush=True)


if __name__ == "__main__":
    main()
