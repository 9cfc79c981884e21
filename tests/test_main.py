"""`python -m openmla` is the `openmla` command."""

from __future__ import annotations

import subprocess
import sys

from openmla.cli import COMMANDS


def test_help_lists_every_command():
    command = [sys.executable, "-m", "openmla", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr
    assert [name for name in COMMANDS if name not in done.stdout] == []
