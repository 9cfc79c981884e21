"""Files that commands write: one that cannot be written is refused before anything runs."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from openmla.cli import bench, check, check_drawn, plan, reports, validate
from openmla.cli.compile import compile_command
from openmla.lab.progress import progress
from openmla.lab.testing.checker import Checker
from openmla.lab.testing.fuzz import FuzzReport

# Command, its arguments, the option that takes a path, and the names that do the work.
FILES: dict[str, tuple[Callable[..., None], list[str], str, list[str]]] = {
    "check": (check.check_command, [], "json", ["openmla.cli.check.run_fuzz"]),
    "check --simulate": (
        check.check_command,
        ["--simulate", "--target", "h200"],
        "json",
        ["openmla.cli.check.run_drawn"],
    ),
    "check --execute": (
        check.check_command,
        ["--execute", "--target", "h200"],
        "json",
        ["openmla.cli.check.run_drawn"],
    ),
    "validate": (
        validate.validate_command,
        ["--simulate", "--target", "h200"],
        "json",
        ["openmla.cli.validate.validate"],
    ),
    "bench --json": (bench.bench_command, ["cpu"], "json", ["openmla.cli.bench._run"]),
    "bench --plot": (bench.bench_command, ["few"], "plot", ["openmla.cli.bench._run"]),
    "plan": (plan.plan_command, [], "html", ["openmla.cli.plan.plan"]),
}
FOLDERS: dict[str, tuple[Callable[..., None], list[str], str, list[str]]] = {
    "check": (check.check_command, [], "save-dir", ["openmla.cli.check.run_fuzz"]),
    "compile": (compile_command, [], "update", ["openmla.lab.compiling.table.compile_all"]),
}


def refusal(
    command: tuple[Callable[..., None], list[str], str, list[str]],
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """What a command says of a path, before it does anything."""
    function, arguments, option, work = command

    def runs(*arguments: Any, **options: Any) -> None:
        raise AssertionError("something ran")

    for name in work:
        monkeypatch.setattr(name, runs)
    app = typer.Typer()
    app.command()(function)
    result = CliRunner().invoke(app, [*arguments, f"--{option}", str(path)], env={"COLUMNS": "400"})
    assert result.exit_code == 2, (result.output, result.exception)
    assert f"{option}: " in result.output
    return result.output


@pytest.mark.parametrize("command", FILES)
def test_a_folder_is_no_file(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is a folder, not a file" in refusal(FILES[command], tmp_path, monkeypatch)


@pytest.mark.parametrize("command", FILES)
def test_a_file_needs_a_folder(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    said = refusal(FILES[command], tmp_path / "file" / "report", monkeypatch)
    assert "there is no folder" in said or "is a file, not a folder" in said
    if not command.startswith("bench"):  # which makes folders
        missing = refusal(FILES[command], tmp_path / "none" / "report", monkeypatch)
        assert "there is no folder" in missing


@pytest.mark.parametrize("command", FILES)
def test_a_file_that_cannot_be_opened(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "cannot write" in refusal(FILES[command], tmp_path / ("x" * 300), monkeypatch)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("command", FILES)
def test_a_folder_without_permission(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o555)
    assert "cannot write" in refusal(FILES[command], tmp_path / "report", monkeypatch)


@pytest.mark.parametrize("command", FOLDERS)
def test_a_file_is_no_folder(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "inside"):
        assert "is a file, not a folder" in refusal(FOLDERS[command], path, monkeypatch)


def test_what_is_there_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is only tried: a run that fails leaves neither an empty one nor a changed one."""
    there, fresh = tmp_path / "there", tmp_path / "fresh"
    there.write_text("before")
    for path in (there, fresh):
        check.writable_file("json", path)
    assert there.read_text() == "before" and not fresh.exists()
    check.writable_folder("save-dir", tmp_path / "a" / "b")
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("options", [[], ["--max-failures", "1"]])
def test_the_report_is_written_when_cases_failed(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(self: Any, built: Any) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(Checker, "run", raises)
    app, record = typer.Typer(), tmp_path / "report.json"
    app.command()(check.check_command)
    arguments = ["--cases", "3", "--save-dir", str(tmp_path / "failures"), "--json", str(record)]
    assert CliRunner().invoke(app, [*arguments, *options]).exit_code == 1
    written = json.loads(record.read_text())
    assert not written["ok"] and len(written["failures"]) == (1 if options else 3)
    assert "boom" in written["failures"][0]["message"]


def test_failures_of_the_indexer_are_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from openmla.lab.testing.indexer_fuzz import IndexResult

    found = IndexResult("failed", "selection", ("row 3",))
    monkeypatch.setattr(check, "check_index_call", lambda *arguments: found)
    app, record = typer.Typer(), tmp_path / "report.json"
    app.command()(check.check_command)
    arguments = ["--cases", "2", "--json", str(record), "--save-dir", str(tmp_path / "failures")]
    assert CliRunner().invoke(app, arguments).exit_code == 1
    written = json.loads(record.read_text())
    assert not written["ok"] and written["indexer"]["failed"] == 1
    assert written["indexer"]["failures"] == ["selection: row 3"]


@pytest.mark.parametrize("option", ["simulate", "execute"])
def test_the_report_of_another_way_is_written_too(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from openmla.lab.testing.result import Result

    monkeypatch.setattr(
        "openmla.lab.testing.simulate.check_simulated", lambda *arguments: Result("right")
    )
    monkeypatch.setattr(
        "openmla.lab.testing.executed.check.check_executed", lambda *arguments: Result("right")
    )
    app, record = typer.Typer(), tmp_path / "report.json"
    app.command()(check.check_command)
    arguments = [f"--{option}", "--target", "b200", "--cases", "3", "--json", str(record)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    written = json.loads(record.read_text())
    assert written["ok"] and written["right"] == 3 and written["backend"] == "blackwell"
    assert check_drawn.simulating("b200").command == "openmla check --simulate --target b200"


def test_one_way_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()
    app.command()(check.check_command)
    arguments = ["--simulate", "--execute", "--target", "h200"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "400"})
    assert result.exit_code == 2 and "ask for one of them" in result.output


def test_a_replayed_case_has_no_report(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(check.check_command)
    arguments = ["--replay", "x.json", "--json", str(tmp_path / "report.json")]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "400"})
    assert result.exit_code == 2 and "one replayed case has no report" in result.output


def test_progress_of_a_check_does_not_count_past_its_cases(monkeypatch: pytest.MonkeyPatch):
    """Cases that run again between guard pages are not further cases."""

    def run(progress: Callable[[int, int, str], None]) -> FuzzReport:
        progress(1, 3, "dense")
        progress(3, 3, "guard pages: dense [a, b]")
        return FuzzReport(0, "auto", "cpu", asked=2)

    told = io.StringIO()
    monkeypatch.setattr(reports, "progress", partial(progress, every=0.0))
    reports.with_progress(Console(file=told, width=80), 2, run)
    assert told.getvalue().splitlines() == ["cases: 1 of 2", "cases: 2 of 2, guard pages"]
