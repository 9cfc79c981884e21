"""What a seeded defect of the CDNA4 kernels is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import openmla.kernels.cdna4 as package
from kernels.mutants import load_mutant, once


@dataclass(frozen=True)
class Defect:
    """In `file`, `old` (which must occur exactly once) becomes `new`; `case` shows it."""

    name: str
    file: str
    old: str
    new: str
    case: str = "fp8"
    config: dict[str, Any] = field(default_factory=dict)


def load_defect(defect: Defect, folder: Path) -> ModuleType:
    """The launch module of a copy of the kernels with the defect."""
    launch = "sparse.launch" if defect.case.startswith("sparse") else "dense.launch"
    return load_mutant(package, defect.file, once(defect.old, defect.new), launch, folder)
