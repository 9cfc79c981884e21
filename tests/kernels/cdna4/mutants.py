"""Copies of the CDNA4 kernels with one defect in their source, loaded beside the real ones."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import openmla.kernels.cdna4 as package

_PACKAGE = "openmla.kernels.cdna4"


@dataclass(frozen=True)
class Defect:
    """In `file`, `old` (which must occur exactly once) becomes `new`; `case` shows it."""

    name: str
    file: str
    old: str
    new: str
    case: str = "fp8"
    config: dict[str, Any] = field(default_factory=dict)


def load_mutant(defect: Defect, folder: Path) -> ModuleType:
    """The package with the defect, under a name of its own; gives its launch module."""
    name = f"cdna4_mutant_{abs(hash(defect.name))}"
    made = folder / name
    made.mkdir()
    for source in Path(package.__path__[0]).glob("*.py"):
        text = source.read_text()
        if source.stem == defect.file:
            assert text.count(defect.old) == 1, f"{text.count(defect.old)} places: {defect.old}"
            text = text.replace(defect.old, defect.new)
        (made / source.name).write_text(text.replace(f"{_PACKAGE}.", f"{name}."))
    sys.path.insert(0, str(folder))
    try:
        launch = "sparse_launch" if defect.case.startswith("sparse") else "launch"
        return importlib.import_module(f"{name}.{launch}")
    finally:
        sys.path.remove(str(folder))
