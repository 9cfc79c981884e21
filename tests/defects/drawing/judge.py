"""Whether the tests of a kernel find a mutant: a copy of the package with one file changed.

A control runs the tests on a copy that nobody changed, and records the lines that each of them
executes. A mutant is then judged by the tests that execute the changed statement, the quickest of
every file first; what runs when the package is imported belongs to all tests.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from defects.drawing.environment import CHOSEN, EVERY, JOBS, PACKAGE, RECORDS, RESULT, SUITES
from defects.drawing.forks import Request
from defects.drawing.kernels import ROOT, Kernel, Suite
from defects.drawing.lines import Executed
from defects.drawing.source import Edit, Source

PLUGIN = "defects.drawing.selection"
RECORDER = "defects.drawing.recorder"
CHOOSER = "defects.drawing.chosen"
FORKS = "defects.drawing.forks"
IMPORTED = ("torch", "triton", "triton.experimental.gluon.language", "numpy", "pytest")
IMPORTED += ("_pytest.assertion.rewrite", "hypothesis", "gluon_sim")
QUIET = ("-q", "-p", "no:cacheprovider")
NOTHING_RAN = 5
"""Exit status of pytest without any test."""
SLACK, LEAST_SECONDS = 10, 30
"""A test on a mutant may take so many times as long as on the kernel, and so long at least."""
TO_COLLECT = 120
"""Seconds that a mutant has beside those of its tests."""
SHARED = ("docs", "examples", "benchmarks")
"""Folders beside src that tests find from the package."""
DRAWING = Path(__file__).resolve().parents[1]
"""What draws and judges is no part of what is tested."""
NOT_EXECUTED = "no test executes it"


RUNNING: set[int] = set()
"""Groups of processes that are not at their end."""


class CampaignError(Exception):
    """Nothing can be said about mutants."""


@dataclass(frozen=True)
class Limits:
    """Limits of a control, and of the run of one mutant."""

    seconds: float = 3600.0
    gib: float = 0.0
    """Memory of each process; 0 is no limit. Tests of far rows reserve more than there is."""
    tests: int | None = None
    """The quickest so many judge a mutant; None: all that execute it."""


@dataclass(frozen=True)
class Repository:
    """Where the package and its tests are."""

    root: Path = ROOT
    package: str = "openmla"
    more: tuple[str, ...] = ("tests", "gluon-sim/src")
    """Folders that the tests import from."""
    imported: tuple[str, ...] = IMPORTED
    """What all tests import beside the package."""

    @property
    def source(self) -> Path:
        """The package."""
        return self.root / "src" / self.package


@dataclass(frozen=True)
class Test:
    """A test that passes on the kernel itself."""

    name: str
    seconds: float
    lines: Executed

    @property
    def file(self) -> str:
        """Where it stands."""
        return self.name.split("::")[0]

    @property
    def limit(self) -> float:
        """The seconds that it may take on a mutant."""
        return LEAST_SECONDS + SLACK * self.seconds


@dataclass(frozen=True)
class Control:
    """What the tests of a kernel do without any defect."""

    tests: tuple[Test, ...]
    at_import: Executed
    """The lines that run before any test does."""
    collected: tuple[str, ...]
    """The names of all tests, also of those that did not run or were skipped."""
    seconds: float

    def executing(self, file: str, lines: range) -> list[Test]:
        """The tests that execute one of these lines: the quickest of every file, then the second of
        every file, and so on, for the tests of one file see much the same. What runs when tests are
        collected belongs to all of them, but those that execute it themselves come first."""
        wanted = set(lines)
        own = [test for test in self.tests if wanted & set(test.lines.get(file, ()))]
        if not wanted & set(self.at_import.get(file, ())):
            return in_turn(own)
        return [*in_turn(own), *in_turn([test for test in self.tests if test not in own])]


def in_turn(tests: Sequence[Test]) -> list[Test]:
    """The quickest of every file, then the second of every file, and so on."""
    ranked: list[tuple[int, float, Test]] = []
    seen: Counter[str] = Counter()
    for test in sorted(tests, key=lambda test: test.seconds):
        ranked.append((seen[test.file], test.seconds, test))
        seen[test.file] += 1
    return [test for *_, test in sorted(ranked, key=lambda rank: rank[:2])]


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant."""

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


def path_of(repository: Repository, kernel: Kernel, source: Path | None = None) -> list[str]:
    """Where a process finds the package, the tests and Triton."""
    path = [str(source)] if source else []
    path += [str(repository.root / more) for more in repository.more]
    triton = repository.root / ".tritons" / kernel.triton
    if kernel.triton and triton.is_dir():
        path.append(str(triton))
    return [*path, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def environment_of(repository: Repository, kernel: Kernel, source: Path) -> dict[str, str]:
    """What a run of tests on the package in the folder `source` is told."""
    return {
        "PYTHONPATH": os.pathsep.join(path_of(repository, kernel, source)),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        PACKAGE: str(source / repository.package),
        RESULT: str(source.parent / "result.json"),
        SUITES: json.dumps(words_of(kernel.tests)),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(source.parent / "hypothesis"),
    }


def end(group: int) -> None:
    """End a group of processes that was started here; a process with forks ends those first."""
    RUNNING.discard(group)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)


def end_all() -> None:
    """End all that runs."""
    for group in sorted(RUNNING):
        end(group)


def control(
    repository: Repository, kernel: Kernel, limits: Limits, jobs: int = 1, every: int = 1
) -> Control:
    """The tests of a kernel, or every so-manieth, on a copy that nobody changed; they must pass."""
    command = [sys.executable, "-m", "pytest", "-s", *QUIET, "-p", PLUGIN, "-p", RECORDER]
    started = time.monotonic()
    with (
        mutant(repository, None) as source,
        open(source.parent / "output.txt", "w+") as output,
    ):
        environment = environment_of(repository, kernel, source)
        records = str(records_of(repository, kernel))
        process = subprocess.Popen(
            [*command, *dict.fromkeys(test.path for test in kernel.tests)],
            cwd=repository.root,
            env={**os.environ, **environment, RECORDS: records, JOBS: str(jobs), EVERY: str(every)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        RUNNING.add(process.pid)
        try:
            process.wait(limits.seconds)
        except subprocess.TimeoutExpired:
            why = f"{kernel.name}: its own tests take more than {limits.seconds} s"
            raise CampaignError(why) from None
        finally:
            end(process.pid)
            process.wait()
        output.seek(0)
        kept = read(Path(environment[RESULT]))
        if not kept or kept["failed"]:
            names = ", ".join(kept.get("failed", ()))
            told = "\n".join(kept["failed"].values()) if kept else output.read()[-4000:]
            raise CampaignError(f"{kernel.name} fails without any defect: {names}\n{told}")
        assert_imported(kept["package"], source / repository.package)
    kept_of = [read(Path(path)) for path in kept["tests"].values()]
    tests = tuple(Test(r["name"], r["seconds"], r["lines"]) for r in kept_of if r["passed"])
    if not tests:
        raise CampaignError(f"{kernel.name}: no test ran, all were skipped")
    at_import, collected = read(Path(kept["at_import"])), tuple(kept["collected"])
    return Control(tests, at_import, collected, time.monotonic() - started)


def records_of(repository: Repository, kernel: Kernel) -> Path:
    """A folder for what is known of tests, of these very sources and this Triton alone."""
    text = hashlib.sha256(f"{sys.version} {kernel.triton}".encode())
    for folder in (repository.source, *(repository.root / more for more in repository.more)):
        for path in sorted(set(folder.rglob("*.py")) - set(DRAWING.rglob("*.py"))):
            text.update(f"\n{path}\n".encode() + path.read_bytes())
    made = repository.root / "build" / "drawn" / text.hexdigest()[:16]
    made.mkdir(parents=True, exist_ok=True)
    return made


def read(path: Path) -> dict[str, Any]:
    """What a run left; nothing where it did not come so far."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def assert_imported(package: str, meant: Path) -> None:
    """The tests were those of a copy, not of another package that is installed."""
    if package and package != str(meant):
        raise CampaignError(f"the tests import {package}, not the copy in {meant}")


def lines_of(edit: Edit, package: Path) -> range:
    """The lines of the statement that a change is in; with a body, those before the body."""
    source = Source(edit.file, (package / edit.file).read_bytes())
    start, stop = source.statement_at(edit.start)
    text = source.data[start:stop].rstrip()
    return range(source.line(start), source.line(start + len(text)) + 1)


class Judge:
    """A process that runs tests on mutants, one mutant at a time."""

    def __init__(self, repository: Repository, kernel: Kernel, clean: Control) -> None:
        self._repository, self._kernel, self._clean = repository, kernel, clean
        environment = {"PYTHONPATH": os.pathsep.join(path_of(repository, kernel))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", FORKS, *repository.imported],
            cwd=repository.root,
            env={**os.environ, **environment, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        RUNNING.add(self._process.pid)

    def close(self) -> None:
        """End it."""
        end(self._process.pid)
        self._process.wait()

    def judge(self, edit: Edit, limits: Limits) -> Verdict:
        """Whether the tests of the kernel find a change."""
        lines = lines_of(edit, self._repository.source)
        tests = self._clean.executing(edit.file, lines)[: limits.tests]
        if not tests:
            return Verdict(False, NOT_EXECUTED, 0.0)
        started = time.monotonic()
        with mutant(self._repository, edit) as source:
            status = self._run(source, tests, limits)
            kept = read(source.parent / "result.json")
            told = (source.parent / "output.txt").read_text()[-2000:]
        seconds = time.monotonic() - started
        if status is None:
            return Verdict(True, "hangs", seconds)
        assert_imported(kept.get("package", ""), source / self._repository.package)
        if status == 0:
            return Verdict(False, "", seconds)
        if status == NOTHING_RAN:
            raise CampaignError(f"no test ran: {told}")
        failed = kept.get("failed") or [f"pytest itself, status {status}"]
        return Verdict(True, failed[0], seconds)

    def _run(self, source: Path, tests: Sequence[Test], limits: Limits) -> int | None:
        chosen = source.parent / "chosen.json"
        limits_of = {test.name: test.limit for test in tests}
        asked = {"limits": limits_of, "known": self._clean.collected}
        chosen.write_text(json.dumps(asked))
        files = dict.fromkeys(test.file for test in tests)
        environment = environment_of(self._repository, self._kernel, source)
        request = Request(
            ["-x", *QUIET, "-p", PLUGIN, "-p", CHOOSER, *files],
            path_of(self._repository, self._kernel, source),
            {**environment, CHOSEN: str(chosen)},
            str(source.parent / "output.txt"),
            min(limits.seconds, TO_COLLECT + sum(test.limit for test in tests)),
            limits.gib,
        )
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(request.line())
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise CampaignError("the process that runs the tests has ended")
        status: int | None = json.loads(answer)
        return status
