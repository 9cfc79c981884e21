"""The site builds without a warning, has no dead link and asks no other host for anything."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from docs.pages import ROOT

pytest.importorskip("mkdocs", reason="the docs extra is not installed")
pytest.importorskip("mkdocstrings", reason="the docs extra is not installed")
CALLS = (
    "mla_prefill",
    "mla_prefill_latent",
    "mla_prefill_sparse",
    "index_topk",
    "merge_states",
    "merge_many",
)
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """Ids, links, and what a browser would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(values["href"])
        elif LOADED.get(tag) in values:
            self.loads.append(values[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in site.rglob("*.html")}


@pytest.mark.slow
def test_no_link_is_dead(site: Path, pages: dict[Path, Page]):
    dead = []
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if target.startswith(("http", "mailto")) or path.name == "404.html":
                continue
            file = (path.parent / target).resolve() if target else path
            file = file / "index.html" if file.is_dir() else file
            if not file.exists() or (anchor and anchor not in pages[file].ids):
                dead.append(f"{path.name}: {link}")
    assert dead == []
    assert sum(len(page.links) for page in pages.values()) > 500


@pytest.mark.slow
def test_no_other_host_is_asked(site: Path, pages: dict[Path, Page]):
    loads = {url for page in pages.values() for url in page.loads}
    assert loads and [url for url in loads if url.startswith(("http", "//"))] == []
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", sheet.read_text()), sheet.name
    # The theme's script asks GitHub for stars where a page has this, and a CDN where it has that.
    for path in pages:
        assert 'data-md-component="source"' not in path.read_text()
        assert 'class="mermaid"' not in path.read_text()


@pytest.mark.slow
def test_the_right_call_is_two_clicks_away(pages: dict[Path, Page]):
    """From the first page to the reference of every call, by way of "Which call do I need?"."""
    by_name = {path.name: page for path, page in pages.items()}
    assert "which-call.html" in by_name["index.html"].links
    calls = {
        link.partition("#")[2] for link in by_name["which-call.html"].links if "api.html#" in link
    }
    assert {f"openmla.{name}" for name in CALLS} <= calls
    assert calls <= by_name["api.html"].ids


@pytest.mark.slow
def test_examples_of_the_reference_are_code(site: Path):
    text = (site / "api.html").read_text()
    assert text.count('<span class="gp">') >= 20 and "<blockquote>" not in text


def test_the_hooks_of_the_site(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs/scripts"))
    hooks, doctests = (importlib.import_module(name) for name in ("hooks", "doctests"))
    assert hooks.published("[a](../src/openmla/api/attention.py)", "docs").endswith(
        "main/src/openmla/api/attention.py)"
    )
    assert hooks.published("[a](other.md)", "docs") == "[a](other.md)"
    with pytest.raises(FileNotFoundError, match="no_such_file"):
        hooks.published("[a](../src/no_such_file.py)", "docs")
    example = "Adds.\n\n>>> 1 + 1\n2\n>>> x\n\nMore.\n"
    assert doctests.fenced(example) == "Adds.\n\n```pycon\n>>> 1 + 1\n2\n>>> x\n```\nMore.\n"
