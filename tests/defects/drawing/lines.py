"""Which lines of the package a process executes, device code in the simulator included.

The simulator and Triton's interpreter compile kernels again from their source, but under the names
of the same files and with the same lines: what Python traces is what stands in the text.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

TRACED = str(Path(__file__).with_name("traced"))
"""On the path of Python, it records the lines of every process that starts."""

Executed = Mapping[str, list[int]]
"""Lines by file below the package."""


class Lines:
    """A recorder of lines; it follows all threads that begin after it.

    Code whose lines have all been seen is no longer followed.
    """

    def __init__(self, package: str) -> None:
        self._package = package + os.sep
        self._lines: dict[str, set[int]] = {}
        self._inside: dict[str, bool] = {}
        """Whether a file is of the package."""
        self._tracers: dict[int, Tracer] = {}
        """By the number of the code: functions of equal code are equal."""

    def begin(self) -> None:
        """Record from here on."""
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def taken(self) -> Executed:
        """The lines since the last time that somebody asked."""
        found = {file: sorted(lines) for file, lines in self._lines.items() if lines}
        self._lines.clear()
        self._tracers.clear()
        return found

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        file = code.co_filename
        if file not in self._inside:
            self._inside[file] = file.startswith(self._package)
        if not self._inside[file]:
            return None
        tracer = self._tracers.get(id(code))
        if tracer is None:
            short = file.removeprefix(self._package).replace(os.sep, "/")
            tracer = Tracer(code, self._lines.setdefault(short, set()))
            self._tracers[id(code)] = tracer
        return tracer.executed if tracer.unseen else None


class Tracer:
    """What follows the frames of one function."""

    def __init__(self, code: CodeType, lines: set[int]) -> None:
        self._code, self._lines = code, lines
        lines.add(code.co_firstlineno)
        self.unseen = {line for _, _, line in code.co_lines() if line} - lines

    def executed(self, frame: FrameType, event: str, argument: Any) -> Any:
        """A line is executed."""
        self._lines.add(frame.f_lineno)
        self.unseen.discard(frame.f_lineno)
        return self.executed


def write(executed: Executed, folder: Path) -> None:
    """Leave what this process executed. One that ends after its test, as those that only watch over
    others may, is not waited for: it leaves all of its lines or none."""
    unfinished = folder / f"{os.getpid()}.part"
    with contextlib.suppress(FileNotFoundError):  # the folder of a test goes with the control
        unfinished.write_text(json.dumps(executed))
        os.replace(unfinished, folder / f"lines-{os.getpid()}.json")


def together(parts: list[Executed]) -> Executed:
    """What several processes executed."""
    found: dict[str, set[int]] = {}
    for part in parts:
        for file, lines in part.items():
            found.setdefault(file, set()).update(lines)
    return {file: sorted(lines) for file, lines in found.items()}
