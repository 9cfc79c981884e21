"""The portable kernel of two sources in the interpreter, and defects that its cases must see."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
TESTS = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("interpreted_attend.py")
DEFECTS = {
    "lengths are not looked at": ("cut(tl.load(lengths_ptr + token), entries)", "entries"),
    "negative positions count": ("tl.maximum(tl.load(begin_ptr + token), 0)", "0"),
    "the end counts too": (
        "tl.load(end_ptr + token), entries",
        "tl.load(end_ptr + token) + 1, entries",
    ),
    "lines are not checked": ("(request >= 0) & (request < lines)", "request < 4"),
    "pages are not checked": ("(found >= 0) & (found < pages)", "found < pages"),
    "rows past the pool count": ("(index < pages * page_size)", "(index <= pages * page_size)"),
    "the second source is left out": ("if KIND_1 > 0:", "if KIND_1 > 7:"),
    "scales of another row": ("+ place * scale_stride_t", "+ place * data_stride_t * 0"),
    "turned on": ("b * sin), a)", "-(b * sin)), a)"),
    "columns of a pair are exchanged": ("a, b = tl.split(", "b, a = tl.split("),
    "the first columns turn": ("- (D_V - TURNED) // 2", ""),
    "the position of the first query": ("positions_ptr + token", "positions_ptr"),
    "positions are not checked": ("(position < angle_lines)", "(position < 2 * angle_lines)"),
    "negative positions turn": ("(position >= 0) & (position", "(position > -9) & (position"),
    "sines lie where cosines do": ("line + TURNED // 2 + pair", "line + pair"),
    "one column more turns": ("(pair < TURNED // 2)", "(pair < TURNED // 2 - 1)"),
    "empty rows turn": ("tl.where(empty[:, None], 0.0, turned)", "turned"),
}


def interpreted(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = [str(TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path)},
    )


def place() -> Path:
    """The kernel's source."""
    import openmla.kernels.portable

    return Path(openmla.kernels.portable.__file__).with_name("attend.py")


def test_cases_pass():
    """The kernel itself, judged by the cases of interpreted_attend.py."""
    run = interpreted(str(place()))
    lines = run.stdout.splitlines()
    assert run.returncode == 0 and len(lines) == 21, run.stderr[-2000:]
    assert all(line.endswith(" ok") for line in lines)


def planted(name: str) -> str:
    """The source with a defect."""
    source, (old, new) = place().read_text(), DEFECTS[name]
    assert source.count(old) == 1
    return source.replace(old, new)


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_can_be_planted(name: str):
    ast.parse(planted(name))


@pytest.mark.seeded
@pytest.mark.parametrize("name", DEFECTS)
def test_defects_are_seen(name: str, tmp_path: Path):
    changed = tmp_path / "changed_attend.py"
    changed.write_text(planted(name))
    run = interpreted(str(changed))
    failed = [line for line in run.stdout.splitlines() if not line.endswith(" ok")]
    assert failed or run.returncode, f"{name}: nobody noticed"
