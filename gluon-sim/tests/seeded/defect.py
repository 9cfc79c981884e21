"""What a seeded defect is: a text change to a kernel file, and what it breaks.

`kind` is what the simulator must report; None means that only the numbers are wrong.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from gluon_sim import Kind


@dataclass(frozen=True)
class Defect:
    """Replace `old` (its first occurrence after `after`) by `new` in the kernel of `case`."""

    name: str
    case: str
    kind: Kind | None
    old: str
    new: str
    after: str = ""

    def apply(self, source: str) -> str:
        start = source.index(self.after)
        at = source.index(self.old, start)
        return source[:at] + self.new + source[at + len(self.old) :]


def load_mutant(defect: Defect, module: ModuleType, folder: Path) -> ModuleType:
    """The kernel module with the defect, as a module of its own."""
    source = defect.apply(Path(str(module.__file__)).read_text())
    name = f"mutant_{abs(hash(defect.name))}"
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    mutant = importlib.util.module_from_spec(spec)
    sys.modules[name] = mutant
    spec.loader.exec_module(mutant)
    return mutant


NOTHING = "pass"  # takes the place of a removed statement


def of(case: str, *rows: tuple[object, ...]) -> list[Defect]:
    return [Defect(str(name), case, *rest) for name, *rest in rows]  # type: ignore[arg-type]
