"""Python runs this at its start: a process that a recorded test begins leaves its lines as well."""

import atexit
import os
from pathlib import Path

from defects.drawing.environment import LINES, PACKAGE
from defects.drawing.lines import Lines, write

if LINES in os.environ:
    _lines = Lines(os.environ[PACKAGE])
    atexit.register(lambda: write(_lines.taken(), Path(os.environ[LINES])))
    _lines.begin()
