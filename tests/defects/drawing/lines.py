"""Which lines of the package a process executes, device code in the simulator included.

The simulator and Triton's interpreter compile kernels again from their source, but under the names
of the same files and with the same lines: what Python traces is what stands in the text.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

TRACED = str(Path(__file__).with_name("traced"))
"""On the path of Python, it records the lines of every process that starts."""

Executed = Mapping[str, list[int]]
"""Lines by file below the package."""


class Lines:
    """A recorder of lines; it follows all threads that begin after it."""

    def __init__(self, package: str) -> None:
        self._package = package + os.sep
        self._lines: dict[str, set[int]] = {}
        self._local: dict[str, Any] = {}
        """What traces the frames of a file; None for files that are not of the package."""

    def begin(self) -> None:
        """Record from here on."""
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def taken(self) -> Executed:
        """The lines since the last time that somebody asked."""
        found = {file: sorted(lines) for file, lines in self._lines.items() if lines}
        for lines in self._lines.values():
            lines.clear()
        return found

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        try:
            return self._local[file]
        except KeyError:
            self._local[file] = found = self._tracer(file)
            return found

    def _tracer(self, file: str) -> Any:
        if not file.startswith(self._package):
            return None
        lines = self._lines.setdefault(file.removeprefix(self._package).replace(os.sep, "/"), set())

        def executed(frame: FrameType, event: str, argument: Any) -> Any:
            lines.add(frame.f_lineno)
            return executed

        return executed


def write(executed: Executed, folder: Path) -> None:
    """Leave what this process executed."""
    (folder / f"lines-{os.getpid()}.json").write_text(json.dumps(executed))


def together(parts: list[Executed]) -> Executed:
    """What several processes executed."""
    found: dict[str, set[int]] = {}
    for part in parts:
        for file, lines in part.items():
            found.setdefault(file, set()).update(lines)
    return {file: sorted(lines) for file, lines in found.items()}
