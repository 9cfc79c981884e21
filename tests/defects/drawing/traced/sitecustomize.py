"""Python runs this at its start: a process that a recorded test begins leaves its lines as well."""

import atexit
import os
from multiprocessing import util
from pathlib import Path

from defects.drawing.environment import LINES, PACKAGE
from defects.drawing.lines import Lines, write

if LINES in os.environ:
    _lines = Lines(os.environ[PACKAGE])

    def leave() -> None:
        """Write down what this process executed so far."""
        write(_lines.taken(), Path(os.environ[LINES]))

    def leave_at_end(_: Lines) -> None:
        """A process that is a fork of this one, as ranks are, ends without what atexit knows."""
        util.Finalize(None, leave, exitpriority=0)

    atexit.register(leave)
    util.register_after_fork(_lines, leave_at_end)
    _lines.begin()
