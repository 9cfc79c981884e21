"""Random cases through everything: accuracy, and for every tenth, poisons and guarded memory.

Case i of a run is `random_case(seed + i)`, so any failure can be named by one number. With
`variants` V it is variant i % V of case seed + i // V. Failures are shrunk and saved as JSON, which
`replay` runs again with every check.

    report = run_fuzz(cases=500, seed=0, save_dir="failures")
    report.ok, report.summary()

With `jobs`, and always on a GPU, cases run in that many child processes (see isolate.py):
what crashes or hangs one of them is one failure, and the others go on. Failures of children are
shrunk in children, for a minute at most; crashes and hangs are not shrunk at all, because every
attempt would cost a process, or its time limit.
"""

import json
import math
import queue
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import torch

from openmla.dispatch import triton_version
from openmla.errors import InvalidArgument
from openmla.lab.testing.case import Case
from openmla.lab.testing.checker import DEEP_EVERY, Checker
from openmla.lab.testing.draw import has_listed_widths, random_case, varied
from openmla.lab.testing.isolate import SECONDS_PER_CASE, Child, Death, end_all, run_guarded
from openmla.lab.testing.result import Result
from openmla.lab.testing.shrink import shrink
from openmla.records import parse_json, shown

MAX_FAILURES = 20
SECONDS_ON_GPU = 120.0
"""Time limit of one case in a child process: the first use of a kernel compiles it."""
SHRINK_SECONDS = 60.0
Answered = tuple[Case, Result, Case]
"""A case, what was found, and the case shrunk."""
Progress = Callable[[int, int, str], None]
"""Called with (done, total, what is going on)."""


@dataclass(frozen=True)
class Failure:
    """One finding: the case as drawn, as small as it stays failing, and what is wrong."""

    kind: str
    """accuracy, error, poison, neighbors, guard, crash or hang."""
    case: Case
    shrunk: Case
    message: str
    path: Path | None = None


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a run; `report` says what was found until then."""

    def __init__(self, report: "FuzzReport") -> None:
        super().__init__()
        self.report = report


@dataclass
class FuzzReport:
    """What a run did. Every case is right, refused or a failure, and is counted as such."""

    seed: int
    backend: str
    device: str
    asked: int = 0
    """Cases that were to run; a run with too many failures stops before."""
    least: int = 1
    """Cases that must be right."""
    variants: int = 1
    """Cases drawn from one seed."""
    interrupted: bool = False
    """Whether Ctrl-C ended the run."""
    cases: int = 0
    right: int = 0
    random_widths: int = 0
    """Cases with widths from no table."""
    poisoned: int = 0
    guarded: int = 0
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    """By reason."""
    served: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Right cases by (call, family)."""
    worst: dict[str, float] = field(default_factory=dict)
    """Largest share of the componentwise bound and of the lse limit among accepted results."""

    @property
    def ok(self) -> bool:
        """Every case that was asked for is right or refused, and enough of them are right."""
        answered = self.right + self.refused.total()
        complete = answered == self.asked and not self.interrupted
        return not self.failures and self.right >= self.least and complete

    @property
    def seeds(self) -> str:
        """The seeds that the cases were to be drawn from."""
        return f"seeds {self.seed} to {self.seed + max(self.asked - 1, 0) // self.variants}"

    def add(self, case: Case, result: Result) -> None:
        """Count a case; the caller keeps the failures."""
        self.cases += 1
        self.random_widths += not has_listed_widths(case)
        self.poisoned += result.poisoned
        self.guarded += result.guarded
        if result.status == "refused":
            self.refused[result.message] += 1
        elif result.status == "right":
            self.right += 1
            self.served[case.call, result.family] += 1
            for name in ("bound", "lse"):
                self.worst[name] = max(self.worst.get(name, 0.0), getattr(result, name))

    def summary(self) -> str:
        """One line."""
        return (
            f"{self.cases} cases ({self.seeds}), {self.right} right, "
            f"{self.refused.total()} refused, {len(self.failures)} failures, "
            f"{self.random_widths} with random widths, {self.poisoned} poisoned, "
            f"{self.guarded} guarded, {self.seconds:.1f} s"
        )

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        plain = (
            "seed",
            "backend",
            "device",
            "asked",
            "interrupted",
            "cases",
            "right",
            "random_widths",
            "poisoned",
            "guarded",
            "seconds",
            "worst",
        )
        return {
            "ok": self.ok,
            **{name: getattr(self, name) for name in plain},
            **_versions(),
            "refused": dict(self.refused.most_common()),
            "served": {f"{call}, {family}": n for (call, family), n in sorted(self.served.items())},
            "failures": [_failure_json(failure) for failure in self.failures],
        }


def _here(checker: Checker, case: Case) -> Answered:
    """Check a case in this process."""
    result = checker.result(case, deep=case.seed % DEEP_EVERY == 0)
    if result.status != "failed":
        return case, result, case
    deep = result.kind in ("poison", "neighbors")
    return case, result, shrink(case, lambda c: checker.result(c, deep).kind == result.kind)


def _in_child(child: Child, case: Case) -> Answered:
    """Check a case in a child process."""
    result = Result(**child.ask_or_blame(case))
    if result.status != "failed" or result.kind in ("crash", "hang"):
        return case, result, case
    deadline = time.monotonic() + SHRINK_SECONDS

    def fails(smaller: Case) -> bool:
        if time.monotonic() > deadline:
            return False
        try:
            return bool(child.ask(smaller)["kind"] == result.kind)  # the seed, and depth, is kept
        except Death:
            return False

    return case, result, shrink(case, fails)


def child_for(checker: Checker, seconds: float, deep_every: int = DEEP_EVERY) -> Child:
    """A child process that checks cases."""
    options = {"checker": asdict(checker), "deep_every": deep_every}
    return Child("openmla.lab.testing.checker:check", options, seconds)


def run_fuzz(
    cases: int = 500,
    seed: int = 0,
    backend: str = "auto",
    device: str = "cpu",
    progress: Progress | None = None,
    save_dir: str | Path | None = None,
    jobs: int = 0,
    max_failures: int = MAX_FAILURES,
    variants: int = 1,
    most_seconds: float = math.inf,
    implementation: str = "",
    seconds_per_case: float | None = None,
) -> FuzzReport:
    """Run `cases` random cases from `seed` on, in `jobs` child processes (0: in this one).

    After `most_seconds` no more are begun, and the report is about those that were. Ctrl-C raises
    Interrupted, with the report of those that were done.
    """
    started = time.perf_counter()
    report = FuzzReport(seed, backend, device, asked=cases, variants=variants)
    on_cpu = torch.device(device).type == "cpu"
    jobs = jobs or (0 if on_cpu else 1)
    checker = Checker(backend, device, implementation, guard_pages=jobs > 0)
    seconds = seconds_per_case or (SECONDS_PER_CASE if on_cpu else SECONDS_ON_GPU)
    # In this process a fault would be the end: guard pages come afterwards, in a child.
    guard_later = jobs == 0 and backend in ("auto", "cpu") and not implementation
    total = cases + (-(-cases // DEEP_EVERY) if guard_later else 0)
    tell = progress or (lambda done, total, note: None)
    passed: list[tuple[Case, str]] = []
    with reported(report):
        drawn = [varied(random_case(seed + i // variants), i % variants) for i in range(cases)]
        groups = [drawn[first : first + variants] for first in range(0, cases, variants)]
        answers = _answers(checker, seconds, groups, jobs, started + most_seconds)
        with one_thread(), closing(answers):
            for case, result, shrunk in answers:
                report.add(case, result)
                tell(report.cases, total, str(case))
                if result.status == "failed":
                    failure = Failure(result.kind, case, shrunk, result.message)
                    report.failures.append(saved(failure, save_dir))
                    if len(report.failures) >= max_failures:
                        break
                elif result.poisoned:
                    passed.append((case, result.family))
        if guard_later and len(report.failures) < max_failures:
            _guard(report, passed, save_dir, lambda note: tell(cases + report.guarded, total, note))
        if time.perf_counter() - started >= most_seconds:
            report.asked = report.cases
        tell(total, total, "done")
    return report


def _guard(
    report: FuzzReport,
    passed: list[tuple[Case, str]],
    save_dir: str | Path | None,
    tell: Callable[[str], None],
) -> None:
    """Run cases that passed once more, between guard pages in a child."""
    with closing(run_guarded([case for case, _ in passed])) as problems:
        for (case, family), (_, problem) in zip(passed, problems, strict=True):
            report.guarded += 1
            tell(f"guard pages: {case}")
            if problem:  # counted as right before
                report.right -= 1
                report.served[case.call, family] -= 1
                report.failures.append(saved(Failure("guard", case, case, problem), save_dir))


@contextmanager
def reported(report: FuzzReport) -> Iterator[None]:
    """A run that completes its report however it ends; Ctrl-C becomes Interrupted."""
    started = time.perf_counter()
    try:
        yield
    except KeyboardInterrupt:
        report.interrupted = True
        raise Interrupted(report) from None
    finally:
        report.failures.sort(key=lambda failure: failure.case.seed)
        report.seconds = time.perf_counter() - started


def _answers(
    checker: Checker, seconds: float, groups: list[list[Case]], jobs: int, deadline: float
) -> Generator[Answered, None, None]:
    """Every case with its result, as they come; a group in one process, which compiles once for it.

    A group ends with the first failure: other variants would fail likewise, and take their time.
    """
    if not jobs:
        in_time = takewhile(lambda _: time.perf_counter() < deadline, chain(*groups))
        yield from (_here(checker, case) for case in in_time)
        return
    idle: queue.SimpleQueue[Child] = queue.SimpleQueue()
    children = [child_for(checker, seconds) for _ in range(jobs)]
    for one in children:
        idle.put(one)

    def examined(group: list[Case]) -> list[Answered]:
        child = idle.get()
        answers: list[Answered] = []
        try:
            for case in group:
                failed = bool(answers) and answers[-1][1].status == "failed"
                if failed or time.perf_counter() >= deadline:
                    break
                answers.append(_in_child(child, case))
            return answers
        finally:
            idle.put(child)

    pool = ThreadPoolExecutor(jobs)
    try:
        for done in as_completed([pool.submit(examined, group) for group in groups]):
            yield from done.result()
    finally:
        end_all(pool, children)


def load(path: str | Path) -> Case:
    """The case of a saved failure, as small as it was made; InvalidArgument if there is none."""
    saved = parse_json("saved case", Path(path).read_bytes())
    if not isinstance(saved, dict) or "case" not in saved:
        raise InvalidArgument("saved case", 'an object with a "case"', shown(saved))
    return Case.from_json(saved["case"])


def replay(
    path: str | Path, backend: str = "auto", device: str = "cpu", guards: bool = True
) -> Failure | None:
    """Run a saved case again with every check; None when nothing is wrong (or it is refused).

    On a GPU in a child process. So are guard pages on the CPU, which takes a second or two.
    """
    case = load(path)
    if torch.device(device).type != "cpu":
        child = child_for(Checker(backend, device), SECONDS_ON_GPU, deep_every=1)
        result = Result(**child.ask_or_blame(case))
        child.end()
    else:
        with one_thread():
            result = Checker(backend, device).result(case, deep=True)
        if result.status == "right" and guards and backend in ("auto", "cpu"):
            problems = [problem for _, problem in run_guarded([case]) if problem]
            result = Result("failed", "guard", problems[0]) if problems else result
    if result.status != "failed":
        return None
    return Failure(result.kind, case, case, result.message, Path(path))


def save(failure: Failure, save_dir: str | Path) -> Path:
    """Write a failure as JSON; `case` in it is the shrunk one, which `replay` runs."""
    folder = Path(save_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{failure.kind}-{failure.case.call}-seed{failure.case.seed}.json"
    path.write_text(json.dumps(_failure_json(failure), indent=1) + "\n")
    return path


def _failure_json(failure: Failure) -> dict[str, Any]:
    return {
        "kind": failure.kind,
        "case": failure.shrunk.to_json(),
        "found_as": failure.case.to_json(),
        "message": failure.message,
        **_versions(),
    }


def _versions() -> dict[str, str]:
    """What a finding may depend on; a machine without a GPU need not have Triton."""
    try:
        triton = ".".join(map(str, triton_version()))
    except ImportError:
        triton = ""
    return {"torch": torch.__version__, "triton": triton}


def saved(failure: Failure, save_dir: str | Path | None) -> Failure:
    """The failure with the file it was saved in, if there is a folder for it."""
    return failure if save_dir is None else replace(failure, path=save(failure, save_dir))


@contextmanager
def one_thread() -> Iterator[None]:
    """torch on one thread: for cases this small, a second one only costs time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
