"""What checks is checked: with a blinded check, the test that is named for it fails."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from defects.checkers import BLINDED, Blinded
from defects.drawing.judge import linked
from defects.drawing.kernels import ROOT
from kernels.patch import once

COPIED = ("src", "tests", "gluon-sim", "docs", "pyproject.toml")
FAILED = 1
"""Exit status of pytest when tests ran and some failed."""
CONTROL = Blinded("nothing", BLINDED[0].file, BLINDED[0].old, BLINDED[0].old, BLINDED[0].test)


def blind(checker: Blinded) -> str:
    """The text of the file with the change made."""
    return once(checker.old, checker.new)((ROOT / checker.file).read_text())


def status_of_its_test(checker: Blinded, folder: Path) -> int:
    """Run the test in a copy of the repository in which the check is blinded."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, copy_function=linked)
        else:
            linked(str(ROOT / name), str(folder / name))
    changed = folder / checker.file
    changed.unlink()  # or the original would change with it
    changed.write_text(blind(checker))
    for compiled in (changed.parent / "__pycache__").glob(f"{changed.stem}.*"):
        compiled.unlink()
    path = [str(folder / part) for part in ("src", "gluon-sim/src")]
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", checker.test],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*path, *filter(None, before)])},
        capture_output=True,
    )
    return done.returncode


@pytest.mark.parametrize("checker", BLINDED, ids=lambda checker: checker.name)
def test_a_check_can_be_blinded(checker: Blinded) -> None:
    ast.parse(blind(checker))
    file, name = checker.test.split("[")[0].split("::")
    assert f"def {name}(" in (ROOT / file).read_text()


@pytest.mark.long
@pytest.mark.parametrize("checker", BLINDED, ids=lambda checker: checker.name)
def test_a_blinded_check_is_found(checker: Blinded, tmp_path: Path) -> None:
    assert status_of_its_test(checker, tmp_path) == FAILED


@pytest.mark.long
def test_the_check_itself_passes(tmp_path: Path) -> None:
    assert status_of_its_test(CONTROL, tmp_path) == 0
