"""Lines of the Gluon source, from the debug locations that the compiler leaves in its text."""

from __future__ import annotations

import re

from gluon_sim.compiled.core.report import Location

_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?', re.M)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_CALLER = re.compile(r"@\[ ([^\s:]+:\d+)")


class SourceLines:
    """Follows `.loc` directives through a text; `at` is the place of an instruction.

    >>> lines = SourceLines('.file 1 "/kernels" "dense.py"')
    >>> lines.see(".loc 1 62 12")
    >>> str(lines.at("s_barrier", 7))
    'dense.py:62: s_barrier (line 7)'
    """

    def __init__(self, text: str) -> None:
        self._files = {
            number: f"{folder}/{name}" if name else folder
            for number, folder, name in _FILE.findall(text)
        }
        self._now: tuple[str, int, tuple[str, ...]] = ("", 0, ())

    def see(self, directive: str) -> None:
        """Take note of a directive, if it is a location. Line 0 means that none is known."""
        found = _LOC.search(directive)
        if found and int(found[2]):
            callers = tuple(_CALLER.findall(directive))  # in a comment behind it
            self._now = (self._files.get(found[1], ""), int(found[2]), callers)

    def at(self, text: str, line: int) -> Location:
        """The place of an instruction at this line of the compiled text."""
        return Location(" ".join(text.split()), line, *self._now)
