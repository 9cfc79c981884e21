"""README.md: its Python blocks run, in order, in one namespace.

A block opened with "```python no-run" is shown to readers only.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"
FENCE = re.compile(r"^```python([^\n]*)\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)


def python_blocks(text: str) -> list[tuple[int, str]]:
    """(line of its first statement, source) of every block that is to run."""
    return [
        (text[: match.start(2)].count("\n") + 1, match[2])
        for match in FENCE.finditer(text)
        if match[1].strip() != "no-run"
    ]


def test_readme_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    # The one thing that a reader has and the README does not make: a model.
    tiny = runpy.run_path(str(README.parent / "examples/transformers_generate.py"))["tiny"]
    namespace: dict[str, object] = {"__name__": "readme", "model": tiny()}
    for line, source in python_blocks(README.read_text()):
        # Leading empty lines make a traceback point at the line in README.md.
        exec(compile("\n" * (line - 1) + source, str(README), "exec"), namespace)


def test_blocks_are_found_and_no_run_is_respected():
    text = (
        "a\n```python\nx = 1\n```\n```python no-run\nboom()\n```\n```\ny\n```\n```python\nx\n```\n"
    )
    assert python_blocks(text) == [(3, "x = 1\n"), (12, "x\n")]


def test_links_are_absolute_and_lead_to_files():
    """A package page has no files beside it."""
    home = "https://github.com/openmla/openmla/"
    raw = "https://raw.githubusercontent.com/openmla/openmla/main/"
    links = re.findall(r"\]\(([^)#]+)", README.read_text())
    assert links and [link for link in links if not link.startswith("https://")] == []
    ours = (f"{home}blob/main/", f"{home}tree/main/", raw)
    inside = [link for link in links if link.startswith(ours)]
    paths = [link.removeprefix(raw).split("/main/")[-1] for link in inside]
    assert len(paths) > 10
    assert [path for path in paths if not (README.parent / path).exists()] == []
