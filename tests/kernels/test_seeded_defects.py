"""Every seeded defect can still be planted: its code is in the source, once.

Running the defects takes long, and `make test-all` does it. A renaming that blinds one shows here.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gluon_sim import Kind
from kernels import mutants
from kernels.conftest import PLANTING

FOLDER = Path(__file__).parent
Planting = Callable[..., None]


def planting_tests() -> Iterator[tuple[str, Planting]]:
    """The tests that plant defects, each with the name of its module."""
    for path in sorted(FOLDER.rglob("test_*.py")):
        if path.name == Path(__file__).name:
            continue
        name = ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts)
        if any(f"def {test}(" in path.read_text() for test in PLANTING):
            module = importlib.import_module(name)
            for test in PLANTING:
                if hasattr(module, test):
                    yield name, getattr(module, test)


def defects_of(test: Planting) -> list[Any]:
    """What a test is parametrized with."""
    marks = [m for m in getattr(test, "pytestmark", []) if m.name == "parametrize"]
    [(names, defects)] = [mark.args for mark in marks if mark.args[0] == "defect"]
    assert names == "defect"
    return list(defects)


PLANTED = [
    pytest.param(test, defect, id=f"{module}: {defect.name}")
    for module, test in planting_tests()
    for defect in defects_of(test)
]


def test_all_tables_are_here() -> None:
    assert len(PLANTED) > 300


def test_every_table_has_a_control() -> None:
    """A test that finds every defect may as well find one in the kernel itself."""
    for name in {module for module, _ in planting_tests()}:
        tests = [test for test in vars(importlib.import_module(name)) if test.startswith("test_")]
        assert any("clean" in test for test in tests), name


def test_a_defect_that_nothing_shows_is_not_found() -> None:
    def clean(schedule: str, seed: int) -> tuple[set[Kind], bool]:
        return set(), True

    for kind in (Kind.RACE, None):
        with pytest.raises(pytest.fail.Exception, match="not found"):
            mutants.assert_found(kind, clean)


@pytest.mark.parametrize(("test", "defect"), PLANTED)
def test_the_defect_can_be_planted(
    test: Planting, defect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixtures = {"defect": defect, "tmp_path": tmp_path, "monkeypatch": monkeypatch}
    wanted = inspect.signature(test).parameters
    with mutants.only_planting(), pytest.raises(mutants.Planted):
        test(**{name: fixtures[name] for name in wanted})
