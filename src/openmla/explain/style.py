"""Style sheets of the page and of pictures: light and dark, one color per kind of region."""

from pathlib import Path


def _sheet(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


PICTURE_CSS = _sheet("picture.css")
"""What a picture needs, on the page or in a file of its own."""
CSS = PICTURE_CSS + _sheet("page.css")
