"""What the simulated tests of a kernel exercise, and what they leave out.

    python tests/kernels/exercise.py --kernel hopper.latent --markdown exercised.md

Runs the tests of the kernel, long ones too (seeded defects aside, their controls included)
and records what the simulator sees. In some case of theirs

- every ring must turn at least twice,
- every condition of the kernel's device code must be true, and must be false,
- every wait must come when what it waits for is not yet complete.

What is missing is printed by kernel, function and statement. `unexercised.py` lists what no case
can show, with reasons. The command ends with 1 when something is missing that is not listed there,
and with 2 when the tests fail.

`--kernel all` judges all Gluon kernels, and then constants in the files that they share: those need
not go both ways in each kernel, but in some kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from defects.drawing.judge import PLUGIN, words_of
from defects.drawing.kernels import KERNELS, ROOT, Kernel
from gluon_sim import Exercise, Gap, Record, gaps
from gluon_sim.report.gaps import turns_by_stages
from gluon_sim.report.sites import Place
from kernels.recorded import FOLDER
from kernels.unexercised import UNEXERCISED, reason

PACKAGE = ROOT / "src" / "openmla"
RECORDER = "kernels.recorded"
SHARED = "shared"
MISSING, FAILED = 1, 2


class TestsFail(Exception):
    """Nothing can be said about what tests exercise that do not pass."""


def files_of(kernel: Kernel) -> list[str]:
    """The files of a kernel, as code objects name them."""
    return [str(PACKAGE / file) for file in kernel.files(PACKAGE)]


def in_gluon(kernel: Kernel) -> bool:
    """Whether the simulator runs it."""
    return any("@gluon.jit" in Path(file).read_text() for file in files_of(kernel))


SIMULATED = {name: kernel for name, kernel in KERNELS.items() if in_gluon(kernel)}


def shared_files() -> list[str]:
    """The files with device code that several kernels use and none owns."""
    owned = {file for kernel in SIMULATED.values() for file in files_of(kernel)}
    used = {str(PACKAGE / file) for kernel in SIMULATED.values() for file in kernel.shared}
    return sorted(used - owned)


def by_triton(kernels: Iterable[Kernel]) -> dict[str, list[Kernel]]:
    """Kernels by the folder of .tritons that their tests need."""
    found: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        found.setdefault(kernel.triton, []).append(kernel)
    return found


def record(kernels: Sequence[Kernel], triton: str, folder: Path, jobs: int) -> None:
    """Run the tests of kernels; each process leaves a file in `folder`."""
    tests = list(dict.fromkeys(test for kernel in kernels for test in kernel.tests))
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [str(ROOT / part) for part in ("src", "tests", "gluon-sim/src")]
    front = ROOT / ".tritons" / triton
    if triton and front.is_dir():
        path.append(str(front))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*path, *filter(None, before)]),
        "OPENMLA_DRAW_TESTS": json.dumps(words_of(tests)),
        FOLDER: str(folder),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(jobs if jobs > 1 else 0)]
    command += ["-p", "no:cacheprovider", "-p", PLUGIN, "-p", RECORDER]
    done = subprocess.run(
        [*command, *dict.fromkeys(test.path for test in tests)], cwd=ROOT, env=environment
    )
    if done.returncode:
        names = ", ".join(kernel.name for kernel in kernels)
        raise TestsFail(f"the tests of {names} fail")


def read(folder: Path) -> Exercise:
    """What all processes recorded."""
    whole = Exercise()
    for path in sorted(folder.glob("*.json")):
        whole.add(Exercise.loads(path.read_text()))
    return whole


@dataclass(frozen=True)
class Judged:
    """A kernel, what its launches exercised, and what no test did."""

    kernel: str
    own: Record
    gaps: tuple[Gap, ...]

    def open(self) -> list[Gap]:
        """The gaps that nobody has given a reason for."""
        return [gap for gap in self.gaps if not reason(self.kernel, gap)]


def judge(kernel: Kernel, exercise: Exercise) -> Judged:
    """What is missing of a kernel's own files, and of what it uses of others."""
    files = files_of(kernel)
    own = exercise.total(files)
    return Judged(kernel.name, own, tuple(gaps(exercise.total(), files, own)))


def judge_shared(exercise: Exercise) -> Judged:
    """What is missing of files that several kernels use."""
    return Judged(SHARED, Record(), tuple(gaps(exercise.total(), shared_files(), Record())))


def short(file: str) -> str:
    """A file below the package."""
    path = Path(file)
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else path.name


def told(gap: Gap) -> str:
    """One line: where, and what is missing."""
    text = f"{gap.text} " if gap.text else ""
    return f"{short(gap.file)}:{gap.line}  {gap.function}: {text}{gap.what}"


def unneeded(judged: Sequence[Judged]) -> list[str]:
    """What is listed of the judged kernels although tests exercise it."""
    by_name = {each.kernel: each.gaps for each in judged}
    return [
        f"{each.kernel}  {each.function}: {each.text} {each.what}"
        for each in UNEXERCISED
        if each.kernel in by_name
        and not any(each.covers(each.kernel, gap) for gap in by_name[each.kernel])
    ]


def printed(judged: Judged) -> str:
    """The gaps of a kernel, those without a reason first."""
    head = f"{judged.kernel}: {judged.own.launches} launches, {len(judged.own.waits)} waits, "
    head += f"{len(turns_by_stages(judged.own))} rings, {len(judged.gaps)} gaps"
    lines = [head]
    lines += [f"  missing  {told(gap)}" for gap in judged.open()]
    for gap in judged.gaps:
        if why := reason(judged.kernel, gap):
            lines.append(f"  listed   {told(gap)}\n           {why}")
    return "\n".join(lines)


def markdown(judged: Sequence[Judged]) -> str:
    """All kernels with their rings, waits and gaps."""
    return "\n".join(line for each in judged for line in _section(each)) + "\n"


def _section(judged: Judged) -> Iterator[str]:
    yield f"## {judged.kernel}\n"
    yield f"{judged.own.launches} launches.\n"
    if judged.gaps:
        yield "| not exercised | where | reason |\n|---|---|---|"
        for gap in judged.gaps:
            why = reason(judged.kernel, gap) or "**none**"
            text = f"`{gap.text}` " if gap.text else ""
            yield f"| {text}{gap.what} | {gap.function}, {short(gap.file)} | {why} |"
        yield ""
    if judged.own.rings:
        yield "| ring | where | turns (stages) |\n|---|---|---|"
        for (place, name), turns in sorted(turns_by_stages(judged.own).items()):
            most = ", ".join(f"{n} ({stages})" for stages, n in sorted(turns.items()))
            yield f"| `{name}` | {_at(place)} | {most} |"
        yield ""
    if judged.own.waits:
        yield "| wait for | where | times | blocked |\n|---|---|---|---|"
        for wait, waited in sorted(judged.own.waits.items()):
            yield f"| {wait.awaited} | {_at(wait.place)} | {waited.times} | {waited.blocked} |"
        yield ""


def _at(place: Place) -> str:
    return f"{short(place.file)}:{place.line}"


def as_json(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Every gap with its reason, by kernel."""
    return [
        {
            "kernel": each.kernel,
            "launches": each.own.launches,
            "gaps": [
                {**asdict(gap), "file": short(gap.file), "reason": reason(each.kernel, gap)}
                for gap in each.gaps
            ],
        }
        for each in judged
    ]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernel", required=True, choices=[*SIMULATED, "all"])
    parser.add_argument("--jobs", type=int, default=1, help="tests at a time")
    parser.add_argument("--records", type=Path, help="a folder for what was recorded")
    parser.add_argument(
        "--judge-only", action="store_true", help="from the records of a run before"
    )
    parser.add_argument("--json", type=Path, help="where to write every gap")
    parser.add_argument("--markdown", type=Path, help="where to write rings, waits and gaps")
    return parser.parse_args(arguments)


def recorded(kernels: Mapping[str, Kernel], options: argparse.Namespace) -> Exercise:
    """What the tests of kernels exercise, or did before."""
    folder = options.records or Path(tempfile.mkdtemp(prefix="openmla-exercised-"))
    try:
        if not options.judge_only:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            for triton, group in by_triton(kernels.values()).items():
                record(group, triton, folder, options.jobs)
        return read(folder)
    finally:
        if options.records is None:
            shutil.rmtree(folder, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The report; its status says whether something is missing that is not listed."""
    options = parsed(arguments)
    whole = options.kernel == "all"
    kernels = SIMULATED if whole else {options.kernel: SIMULATED[options.kernel]}
    try:
        exercise = recorded(kernels, options)
    except TestsFail as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    judged = [judge(kernel, exercise) for kernel in kernels.values()]
    judged += [judge_shared(exercise)] if whole else []
    print("\n".join(map(printed, judged)))
    for line in unneeded(judged):
        print(f"listed, but exercised: {line}")
    if options.json:
        options.json.write_text(json.dumps(as_json(judged), indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(judged))
    idle = [each.kernel for each in judged if not each.own.launches and each.kernel != SHARED]
    if idle:
        print(f"error: no test launches {', '.join(idle)}", file=sys.stderr)
        return FAILED
    return MISSING if any(each.open() for each in judged) else 0


if __name__ == "__main__":
    sys.exit(main())
