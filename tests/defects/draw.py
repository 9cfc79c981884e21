"""Draw defects from the sources of a kernel, and see which of them its tests find.

    python tests/defects/draw.py --kernel hopper.few --count 20 --seed 1 --jobs 2
    python tests/defects/draw.py --family hopper --count 30 --seed 1 --jobs 2
    python tests/defects/draw.py --kernel hopper.latent --files kernels/hopper/latent/source.py

Defects are drawn evenly by class and by operator; a seed draws the same ones on every machine. Of a
kernel --count are drawn in all, of a family that many of each class; with --files from those
files of theirs alone. Each becomes a copy of the
package with one change. A control runs what `make test` runs for the kernel and records which lines
each test executes; a mutant is judged by the tests that execute the changed statement. What
`harmless.py` has a reason for is not run.

A found defect is found by whatever test: --every 8 --first 8 takes one test in eight, and the eight
quickest of them for each mutant; the same command without them goes on with those that still live.
What --json holds of the same draw is not run again, unless it lives or failed.

The command ends with 0 when every mutant was judged, whatever was found, and with 2 on errors:
above all when the tests fail on a kernel that nobody changed. A run that is cut off loses no
verdict: a defect that lives is shown at once, and --json is written again after each verdict.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from defects.drawing.candidates import CLASSES, draw
from defects.drawing.judge import (
    CampaignError,
    Judge,
    Limits,
    Repository,
    control,
    end_all,
)
from defects.drawing.kernels import FAMILIES, KERNELS, Kernel, family
from defects.drawing.source import Edit
from defects.harmless import reason

FAILED = 2
FOUND, LIVES, CANNOT_MATTER, ERROR = "found", "lives", "cannot matter", "error"


@dataclass(frozen=True)
class Judged:
    """A drawn defect and what became of it."""

    kernel: str
    edit: Edit
    verdict: str
    by: str
    """The test that found it, why it lives or cannot matter, or the error."""
    seconds: float

    def record(self) -> dict[str, Any]:
        """As it is written to a file."""
        told = {"verdict": self.verdict, "by": self.by, "seconds": round(self.seconds, 1)}
        return {"kernel": self.kernel, **asdict(self.edit), **told}

    @classmethod
    def from_record(cls, kept: dict[str, Any]) -> Judged:
        """The way back."""
        edit = Edit(**{field.name: kept[field.name] for field in fields(Edit)})
        return cls(kept["kernel"], edit, kept["verdict"], kept["by"], kept["seconds"])

    def __str__(self) -> str:
        """One line, for the progress of a campaign."""
        told = {FOUND: "found by ", LIVES: "lives  ", CANNOT_MATTER: "cannot matter: "}
        return f"{told.get(self.verdict, 'error: ')}{self.by}  ({self.seconds:.0f} s)"


def described(edit: Edit) -> str:
    """Where a change is, and what it is."""
    head = f"{edit.file}:{edit.line}  {edit.function}  [{edit.group}: {edit.operator}]"
    return f"{head}\n    - {edit.statement}\n    + {edit.becomes}"


def nobody(judged: Judged) -> None:
    """Nobody keeps the verdicts of a campaign while it runs."""


def campaign(
    kernel: Kernel,
    edits: Sequence[Edit],
    repository: Repository,
    limits: Limits,
    jobs: int,
    keep: Callable[[Judged], None] = nobody,
    known: Sequence[Judged] = (),
    every: int = 1,
) -> list[Judged]:
    """Judge drawn defects of a kernel; the results are in the order of drawing.

    What is `known` to be found is not run again. `keep` gets each verdict as soon as it is there,
    before the others of a run that is cut off.
    """
    clean = control(repository, kernel, limits, jobs, every)
    print(
        f"{kernel.name}: {len(clean.tests)} tests pass without a defect ({clean.seconds:.0f} s)",
        flush=True,
    )
    judges = [Judge(repository, kernel, clean) for _ in range(min(jobs, len(edits)))]

    before = {result.edit: result for result in known if result.verdict == FOUND}

    def judged(edit: Edit) -> Judged:
        if edit in before:
            return before[edit]
        if why := reason(edit):
            return Judged(kernel.name, edit, CANNOT_MATTER, why, 0.0)
        judge = judges.pop()  # there are as many as threads
        try:
            verdict = judge.judge(edit, limits)
        except CampaignError as error:
            return Judged(kernel.name, edit, ERROR, str(error), 0.0)
        finally:
            judges.append(judge)
        return Judged(
            kernel.name, edit, FOUND if verdict.found else LIVES, verdict.by, verdict.seconds
        )

    found: dict[int, Judged] = {}
    pool = ThreadPoolExecutor(len(judges))
    try:
        waiting = {pool.submit(judged, edit): i for i, edit in enumerate(edits)}
        for done in as_completed(waiting):
            result = found[waiting[done]] = done.result()
            keep(result)
            print(f"{len(found)} of {len(edits)}  {result}", flush=True)
            if result.verdict in (LIVES, ERROR):
                print(described(result.edit), flush=True)
    finally:  # an interrupt too leaves nothing behind
        pool.shutdown(wait=False, cancel_futures=True)
        end_all()
        pool.shutdown()
        for judge in judges:
            judge.close()
    return [found[i] for i in sorted(found)]


def table(results: Sequence[Judged]) -> str:
    """How many were found, by kernel and class."""
    lines = ["| kernel | class | drawn | found | share | lives | cannot matter |"]
    lines.append("|---|---|---|---|---|---|---|")
    kernels = list(dict.fromkeys(result.kernel for result in results))
    rows = [(kernel, group) for kernel in kernels for group in CLASSES]
    for kernel, group in [*rows, ("all", "all")]:
        own = [
            result.verdict
            for result in results
            if kernel in (result.kernel, "all") and group in (result.edit.group, "all")
        ]
        if own:
            harmless = own.count(CANNOT_MATTER)
            share = own.count(FOUND) / (len(own) - harmless) if len(own) > harmless else 1.0
            lines.append(
                f"| {kernel} | {group} | {len(own)} | {own.count(FOUND)} | {share:.0%} | "
                f"{own.count(LIVES)} | {harmless} |"
            )
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """Versions of what can change a verdict."""
    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "pytest"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    drawn_from = parser.add_mutually_exclusive_group(required=True)
    drawn_from.add_argument("--kernel", choices=[*KERNELS, "all"])
    drawn_from.add_argument("--family", choices=[*FAMILIES, "all"])
    parser.add_argument(
        "--count", type=int, default=20, help="of each kernel, or of each class of a family"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--class", dest="group", default="all", choices=[*CLASSES, "all"])
    parser.add_argument(
        "--files", nargs="+", help="draw from these alone, files or folders below src/openmla"
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--timeout", type=float, default=Limits.seconds, help="seconds")
    parser.add_argument("--memory", type=float, default=Limits.gib, help="GiB of a process, 0: any")
    parser.add_argument("--every", type=int, default=1, help="run every so-manieth test only")
    parser.add_argument("--first", type=int, help="judge by so many of the quickest tests only")
    parser.add_argument("--json", type=Path, help="file that has every verdict so far")
    parser.add_argument("--list", action="store_true", help="only say what would be drawn")
    return parser.parse_args(arguments)


def asked_for(options: argparse.Namespace) -> list[Kernel]:
    """The kernels, or the families as kernels, that a campaign is about."""
    if options.family:
        return [family(name) for name in FAMILIES if options.family in (name, "all")]
    return [kernel for name, kernel in KERNELS.items() if options.kernel in (name, "all")]


def drawn(kernel: Kernel, repository: Repository, options: argparse.Namespace) -> list[Edit]:
    """The defects of one kernel: so many in all, or so many of each class of a family."""
    groups = CLASSES if options.family and options.group == "all" else (options.group,)
    return [
        edit
        for group in groups
        for edit in draw(
            kernel, repository.source, options.count, options.seed, group, options.files or ()
        )
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign; the exit status says whether all of it could be judged."""
    options = parsed(arguments)
    repository = Repository()
    kernels = asked_for(options)
    limits = Limits(options.timeout, options.memory, options.first)
    known = verdicts_in(options.json)
    results: list[Judged] = []
    errors: list[str] = []

    def keep(*judged: Judged) -> None:
        results.extend(judged)
        if options.json:
            again = {result.edit for result in results}
            write(options, [*results, *(old for old in known if old.edit not in again)], errors)

    for kernel in kernels:
        edits = drawn(kernel, repository, options)
        if options.list:
            print("\n".join(described(edit) for edit in edits))
            continue
        if not edits:
            print(f"{kernel.name}: nothing to draw")
            continue
        before = len(results)
        try:
            ordered = campaign(
                kernel, edits, repository, limits, options.jobs, keep, known, options.every
            )
            results[before:] = ordered
        except CampaignError as error:
            errors.append(str(error))
            print(f"error: {error}", file=sys.stderr, flush=True)
        keep()
    if not options.list:
        print(f"\n{table(results)}\n")
        for result in results:
            if result.verdict in (LIVES, CANNOT_MATTER, ERROR):
                print(f"{result.kernel}: {result.verdict}  {result.by}".rstrip())
                print(described(result.edit))
    errors += [result.by for result in results if result.verdict == ERROR]
    return FAILED if errors else 0


def verdicts_in(file: Path | None) -> list[Judged]:
    """What a run before has written to a file, if there is one."""
    if file is None or not file.exists():
        return []
    return [Judged.from_record(kept) for kept in json.loads(file.read_text())["mutants"]]


def write(options: argparse.Namespace, results: Sequence[Judged], errors: Sequence[str]) -> None:
    """Keep every verdict in a file."""
    whole = {
        "seed": options.seed,
        "count": options.count,
        "class": options.group,
        "versions": versions(),
        "errors": list(errors),
        "mutants": [result.record() for result in results],
    }
    # Whoever reads while it is written, or after a crash, sees one state or the next.
    unfinished = options.json.with_name(options.json.name + ".part")
    unfinished.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    os.replace(unfinished, options.json)


if __name__ == "__main__":
    # Or what was started would go on without this command.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
