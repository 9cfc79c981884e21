"""A plugin of pytest: which tests of a kernel can tell a mutant from it.

Tests that change the source themselves, that read committed compile reports, or that only look at
the repository do not count: they fail, or hold, whatever the change is. OPENMLA_DRAW_TESTS has the
files with their words.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from defects.drawing.environment import SUITES

CONTROL = "clean_and_right"
"""Part of the names of the controls of seeded defects: the kernel itself."""
SEEDED = re.compile(r"defect|mutant|is_seen|offset_of_32_bits|every_schedule_is_clean")
REPORTS = re.compile(r"test_compiles|compiles_|_compiles|do_not_spill|memory_is_what_the_plan")
PASSED_OVER = (
    "aot",
    "compiling",
    "compiled",
    "repository",
    "defects",
    "executed",
    "docs",
    "release",
    "gpu",
)


def counts(path: Path, root: Path, name: str) -> bool:
    """Whether a test can tell a mutant from the kernel."""
    parts = path.relative_to(root).parts if path.is_relative_to(root) else path.parts
    if parts[0] == "tests" and len(parts) > 1 and parts[1] in PASSED_OVER:
        return False
    if path.name == "test_compile.py" or REPORTS.search(name):
        return False
    return CONTROL in name or not (SEEDED.search(name) or "defects" in path.name)


def wanted(path: Path, root: Path, name: str, chosen: dict[str, list[str]]) -> bool:
    """Whether the table of kernels asks for a test: no words are all of them."""
    for place, words in chosen.items():
        if path == root / place or (root / place) in path.parents:
            return not words or any(word in name for word in words)
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what counts."""
    chosen = json.loads(os.environ.get(SUITES, "{}"))
    root = config.rootpath
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        good = counts(item.path, root, item.name) and wanted(item.path, root, item.name, chosen)
        (kept if good else dropped).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)
