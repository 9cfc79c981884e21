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


def links(text: str) -> tuple[list[str], dict[str, str], set[str]]:
    """Targets that stand in a line, definitions of references, and the references that are used."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    inline = re.findall(r"\]\(([^)]+)\)", prose)
    defined = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", prose, re.MULTILINE))
    return inline, defined, set(re.findall(r"\]\[([^\]]+)\]", prose))


def test_links_are_absolute_and_lead_to_files():
    """A package page has no files beside it: every link is a URL, written once, below the text."""
    home = "https://github.com/openmla/openmla/"
    raw = "https://raw.githubusercontent.com/openmla/openmla/main/"
    inline, defined, used = links(README.read_text())
    assert [link for link in inline if not link.startswith(("https://", "#"))] == []
    assert used == set(defined)
    targets = list(defined.values())
    assert len(set(targets)) == len(targets) > 10
    ours = (f"{home}blob/main/", f"{home}tree/main/", raw)
    assert [target for target in targets if not target.startswith(ours)] == []
    paths = [target.removeprefix(raw).split("/main/")[-1] for target in targets]
    assert [path for path in paths if not (README.parent / path).exists()] == []


def test_links_of_a_text_are_found():
    """A check of the checker."""
    text = "[a](b) ![c][d] [e][f]\n```python\nx[0][1]\n```\n[d]: https://g\n"
    assert links(text) == (["b"], {"d": "https://g"}, {"d", "f"})
