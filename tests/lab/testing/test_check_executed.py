"""`openmla check --execute`: what it draws, counts and prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from openmla.cli import check_drawn
from openmla.cli.check import check_command
from openmla.dispatch import triton_version
from openmla.errors import Unsupported
from openmla.kernels.launch import calls
from openmla.lab.testing.build import build
from openmla.lab.testing.case import Case
from openmla.lab.testing.executed import check as executed
from openmla.lab.testing.executed.prepare import planned
from openmla.lab.testing.result import Result
from openmla.lab.testing.simulate import FAMILIES, new_results, plan_on
from openmla.lab.testing.simulate.draw import simulated_case
from openmla.lab.testing.simulate.fuzz import MOST_REFUSED, run_simulated

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


def is_simulated(case: Case, target: str, deep: bool) -> Result:
    """Whether the simulator would run a case, without running it."""
    built = build(case)
    results = new_results(built)
    list(calls(plan_on(target, built.operands, results), built.operands, results))
    return Result("right")


def is_executed(case: Case, target: str, deep: bool) -> Result:
    """Whether a case would be compiled and executed, without that."""
    planned(build(case), target)
    return Result("right")


@pytest.mark.parametrize("seed", [0, 1000, 123456])
@pytest.mark.parametrize("check", [is_simulated, is_executed])
@pytest.mark.parametrize("target", FAMILIES)
def test_as_many_cases_run_as_were_asked_for(target: str, check: Any, seed: int) -> None:
    if check is is_executed and target == "mi355x" and triton_version() < (3, 8):
        pytest.skip("Triton 3.8 is the first that compiles kernels for CDNA4")
    report = run_simulated(5, seed, target, check=check)
    assert report.ok and report.right == 5
    assert report.cases == 5 + report.refused.total()


def test_a_few_refusals_in_a_row_are_no_reason_to_end() -> None:
    """Where one case is asked for, the first 40 that are drawn may be refused."""
    seen = []

    def check(case: Case, target: str, deep: bool) -> Result:
        seen.append(case)
        if len(seen) <= 40:
            raise Unsupported("not this one")
        return Result("right")

    report = run_simulated(1, 0, "mi355x", check=check)
    assert report.ok and report.refused == {"not this one": 40}


def test_a_family_that_serves_nothing_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def refuses(case: Case, *_: Any) -> Result:
        asked.append(case)
        raise Unsupported("d_v 7: 16 is served" if len(asked) % 3 else "topk 0: not served")

    monkeypatch.setattr(executed, "check_executed", refuses)
    result = invoke("--target", "h200", "--cases", "4")
    assert result.exit_code == 1 and len(asked) == MOST_REFUSED
    assert "nothing ran" in result.output
    assert "refused: 100, 67 of them because: d_v #: # is served" in result.output


def test_a_run_that_finds_too_few_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuses(case: Case, *_: Any) -> Result:
        asked.append(case)
        if len(asked) > 2:
            raise Unsupported("no more")
        return Result("right")

    monkeypatch.setattr(executed, "check_executed", refuses)
    result = invoke("--target", "h200", "--cases", "4")
    assert result.exit_code == 1 and "only 2 of 4 cases ran" in result.output
    assert "100 of them because: no more" in result.output


def test_a_triton_that_compiles_none_of_the_kernels_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check_drawn, "triton_version", lambda: (3, 6))
    result = invoke("--target", "mi355x", "--cases", "4")
    assert result.exit_code == 2
    words = " ".join(result.output.replace("│", " ").split())
    assert "Triton 3.8 is the first that compiles kernels for mi355x" in words


@pytest.mark.parametrize("target", ["h200", "mi355x"])
def test_a_case_is_executed(target: str, tmp_path: Path) -> None:
    if target == "mi355x" and triton_version() < (3, 8):
        pytest.skip("Triton 3.8 is the first that compiles kernels for CDNA4")
    record = tmp_path / "report.json"
    result = invoke("--target", target, "--cases", "1", "--seed", "5", "--json", str(record))
    assert result.exit_code == 0, result.output
    assert json.loads(record.read_text())["right"] == 1


def test_a_saved_case_is_executed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        executed, "check_executed", lambda *_: Result("failed", "fault", "deadlock at dense.py:7")
    )
    invoke("--target", "h200", "--cases", "1", "--save-dir", str(tmp_path))
    (saved, *_) = tmp_path.glob("h200/*.json")
    result = invoke("--target", "h200", "--replay", str(saved))
    assert result.exit_code == 1 and "deadlock at dense.py:7" in result.output
    again = f"openmla check --execute --target h200 --replay {saved}"
    assert again in result.output.replace("\n", "")


def test_a_fault_fails_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        executed,
        "check_executed",
        lambda *_: Result("failed", "fault", "deadlock at dense.py:7"),
    )
    result = invoke("--target", "h200", "--cases", "3", "--save-dir", str(tmp_path))
    assert result.exit_code == 1
    assert "deadlock at dense.py:7" in result.output and "compiled for sm90" in result.output


@pytest.mark.parametrize("arguments", [[], ["--target", "a100"]])
def test_mistakes_are_named(arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "h200, b200, mi355x" in " ".join(result.output.replace("│", " ").split())
