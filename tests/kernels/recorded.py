"""A plugin of pytest: what simulated kernels exercise goes to the folder OPENMLA_EXERCISED.

One file of each process that simulated anything; `exercise.py` reads them.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from gluon_sim import Exercise, recording

FOLDER = "OPENMLA_EXERCISED"
_open = ExitStack()
_exercises: list[Exercise] = []


def pytest_sessionstart() -> None:
    """Begin to record."""
    _exercises.append(_open.enter_context(recording()))


def pytest_sessionfinish() -> None:
    """Write down what was recorded."""
    _open.close()
    for exercise in _exercises:
        if exercise.records:
            path = Path(os.environ[FOLDER]) / f"{os.getpid()}.json"
            path.write_text(exercise.dumps())
