"""The scripts that run GPU tests: what dies, hangs or never runs is a failure, the rest runs on."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from openmla import Unsupported

FOLDER = Path(__file__).parents[1] / "gpu"
MARKED = "import os, time, pytest\npytestmark = pytest.mark.gpu\n"
PASSES = "def test_fine(): assert 1 + 1 == 2\n"
FILES = {
    "test_passes.py": MARKED + PASSES,
    "test_dies.py": MARKED + "def test_dies(): os.abort()\n" + PASSES,
    "test_fails.py": MARKED + "def test_wrong(): assert 1 + 1 == 3\n" + PASSES,
    "test_hangs.py": MARKED + PASSES + "def test_hangs(): time.sleep(600)\n",
    "test_skipped.py": MARKED + "@pytest.mark.skip\n" + PASSES,
    "test_unmarked.py": PASSES,
}
HANGS = "test_hangs.py"
PATIENCE = 240
"""Seconds: for imports on a busy machine."""
SANITIZER = """#!{python}
print("RAN {ran}")
print("========= ERROR SUMMARY: {errors} errors")
"""


def script(name: str, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        [sys.executable, str(FOLDER / name), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=2 * PATIENCE + 60,
        check=False,
    )


def written(folder: Path, *names: str) -> list[str]:
    """Paths of some of the files, in a folder."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text(FILES[name])
    return [str(folder / name) for name in names]


def verdicts_of(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """What the script says of each file."""
    return dict(
        line.split(": ", 1)
        for line in done.stdout.splitlines()
        if re.match(r"\S+\.py( \d+/\d+)?: ", line)
    )


def test_a_file_that_dies_does_not_take_the_others_along(tmp_path: Path):
    files = written(tmp_path, *(name for name in FILES if name != HANGS))
    done = script("run.py", "--jobs", "2", "--seconds", str(PATIENCE), *files)
    verdicts = verdicts_of(done)
    assert done.returncode == 4
    assert verdicts["test_passes.py"].startswith("passed: 1 passed")
    for name, reason in {
        "test_dies.py": "died of signal 6",
        "test_fails.py": "status 1: 1 failed, 1 passed",
        "test_skipped.py": "nothing ran: 1 skipped",
        "test_unmarked.py": "status 5",
    }.items():
        assert verdicts[name].startswith(f"FAILED, {reason}"), verdicts[name]
    assert "1 of 5 processes passed" in done.stdout


def test_a_file_may_have_fewer_tests_than_shards(tmp_path: Path):
    """An empty shard is no failure, but a file of which no shard runs a test is one."""
    files = written(tmp_path / "gpu", "test_passes.py", "test_unmarked.py")
    (tmp_path / "gpu" / "conftest.py").write_text((FOLDER / "conftest.py").read_text())
    done = script("run.py", "--jobs", "2", "--shards", "2", "--seconds", str(PATIENCE), *files)
    verdicts = verdicts_of(done)
    assert [name for name, said in verdicts.items() if said.startswith("FAILED")] == [
        "test_unmarked.py 1/2"
    ]
    assert done.returncode == 1


def test_a_file_that_hangs_does_not_either(tmp_path: Path):
    """Its limit is what a file that passes took on this machine, many times."""
    [passes] = written(tmp_path, "test_passes.py")
    started = time.monotonic()
    script("run.py", "--seconds", str(PATIENCE), passes)
    limit = min(8 * (time.monotonic() - started), PATIENCE)
    done = script("run.py", "--seconds", str(limit), *written(tmp_path, HANGS), passes)
    verdicts = verdicts_of(done)
    assert done.returncode == 1
    assert verdicts[HANGS].startswith("FAILED, no end within its limit")
    assert verdicts["test_passes.py"].startswith("passed: 1 passed")


@pytest.mark.parametrize(
    ("ran", "errors", "bad"), [(5, 0, 0), (5, 2, 2), (4, 0, 2)], ids=["clean", "errors", "too few"]
)
def test_memcheck_believes_what_the_sanitizer_says(tmp_path: Path, ran: int, errors: int, bad: int):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(SANITIZER.format(python=sys.executable, ran=ran, errors=errors))
    tool.chmod(0o755)
    done = script("memcheck.py", "--cases", "10", "--jobs", "2", path=str(tmp_path))
    assert done.returncode == bad, done.stdout
    assert f"10 cases in 2 processes, {bad} not clean" in done.stdout


def test_memcheck_ends_where_gradients_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """As those of one kind are, and on other chips Hopper's: a later seed changes nothing."""
    monkeypatch.syspath_prepend(str(FOLDER))
    memcheck, fuzz = import_module("memcheck"), import_module("gradient_fuzz")
    built: list[object] = []

    def build(case: object, device: str) -> SimpleNamespace:
        assert len(built) < 100, "it draws on and on"
        built.append(case)
        return SimpleNamespace(run=lambda: None)

    def refuse(*args: object) -> None:
        raise Unsupported("such a gradient")

    monkeypatch.setattr("openmla.lab.testing.build.build", build)
    monkeypatch.setattr("kernels.wild_values.with_wild_values", lambda built, kind, seed: built)
    monkeypatch.setattr(fuzz, "run_gradients", refuse)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    memcheck.run_cases(9, 0, 1)
    assert capsys.readouterr().out.splitlines()[-1] == "RAN 9"


def test_drawn_gradients_must_be_right_and_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    fuzz = import_module("gradient_fuzz")
    results = [{"kind": name, "right": 5} for name in fuzz.KINDS if name != fuzz.REFUSED]
    results.append({"kind": fuzz.REFUSED, "refused": 5})
    cases = 5 * len(results)
    assert not fuzz.problems_of(results, cases)
    assert fuzz.problems_of(results, cases + 1) == [f"{cases} of {cases + 1} cases were drawn"]
    refused = [{**result, "right": 0, "refused": 5} for result in results]
    assert len(fuzz.problems_of(refused, cases)) == len(results) - 1
    assert fuzz.problems_of([*results[:-1], {"kind": fuzz.REFUSED, "right": 5}], cases)


@pytest.mark.parametrize("name", ["run", "memcheck", "gradient_fuzz"])
def test_worked_examples(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    result = doctest.testmod(import_module(name))
    assert result.attempted and not result.failed
