"""MkDocs hooks: links from a page to a file of the repository lead to where it is published."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "https://github.com/openmla/openmla/blob/main/"
LINK = re.compile(r"\]\((\.\./[^)\s#]+)(#[^)\s]*)?\)")


VERSION = re.compile(r'^__version__ = "(.+)"', re.MULTILINE)


def on_config(config: Any) -> Any:
    """The foot of every page: version, license, repository, how to cite.

    Not MkDocs's `repo_url`: with it the theme's script asks GitHub for stars.
    """
    found = VERSION.search((ROOT / "src/openmla/__init__.py").read_text())
    if found is None:
        raise ValueError("src/openmla/__init__.py names no version")
    links = {"repository": "", "license": "LICENSE", "cite": "CITATION.cff"}
    home = REPOSITORY.removesuffix("blob/main/")
    shown = (
        f'<a href="{REPOSITORY + path if path else home}">{name}</a>'
        for name, path in links.items()
    )
    config.copyright = " · ".join([f"openmla {found[1]}, Apache-2.0", *shown])
    return config


def published(markdown: str, folder: str) -> str:
    """The page with links out of docs/ made absolute; a file that is not there is an error."""

    def replace(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        if path.startswith("docs/") and not path.startswith("docs/scripts/"):
            return match[0]
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"a link leads to {path}, which is not there")
        return f"]({REPOSITORY}{path}{match[2] or ''})"

    return LINK.sub(replace, markdown)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by MkDocs for every page."""
    return published(markdown, posixpath.dirname(f"docs/{page.file.src_uri}"))
