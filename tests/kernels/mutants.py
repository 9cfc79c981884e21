"""Kernels with a seeded defect: copies of a whole kernel folder with one file changed.

A kernel is spread over several files that import one another, so a mutant is a copy of them all
under a name of its own. A file of kernels/gluon, which all families share, is copied beside them
when it is the one that changes.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gluon_sim import Kind
from kernels.patch import once

RUNS = [("late", 0), ("early", 0), ("random", 1), ("random", 2), ("random", 3)]
NOTHING = "pass"  # takes the place of a removed statement
SHARED = "gluon"


@dataclass(frozen=True)
class Defect:
    """Replace `old` by `new` in `file`.py, and run `case` with `num_qo`.

    `old` stands there once; where it does not, the first one that follows the text `after` is
    meant. `kind` is what the simulator must find. None: it need not, the numbers are wrong.
    """

    name: str
    kind: Kind | None
    file: str
    old: str
    new: str
    case: str = ""
    num_qo: int = 2
    after: str = ""

    def apply(self, source: str) -> str:
        return once(self.old, self.new, self.after)(source)


class Planted(Exception):
    """A defect was planted, and nobody wants to run it."""


def controls(cases: Iterable[str], tested: Container[str]) -> list[Any]:
    """The cases that defects are sought with, each once. Those that are `tested` without any defect
    anyway, clean and right, are left to `make test-all`."""
    names = sorted(set(cases))
    return [pytest.param(n, marks=[pytest.mark.long] if n in tested else []) for n in names]


_only_planting = False


@contextmanager
def only_planting() -> Iterator[None]:
    """Here `load_mutant` changes its file, and ends with `Planted` if that is still Python."""
    global _only_planting
    _only_planting = True
    try:
        yield
    finally:
        _only_planting = False


def load_mutant(
    package: ModuleType, file: str, edit: Callable[[str], str], launch: str, folder: Path
) -> ModuleType:
    """Module `launch` of a copy of `package` in `folder` whose `file` went through `edit`."""
    name = f"mutant_{folder.name}_{abs(hash(str(folder)))}"
    own = Path(package.__path__[0])
    changed = path_of(own, file)
    if _only_planting:
        ast.parse(edit(changed.read_text()))
        raise Planted
    common = own.parent / SHARED
    # A shared module, or a shared folder of them, becomes one of the copy's own.
    inner = file.split(".")[0] if changed.is_relative_to(common) else ""
    more = (common / inner).rglob("*.py") if "." in file and inner else ()
    for path in {*own.rglob("*.py"), *more, changed}:
        source = path.read_text()
        if path == changed:
            source = edit(source)
        source = source.replace(f"{package.__name__}.", f"{name}.")
        if inner:
            source = re.sub(rf"openmla\.kernels\.{SHARED}\.{inner}\b", f"{name}.{inner}", source)
        made = folder / name / path.relative_to(own if path.is_relative_to(own) else common)
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(source)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(f"{name}.{launch}")
    finally:
        sys.path.remove(str(folder))


def path_of(own: Path, file: str) -> Path:
    """ "latent.rows", "scheduler" (of the dense kernel), "dense" (its kernel.py), a shared one."""
    if "." in file:
        inside = f"{file.replace('.', '/')}.py"
        return next(p for p in (own / inside, own.parent / SHARED / inside) if p.exists())
    places = (own / "dense" / f"{file}.py", own / f"{file}.py", own / file / "kernel.py")
    return next((p for p in places if p.exists()), own.parent / SHARED / f"{file}.py")


def assert_found(kind: Kind | None, run: Callable[[str, int], tuple[set[Kind], bool]]) -> None:
    """A handful of runs show a defect.

    `run` takes a schedule and a seed, and says what the simulator found and whether the numbers
    are right.
    """
    kinds: set[Kind] = set()
    wrong = False
    for schedule, seed in RUNS:
        found, ok = run(schedule, seed)
        kinds |= found
        wrong |= not ok and Kind.LIMIT not in found  # a run that was stopped has no numbers
        if kind in kinds or (wrong and kind is None):
            return
    pytest.fail(f"not found; wrong numbers: {wrong}, findings: {kinds}")
