"""MkDocs hooks: links from a page to a file of the repository lead to where it is published."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "https://github.com/openmla/openmla/blob/main/"
LINK = re.compile(r"\]\((\.\./[^)\s#]+)(#[^)\s]*)?\)")


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
