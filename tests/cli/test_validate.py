"""`openmla validate`: its steps run on every chip's kernels, and what fails is reported."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from openmla.cli.options import GLUON_CHIPS as CHIPS
from openmla.cli.validate import validate_command
from openmla.lab.testing import simulate
from openmla.lab.testing.build import build
from openmla.lab.testing.checker import Result
from openmla.lab.testing.simulate import new_results
from openmla.lab.testing.validate import STEPS, validate
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
    for module in ("openmla.lab.testing.validate", "openmla.cli.validate"):
        monkeypatch.setattr(import_module(module), "STEPS", few)
    done = CliRunner().invoke(app, ["--simulate", "--target", target, "--json", str(path)])
    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text())
    assert found["ok"] and found["simulated"] and found["target"] == target
    assert {outcome["step"] for outcome in found["outcomes"]} == set(few)
    assert all(outcome["status"] in ("right", "refused") for outcome in found["outcomes"])


@pytest.mark.parametrize("target", CHIPS)
def test_every_kernel_of_a_chip_has_a_case(target: str) -> None:
    """Of attention; the indexer's are checked by `openmla check`."""
    family, reached = families_of(TARGETS[target])[0], set()
    for case in (case for cases in STEPS.values() for case in cases):
        built = build(case)
        problem = built.operands.problem(new_results(built))
        choice = family.choose(problem, TARGETS[target], NEWEST_TRITON, named=True)
        if not choice.reason:
            reached.add(choice.kernel)
    kernels = {kernel for form in FORMS for kernel in family.of_form(form) if kernel.launcher}
    # Cases have one list or one table; tests/gpu/test_attend.py has spans and second sources.
    assert reached == {kernel.name for kernel in kernels} - {"attend"}


def test_a_failure_is_reported_and_the_rest_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(case, target):  # type: ignore[no-untyped-def]
        wrong = case.dtype == "fp16"
        return Result("failed", "accuracy", "row 3") if wrong else Result("right")

    monkeypatch.setattr(simulate, "check_simulated", check)
    told: list[str] = []
    report = validate("b200", simulated=True, tell=told.append)
    assert not report.ok and len(told) == sum(map(len, STEPS.values()))
    assert [line for line in told if line.endswith("failed row 3")]
    assert report.counts("several tiles")["failed"] == 1
    assert report.counts("ragged") == {"right": 4, "refused": 0, "failed": 0}


def test_a_step_without_a_right_case_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(case, target):  # type: ignore[no-untyped-def]
        return Result("refused" if case.heads == 128 else "right")

    monkeypatch.setattr(simulate, "check_simulated", check)
    assert not validate("h200", simulated=True).ok


def test_cases_are_asked_on_the_device_they_are_for() -> None:
    """On this machine's CPU no Gluon kernel runs: all is refused, by the child process."""
    report = validate("h200", device="cpu", jobs=2)
    assert not report.ok
    assert {outcome.result.status for outcome in report.outcomes} == {"refused"}
    assert [o.case for o in report.outcomes] == [case for cases in STEPS.values() for case in cases]


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
