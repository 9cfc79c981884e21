"""Ctrl-C: children end at once, and what ran until then is printed and written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from openmla.cli import check
from openmla.lab.testing.fuzz import Interrupted, run_fuzz
from openmla.lab.testing.result import Result
from openmla.lab.testing.simulate import fuzz as simulated

SCRIPT = Path(__file__).with_name("interrupted_run.py")
PATIENCE = 180.0
"""Seconds: for imports on a busy machine. The endless case takes longer than that."""
app = typer.Typer()
app.command()(check.check_command)


def wait_for(what: Callable[[], bool]) -> None:
    """Until something is so."""
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.05)


def is_running(process: int) -> bool:
    """Whether a process is there and is no zombie."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("jobs", "to_all"), [(0, False), (2, False), (2, True)], ids=["here", "children", "everybody"]
)
def test_what_ran_is_shown_and_written(jobs: int, to_all: bool, tmp_path: Path) -> None:
    """A terminal sends the signal to all processes, `kill` to one."""
    endless, failures, record = (tmp_path / name for name in ("endless", "failures", "report.json"))
    command = [
        sys.executable,
        str(SCRIPT),
        "--cases",
        "50",
        "--seed",
        "601",
        "--jobs",
        str(jobs),
        "--save-dir",
        str(failures),
        "--json",
        str(record),
    ]
    found = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OPENMLA_TEST_ENDLESS": str(endless), "PYTHONPATH": found},
        start_new_session=True,
        # A shell that runs tests in the background has them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_for(lambda: endless.exists() and bool(endless.read_text()))
        wait_for(lambda: any(failures.glob("*.json")))
        assert process.poll() is None
        (os.killpg if to_all else os.kill)(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert not is_running(int(endless.read_text()))
    assert "interrupted after" in output and "accuracy dense" in output.replace("\n", " "), output
    assert "Traceback" not in output
    written = json.loads(record.read_text())
    assert written["interrupted"] and not written["ok"] and 1 <= written["cases"] < 50
    assert [failure["found_as"]["seed"] for failure in written["failures"]] == [601]


def test_a_run_from_python_still_ends_with_a_keyboard_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupts(self: Any, case: Any, deep: bool) -> Result:
        if case.seed == 3:
            raise KeyboardInterrupt
        return Result("right")

    monkeypatch.setattr("openmla.lab.testing.checker.Checker.result", interrupts)
    with pytest.raises(KeyboardInterrupt) as caught:
        run_fuzz(cases=9, seed=0)
    assert isinstance(caught.value, Interrupted)
    report = caught.value.report
    assert report.interrupted and not report.ok and (report.cases, report.right) == (3, 3)


@pytest.mark.parametrize("option", ["--simulate", "--execute"])
def test_a_simulated_run_likewise(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def interrupts(case: Any, target: str, deep: bool = True) -> Result:
        seen.append(case)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return Result("right")

    monkeypatch.setattr("openmla.lab.testing.simulate.check_simulated", interrupts)
    monkeypatch.setattr("openmla.lab.testing.executed.check.check_executed", interrupts)
    record = tmp_path / "report.json"
    result = CliRunner().invoke(app, [option, "--target", "h200", "--json", str(record)])
    assert result.exit_code == 130 and "interrupted after 2 cases" in result.output, result.output
    written = json.loads(record.read_text())
    assert written["interrupted"] and not written["ok"] and written["right"] == 2
    assert simulated.FAMILIES["h200"] == written["backend"]


def test_calls_of_the_indexer_likewise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = check.check_index_call

    def interrupts(seed: int, backend: str, device: str) -> Any:
        if seed == 1:
            raise KeyboardInterrupt
        return real(seed, backend, device)

    monkeypatch.setattr(check, "check_index_call", interrupts)
    record = tmp_path / "report.json"
    result = CliRunner().invoke(app, ["--cases", "10", "--json", str(record)])
    assert result.exit_code == 130 and "1 calls of the indexer: 1 right" in result.output
    written = json.loads(record.read_text())
    assert written["right"] == 10 and written["indexer"]["interrupted"] and not written["ok"]
