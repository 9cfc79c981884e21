"""`openmla check --execute`: what it draws, counts and prints."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from openmla.cli.check import check_command
from openmla.errors import Unsupported
from openmla.testing.checker import Result
from openmla.testing.executed import check as executed
from openmla.testing.simulate.draw import simulated_case
from openmla.testing.simulate.fuzz import run_simulated

app = typer.Typer()
app.command()(check_command)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["--execute", *arguments])


def test_what_runs_and_what_is_refused_is_counted() -> None:
    seen = []

    def check(case: Any, target: str, deep: bool) -> Result:
        seen.append(case)
        if len(seen) % 2:
            raise Unsupported(f"no kernel for case {len(seen)}")
        return Result("right", bound=0.25 * len(seen))

    report = run_simulated(2, 7, "b200", check=check)
    assert report.ok and report.cases == 4 and report.worst["bound"] == 1.0
    assert report.refused == {"no kernel for case #": 2}
    assert seen == [simulated_case("b200", seed) for seed in (7, 8, 9, 10)]


def test_a_fault_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        executed,
        "check_executed",
        lambda *_: Result("failed", "fault", "deadlock at dense.py:7"),
    )
    result = invoke("--target", "h200", "--cases", "3")
    assert result.exit_code == 1
    assert "deadlock at dense.py:7" in result.output and "compiled for sm90" in result.output


@pytest.mark.parametrize("arguments", [[], ["--target", "a100"]])
def test_mistakes_are_named(arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "expected one of h200, b200, mi355x" in " ".join(result.output.replace("│", " ").split())
