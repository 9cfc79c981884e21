"""`openmla check --simulate`: what it prints, saves and replays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from openmla.cli.check import check_command
from openmla.lab.testing import simulate
from openmla.lab.testing.case import Case

app = typer.Typer()
app.command()(check_command)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["--simulate", *arguments])


def test_a_clean_run_says_what_ran_and_what_was_refused(tmp_path: Path) -> None:
    result = invoke("--target", "h200", "--cases", "4", "--seed", "3", "--save-dir", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert (
        "hopper kernels for h200" in result.output
        and "every case is right or refused" in result.output
    )
    assert "with poisoned memory" in result.output and "hopper" in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_failure_is_shown_saved_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*arguments: Any) -> Any:
        raise AssertionError("width")

    monkeypatch.setattr(simulate, "calls", crash)
    result = invoke(
        "--target", "mi355x", "--cases", "1", "--seed", "3", "--save-dir", str(tmp_path)
    )
    assert result.exit_code == 1 and "AssertionError: width" in result.output
    (saved,) = tmp_path.glob("mi355x/*.json")
    assert f"--replay {saved}" in result.output.replace("\n", "")
    assert invoke("--target", "mi355x", "--replay", str(saved)).exit_code == 1
    monkeypatch.undo()
    again = invoke("--target", "mi355x", "--replay", str(saved))
    assert again.exit_code == 0 and "nothing wrong" in again.output


def test_a_saved_case_that_is_refused_today_is_no_failure(tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    case = Case("dense", 1, 64, 32, 64, q_lens=(5,), k_lens=(33,), dtype="fp32")
    path.write_text(json.dumps({"case": case.to_json()}))
    result = invoke("--target", "h200", "--replay", str(path))
    assert result.exit_code == 0 and "refused" in result.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "one of h200, b200, mi355x"),
        (["--target", "a100"], "--simulate takes h200, b200, mi355x"),
        (["--target", "h200", "--replay", "missing.json"], "missing.json is not a saved case"),
    ],
)
def test_mistakes_are_named(arguments: list[str], named: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert named in " ".join(result.output.replace("│", " ").split())
