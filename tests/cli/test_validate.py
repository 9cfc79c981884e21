"""`openmla validate`: its steps run on every chip's kernels, and what fails is reported."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from openmla.cli.options import GLUON_CHIPS as CHIPS
from openmla.cli.options import INTERRUPTED
from openmla.cli.validate import validate_command
from openmla.lab.testing import simulate, sources
from openmla.lab.testing.build import build
from openmla.lab.testing.result import Result
from openmla.lab.testing.simulate import new_results
from openmla.lab.testing.validate import (
    OPTIONS,
    SEVERAL_SOURCES,
    SOURCES,
    STEPS,
    steps_of,
    validate,
)
from openmla.planning import NEWEST_TRITON, TARGETS
from openmla.planning.registry import families_of
from openmla.problem import FORMS

app = typer.Typer()
app.command()(validate_command)


@pytest.mark.parametrize("target", CHIPS[:1])  # `make test-all` has the others, and all steps
def test_steps_run_in_the_simulator(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "found.json"
    few = {step: STEPS[step][:2] for step in ("one tile", "FP8")}
    module = import_module("openmla.lab.testing.validate")
    monkeypatch.setattr(module, "STEPS", few)
    monkeypatch.setattr(module, "SOURCES", SOURCES[:3:2])
    done = CliRunner().invoke(app, ["--simulate", "--target", target, "--json", str(path)])
    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text())
    assert found["ok"] and found["simulated"] and found["target"] == target
    more = {SEVERAL_SOURCES} if target == "h200" else set()
    assert {outcome["step"] for outcome in found["outcomes"]} == {*few, *more}
    assert all(outcome["status"] in ("right", "refused") for outcome in found["outcomes"])


@pytest.mark.parametrize("target", CHIPS)
def test_every_kernel_of_a_chip_has_a_case(target: str) -> None:
    """Kernels of attention; the indexer's are checked by `openmla check`."""
    family, reached = families_of(TARGETS[target])[0], set()
    for case in (case for cases in STEPS.values() for case in cases):
        built = build(case)
        problem = built.operands.problem(new_results(built))
        choice = family.choose(problem, TARGETS[target], NEWEST_TRITON, named=True)
        if not choice.reason:
            reached.add(choice.kernel)
    for call in steps_of(target).get(SEVERAL_SOURCES, ()):
        op = sources.operands(call)
        problem = op.problem(sources.new_results(op))
        choice = family.choose(problem, TARGETS[target], NEWEST_TRITON, named=True)
        assert not choice.reason
        reached.add(choice.kernel)
    kernels = {kernel for form in FORMS for kernel in family.of_form(form) if kernel.launcher}
    assert reached == {kernel.name for kernel in kernels}


def test_a_failure_is_reported_and_the_rest_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(case, target):  # type: ignore[no-untyped-def]
        wrong = case.dtype == "fp16"
        return Result("failed", "accuracy", "row 3") if wrong else Result("right")

    monkeypatch.setattr(simulate, "check_simulated", check)
    monkeypatch.setattr(simulate, "check_simulated_sources", lambda case, target: Result("right"))
    told: list[str] = []
    report = validate("b200", simulated=True, tell=told.append)
    assert not report.ok and len(told) == sum(map(len, steps_of("b200").values()))
    assert [line for line in told if line.endswith("failed row 3")]
    assert report.counts("several tiles")["failed"] == 1
    assert report.counts("ragged") == {"right": 4, "refused": 0, "failed": 0}


def test_what_was_found_before_an_interrupt_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []

    def check(case, target):  # type: ignore[no-untyped-def]
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(case)
        return Result("right")

    monkeypatch.setattr(simulate, "check_simulated", check)
    path = tmp_path / "found.json"
    ended = CliRunner().invoke(app, ["--simulate", "--target", "b200", "--json", str(path)])
    assert ended.exit_code == INTERRUPTED and "interrupted after 3 cases" in ended.output
    found = json.loads(path.read_text())
    assert found["interrupted"] and not found["ok"] and len(found["outcomes"]) == 3


def test_a_step_without_a_right_case_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(case, target):  # type: ignore[no-untyped-def]
        return Result("refused" if case.heads == 128 else "right")

    monkeypatch.setattr(simulate, "check_simulated", check)
    monkeypatch.setattr(simulate, "check_simulated_sources", lambda *_: Result("right"))
    assert not validate("h200", simulated=True).ok


@pytest.mark.parametrize("status", ["right", "failed"])
def test_several_sources_are_a_step_where_a_family_has_them(
    status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "check_simulated", lambda *_: Result("right"))
    monkeypatch.setattr(simulate, "check_simulated_sources", lambda *_: Result(status))
    report = validate("h200", simulated=True)
    assert report.counts(SEVERAL_SOURCES)[status] == len(SOURCES)
    assert report.ok == (status == "right")
    assert json.loads(json.dumps(report.to_json()))["outcomes"][-1]["case"]["kinds"]


def test_options_are_steps_where_a_family_has_them() -> None:
    steps = {chip: set(steps_of(chip)) & OPTIONS.keys() for chip in ("h200", "b200", "mi355x")}
    assert steps == {"h200": {"windows"}, "b200": {*OPTIONS}, "mi355x": {*OPTIONS}}


def test_cases_are_asked_on_the_device_they_are_for() -> None:
    """On this machine's CPU no Gluon kernel runs: all is refused, by the child process."""
    report = validate("h200", device="cpu", jobs=2)
    assert not report.ok
    assert {outcome.result.status for outcome in report.outcomes} == {"refused"}
    every = [case for cases in steps_of("h200").values() for case in cases]
    assert [o.case for o in report.outcomes] == every and set(SOURCES) < set(every)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--target", "a100", "--simulate"], "a100 is sm_80, which only portable kernels serve"),
        (["--target", "b200"], "not b200"),
        ([], "name a chip whose kernels to simulate"),
    ],
)
def test_mistakes_are_named(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2 and says in " ".join(done.output.replace("│", " ").split())
