"""How a campaign tells the processes that run tests what it wants: the names of variables."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PACKAGE = "OPENMLA_DRAW_PACKAGE"
"""The folder of the package that is tested."""
RESULT = "OPENMLA_DRAW_RESULT"
"""A file for what came of the tests."""
SUITES = "OPENMLA_DRAW_TESTS"
"""The files of tests with their words, as JSON."""
CHOSEN = "OPENMLA_DRAW_CHOSEN"
"""A file with the tests that were chosen for a mutant."""
LINES = "OPENMLA_DRAW_LINES"
"""A folder for the lines that the processes of a test execute."""
RECORDS = "OPENMLA_DRAW_RECORDS"
"""A folder with what is known of single tests, for the next control of the same sources."""
EVERY = "OPENMLA_DRAW_EVERY"
"""Only every so-manieth test of a control is run."""
JOBS = "OPENMLA_DRAW_JOBS"
"""How many tests of a control run at a time."""


def imported_package() -> str:
    """The folder that the tested package was imported from; nothing where it was not."""
    module = sys.modules.get(Path(os.environ[PACKAGE]).name)
    return str(Path(str(module.__file__)).parent) if module else ""
