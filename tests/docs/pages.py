"""The pages of docs/: their code blocks, their links, and how they run."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
FENCE = re.compile(r"^```([a-z]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!`)\[[^\]\n]*\]\(([^)\s]+)\)")


def blocks(text: str, kind: str) -> list[tuple[int, str]]:
    """(line of its first statement, source) of every block of a kind."""
    found = [(text[: m.start(2)].count("\n") + 1, m) for m in FENCE.finditer(text)]
    return [(line, m[2]) for line, m in found if m[1] == kind]


def as_module(text: str) -> str:
    """All Python blocks of a page at the lines where they stand, the rest empty."""
    lines = [""] * (text.count("\n") + 2)
    for first, source in blocks(text, "python"):
        for number, line in enumerate(source.splitlines()):
            lines[first - 1 + number] = line
    return "\n".join(lines) + "\n"


def run_page(page: Path, folder: Path) -> object:
    """Execute a page's Python, as a file, since Triton reads the source of kernels from one."""
    name = "page_" + page.stem.replace("-", "_")
    path = folder / f"{name}.py"
    path.write_text(as_module(page.read_text()))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


def links(text: str) -> list[str]:
    """Targets of all links and pictures outside of code."""
    return LINK.findall(FENCE.sub("", text))
