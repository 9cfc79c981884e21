"""Whether the tests of a kernel find a mutant: a copy of the package with one file changed."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from defects.drawing.kernels import ROOT, Kernel, Suite
from defects.drawing.source import Edit

PLUGIN = "defects.drawing.selection"
NOTHING_RAN = 5
"""Exit status of pytest without any test."""
SLACK = 3
"""A mutant may take so many times as long as the kernel itself."""
SHARED = ("docs", "examples", "benchmarks")
"""Folders beside src that tests find from the package."""


RUNNING: set[int] = set()
"""Groups of processes that are not at their end."""


class CampaignError(Exception):
    """Nothing can be said about mutants."""


@dataclass(frozen=True)
class Limits:
    """Of the run of one mutant."""

    seconds: float = 300.0
    gib: float = 0.0
    """Of memory, for each process; 0 is no limit. Tests of far rows reserve more than there is."""


@dataclass(frozen=True)
class Repository:
    """Where the package and its tests are."""

    root: Path = ROOT
    package: str = "openmla"
    more: tuple[str, ...] = ("tests", "gluon-sim/src")
    """Folders that the tests import from."""

    @property
    def source(self) -> Path:
        """The package."""
        return self.root / "src" / self.package


@dataclass(frozen=True)
class Run:
    """What became of the tests."""

    status: int | None
    """The exit status of pytest; None if they did not end."""
    seconds: float
    passed: int = 0
    failed: tuple[str, ...] = ()
    files: dict[str, float] = field(default_factory=dict)
    """Seconds of every test file."""
    package: str = ""
    output: str = ""


@dataclass(frozen=True)
class Verdict:
    """Of one mutant."""

    found: bool
    by: str
    seconds: float


@contextlib.contextmanager
def mutant(repository: Repository, edit: Edit | None) -> Iterator[Path]:
    """A folder with a copy of the package, with a change made or without."""
    with tempfile.TemporaryDirectory(prefix="openmla-mutant-") as folder:
        made = Path(folder) / "src" / repository.package
        shutil.copytree(repository.source, made, copy_function=linked)
        for name in SHARED:
            if (repository.root / name).is_dir():
                (Path(folder) / name).symlink_to(repository.root / name)
        if edit is not None:
            changed = made / edit.file
            data = edit.apply(changed.read_bytes())
            changed.unlink()  # or the original would change with it
            changed.write_bytes(data)
            for compiled in (changed.parent / "__pycache__").glob(f"{changed.stem}.*"):
                compiled.unlink()
        yield made.parent


def linked(source: str, target: str) -> None:
    """A hard link, or a copy where the file systems differ."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def words_of(tests: Sequence[Suite]) -> dict[str, tuple[str, ...]]:
    """Files and folders with the words of their tests; none where all tests are wanted."""
    words: dict[str, tuple[str, ...]] = {}
    for test in tests:
        both = bool(test.words and words.get(test.path, test.words))
        words[test.path] = (*words.get(test.path, ()), *test.words) if both else ()
    return words


def run_tests(
    repository: Repository, kernel: Kernel, tests: Sequence[Suite], source: Path, limits: Limits
) -> Run:
    """The tests of a kernel, on the package in the folder `source`, until the first failure."""
    result = source.parent / "result.json"
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    triton = repository.root / ".tritons" / kernel.triton
    path = [str(source), *(str(repository.root / more) for more in repository.more)]
    if kernel.triton and triton.is_dir():
        path.append(str(triton))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*path, *filter(None, before)]),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENMLA_DRAW_RESULT": str(result),
        "OPENMLA_DRAW_PACKAGE": repository.package,
        "OPENMLA_DRAW_TESTS": json.dumps(words_of(tests)),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(source.parent / "hypothesis"),
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", PLUGIN]
    started = time.monotonic()
    with open(source.parent / "output.txt", "w+") as output:
        process = subprocess.Popen(
            [*command, *(test.path for test in tests)],
            cwd=repository.root,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        RUNNING.add(process.pid)
        try:
            if limits.gib:
                most = int(limits.gib * 2**30)
                resource.prlimit(process.pid, resource.RLIMIT_DATA, (most, most))
            status: int | None = process.wait(limits.seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end(process.pid)
            process.wait()
        output.seek(0)
        told = output.read()[-4000:]
    kept: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
    return Run(
        status,
        time.monotonic() - started,
        kept.get("passed", 0),
        tuple(kept.get("failed", ())),
        kept.get("seconds", {}),
        kept.get("package", ""),
        told,
    )


def end(group: int) -> None:
    """End a group of processes that was started here."""
    RUNNING.discard(group)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def end_all() -> None:
    """End all that runs."""
    for group in sorted(RUNNING):
        end(group)


def control(repository: Repository, kernel: Kernel, limits: Limits) -> Run:
    """The tests of a kernel on a copy of it that nobody changed; they must pass."""
    with mutant(repository, None) as source:
        run = run_tests(repository, kernel, kernel.tests, source, limits)
        if run.status is None:
            raise CampaignError(f"{kernel.name}: its own tests take more than {limits.seconds} s")
        if run.status:
            why = ", ".join(run.failed)
            raise CampaignError(f"{kernel.name} fails without any defect: {why}\n{run.output}")
        if not run.passed:
            raise CampaignError(f"{kernel.name}: no test ran, all were skipped")
        if run.package != str(source / repository.package):
            raise CampaignError(f"the tests import {run.package}, not the copy in {source}")
    return run


def quick_first(kernel: Kernel, clean: Run) -> list[Suite]:
    """The tests of a kernel by the time that they took; those with words stay with their files."""

    def seconds(test: Suite) -> float:
        return sum(
            took
            for file, took in clean.files.items()
            if file == test.path or file.startswith(f"{test.path}/")
        )

    listed: list[Suite] = []
    for test in sorted(split(kernel.tests, clean), key=lambda test: (seconds(test), test.path)):
        if test not in listed:
            listed.append(test)
    return listed


def split(tests: Sequence[Suite], clean: Run) -> Iterator[Suite]:
    """The files of folders, one by one; what has words stays as it is."""
    for test in tests:
        inside = [file for file in sorted(clean.files) if file.startswith(f"{test.path}/")]
        yield from (Suite(file, test.words) for file in inside) if inside else (test,)


def limits_after(clean: Run, limits: Limits) -> Limits:
    """A mutant has time for what the kernel itself does, with slack."""
    return Limits(max(limits.seconds, SLACK * clean.seconds), limits.gib)


def judge(
    repository: Repository, kernel: Kernel, tests: Sequence[Suite], edit: Edit, limits: Limits
) -> Verdict:
    """Whether the tests of a kernel find a change."""
    with mutant(repository, edit) as source:
        run = run_tests(repository, kernel, tests, source, limits)
    if run.status is None:
        return Verdict(True, "hangs", run.seconds)
    if run.status == 0:
        if run.package and run.package != str(source / repository.package):
            raise CampaignError(f"the tests import {run.package}, not the copy in {source}")
        return Verdict(False, "", run.seconds)
    if run.status == NOTHING_RAN:
        raise CampaignError(f"no test ran: {run.output}")
    by = run.failed[0] if run.failed else f"pytest itself, status {run.status}"
    return Verdict(True, by, run.seconds)
