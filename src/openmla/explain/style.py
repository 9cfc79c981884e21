"""The page's style sheet (page.css): light and dark, one color per kind of region."""

from pathlib import Path

CSS = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
