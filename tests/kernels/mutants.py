"""Kernels with a seeded defect: copies of a whole kernel folder with one file changed.

A kernel is spread over several files that import one another, so a mutant is a copy of them all
under a name of its own.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType


def once(old: str, new: str) -> Callable[[str], str]:
    """The change of `old`, which must occur exactly once, into `new`."""

    def edit(source: str) -> str:
        assert source.count(old) == 1, f"{source.count(old)} places: {old}"
        return source.replace(old, new)

    return edit


def load_mutant(
    package: ModuleType, file: str, edit: Callable[[str], str], launch: str, folder: Path
) -> ModuleType:
    """Module `launch` of a copy of `package` in `folder` whose `file`.py went through `edit`."""
    name = f"mutant_{folder.name}_{abs(hash(str(folder)))}"
    made = folder / name
    made.mkdir()
    for path in Path(package.__path__[0]).glob("*.py"):
        source = path.read_text()
        if path.stem == file:
            source = edit(source)
        (made / path.name).write_text(source.replace(f"{package.__name__}.", f"{name}."))
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(f"{name}.{launch}")
    finally:
        sys.path.remove(str(folder))
