"""`openmla check` with a case that is wrong and one that never ends: what Ctrl-C is tried on."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import typer

from openmla.cli import check
from openmla.lab.testing.build import BuiltCase
from openmla.lab.testing.fuzz import run_fuzz

WRONG, ENDLESS = 601, 602
FOREVER = 600.0
"""Seconds. No limit of a case comes before Ctrl-C, however busy the machine."""


def implementation(built: BuiltCase) -> Any:
    """As a kernel that waits for a signal that never comes; a file says whose process it is."""
    if built.case.seed == ENDLESS:
        Path(os.environ["OPENMLA_TEST_ENDLESS"]).write_text(str(os.getpid()))
        time.sleep(FOREVER)
    outcome = built.run()
    if built.case.seed == WRONG:
        outcome.out.add_(1)
    return outcome


if __name__ == "__main__":
    check.run_fuzz = partial(
        run_fuzz, implementation="interrupted_run:implementation", seconds_per_case=FOREVER
    )
    app = typer.Typer()
    app.command()(check.check_command)
    app()
