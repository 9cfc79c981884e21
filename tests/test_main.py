"""`python -m openmla` is the `openmla` command."""

from __future__ import annotations

import subprocess
import sys

import pytest

from openmla.cli import COMMANDS, main
from openmla.lab import prediction

SIMULATOR = ": pip install 'openmla[sim]', or in a clone: pip install ./gluon-sim"


def test_help_lists_every_command():
    command = [sys.executable, "-m", "openmla", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr
    assert [name for name in COMMANDS if name not in done.stdout] == []


def run_without(module: str, arguments: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """What the command ends with where a module is not installed: a text is an error's."""
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(sys, "argv", ["openmla", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.mark.parametrize("module", ["typer", "rich"])
@pytest.mark.parametrize("arguments", ["", "--help", *COMMANDS])
def test_without_the_extra_of_the_command_line_one_line_names_it(
    module: str, arguments: str, monkeypatch: pytest.MonkeyPatch
):
    line = run_without(module, arguments, monkeypatch)
    assert isinstance(line, str) and "\n" not in line
    assert line.startswith("openmla needs packages for the command line (")
    assert module in line and line.endswith(
        ": pip install 'openmla[cli]', or in a clone: pip install '.[cli]'"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        "check --simulate --target h200",
        "check --execute --target h200",
        "validate --simulate --target b200",
        "explain --compiled --target h200",
    ],
)
def test_without_the_simulator_one_line_names_its_extra(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    line = run_without("gluon_sim", arguments, monkeypatch)
    command, option = arguments.split()[:2]
    assert isinstance(line, str) and "\n" not in line
    assert line.startswith(f"openmla {command} {option} needs gluon-sim (")
    assert line.endswith(SIMULATOR)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("target", ["h200", "a100"])
def test_explain_says_what_a_prediction_needs(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """All else is printed; where no kernel is modeled, an extra would not help."""
    prediction._timed.cache_clear()
    assert run_without("gluon_sim", f"explain --target {target}", monkeypatch) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("no prediction: ")
    assert last.endswith(SIMULATOR) == (target == "h200")
