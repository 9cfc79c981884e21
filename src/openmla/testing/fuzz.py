"""Random cases through everything: accuracy, and for every tenth, poisons and guard pages.

Case i of a run is `random_case(seed + i)`, so any failure can be named by one number. Failures are
shrunk and saved as JSON, which `replay` runs again with every check.

    report = run_fuzz(cases=500, seed=0, save_dir="failures")
    report.ok, report.summary()
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from openmla.errors import Unsupported
from openmla.testing.build import BuiltCase, Outcome, build
from openmla.testing.case import Case
from openmla.testing.compare import Verdict, judge
from openmla.testing.draw import random_case
from openmla.testing.isolate import run_guarded
from openmla.testing.poison import poison_problems
from openmla.testing.shrink import shrink

DEEP_EVERY = 10
"""Every tenth case is also poisoned and guarded."""
Progress = Callable[[int, int, str], None]
"""Called with (done, total, what is going on)."""


@dataclass(frozen=True)
class Finding:
    """What checking one case found; an empty kind means nothing is wrong."""

    kind: str = ""
    """accuracy, error, poison or guard."""
    message: str = ""
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Failure:
    """One finding: the case as drawn, as small as it stays failing, and what is wrong."""

    kind: str
    case: Case
    shrunk: Case
    message: str
    path: Path | None = None


@dataclass
class FuzzReport:
    """What a run did. Nothing is skipped silently: unsupported cases are counted by reason."""

    seed: int
    backend: str
    device: str
    cases: int = 0
    poisoned: int = 0
    guarded: int = 0
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    unsupported: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)
    """Largest share of the componentwise bound and of the lse limit among accepted results."""

    @property
    def ok(self) -> bool:
        """No failure, and at least one case ran."""
        return not self.failures and self.cases > sum(self.unsupported.values())

    def summary(self) -> str:
        """One line."""
        last = self.seed + max(self.cases - 1, 0)
        return (
            f"{self.cases} cases (seeds {self.seed} to {last}), {self.poisoned} poisoned, "
            f"{self.guarded} guarded, {sum(self.unsupported.values())} unsupported, "
            f"{len(self.failures)} failures, {self.seconds:.1f} s"
        )


@dataclass(frozen=True)
class Checker:
    """How a case is run and judged."""

    backend: str = "auto"
    device: str = "cpu"

    def run(self, built: BuiltCase) -> Outcome:
        """The public call."""
        return built.run(backend=self.backend)

    def verdict(self, case: Case) -> Verdict:
        """Accuracy of one case; raises what the call raises."""
        built = build(case, device=self.device)
        return judge(built, self.run(built))

    def finding(self, case: Case, deep: bool) -> Finding:
        """What is wrong with a case; guard pages are checked elsewhere."""
        try:
            verdict = self.verdict(case)
            if not verdict.ok:
                return Finding("accuracy", verdict.report(), verdict)
            if deep and (problems := poison_problems(case, self.run, self.device)):
                return Finding("poison", "\n".join(problems), verdict)
        except Unsupported:
            raise
        except Exception as error:
            return Finding("error", f"{type(error).__name__}: {error}")
        return Finding(verdict=verdict)

    def shrunk(self, case: Case, kind: str) -> Case:
        """The smallest case that fails in the same way."""

        def fails(candidate: Case) -> bool:
            try:
                return self.finding(candidate, deep=kind == "poison").kind == kind
            except Unsupported:
                return False

        return shrink(case, fails)


def run_fuzz(
    cases: int = 500,
    seed: int = 0,
    backend: str = "auto",
    device: str = "cpu",
    progress: Progress | None = None,
    save_dir: str | Path | None = None,
) -> FuzzReport:
    """Run `cases` random cases from `seed` on. Guard pages exist on the CPU only."""
    started = time.perf_counter()
    report = FuzzReport(seed, backend, device)
    checker = Checker(backend, device)
    deep_cases = []
    tell = progress or (lambda done, total, note: None)
    guards = len(range(0, cases, DEEP_EVERY)) if _can_guard(backend, device) else 0
    with one_thread():
        for number in range(cases):
            case = random_case(seed + number)
            deep = number % DEEP_EVERY == 0
            if _check(checker, case, deep, report, save_dir) and deep:
                deep_cases.append(case)
            tell(number + 1, cases + guards, str(case))
    if guards:
        for case, problem in run_guarded(deep_cases):
            report.guarded += 1
            if problem:
                report.failures.append(_saved(Failure("guard", case, case, problem), save_dir))
            tell(cases + report.guarded, cases + guards, f"guard pages: {case}")
    tell(cases + guards, cases + guards, "done")
    report.seconds = time.perf_counter() - started
    return report


def _check(
    checker: Checker, case: Case, deep: bool, report: FuzzReport, save_dir: str | Path | None
) -> bool:
    """One case into the report; whether it passed."""
    report.cases += 1
    report.poisoned += deep
    try:
        found = checker.finding(case, deep)
    except Unsupported as error:
        report.unsupported[error.reason] += 1
        return False
    if found.kind:
        failure = Failure(found.kind, case, checker.shrunk(case, found.kind), found.message)
        report.failures.append(_saved(failure, save_dir))
        return False
    if found.verdict is not None:
        for name in ("bound", "lse"):
            report.worst[name] = max(report.worst.get(name, 0.0), getattr(found.verdict, name))
    return True


def load(path: str | Path) -> Case:
    """The case of a saved failure, as small as it was made."""
    return Case.from_json(json.loads(Path(path).read_text())["case"])


def replay(
    path: str | Path, backend: str = "auto", device: str = "cpu", guards: bool = True
) -> Failure | None:
    """Run a saved case again with every check; None when nothing is wrong any more.

    Guard pages need a process of their own, which takes a second or two to start.
    """
    case = load(path)
    with one_thread():
        found = Checker(backend, device).finding(case, deep=True)
    if not found.kind and guards and _can_guard(backend, device):
        problems = [problem for _, problem in run_guarded([case]) if problem]
        found = Finding("guard", problems[0]) if problems else found
    return Failure(found.kind, case, case, found.message, Path(path)) if found.kind else None


def _can_guard(backend: str, device: str) -> bool:
    """Guard pages are CPU memory, and the child that uses them calls the default backend."""
    return device == "cpu" and backend in ("auto", "cpu")


def save(failure: Failure, save_dir: str | Path) -> Path:
    """Write a failure as JSON; `case` in it is the shrunk one, which `replay` runs."""
    folder = Path(save_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{failure.kind}-{failure.case.form}-seed{failure.case.seed}.json"
    content = {
        "kind": failure.kind,
        "case": failure.shrunk.to_json(),
        "found_as": failure.case.to_json(),
        "message": failure.message,
        "torch": torch.__version__,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def _saved(failure: Failure, save_dir: str | Path | None) -> Failure:
    if save_dir is None:
        return failure
    path = save(failure, save_dir)
    return Failure(failure.kind, failure.case, failure.shrunk, failure.message, path)


@contextmanager
def one_thread() -> Iterator[None]:
    """torch on one thread: for cases this small, a second one only costs time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
