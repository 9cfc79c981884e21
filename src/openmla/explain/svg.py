"""The few SVG elements that the pictures are made of. Colors are CSS classes of the page."""

from collections.abc import Iterable
from xml.sax.saxutils import escape, quoteattr

from openmla.explain.style import PICTURE_CSS

CHARACTER = 6.9  # width of a character at 12 px, on the generous side, so that labels never touch


def text_width(text: str, size: int = 12) -> float:
    """An upper estimate of a text's width in pixels."""
    return len(text) * CHARACTER * size / 12


def text(x: float, y: float, words: str, *, css: str = "label", anchor: str = "start") -> str:
    """A line of text; `css` sets its size and color."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{escape(words)}</text>'
    )


def rect(
    box: tuple[float, float, float, float], css: str, *, hint: str = "", rounded: float = 2
) -> str:
    """A rectangle (x, y, width, height) with an optional tooltip."""
    x, y, width, height = box
    shape = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.6):.1f}" height="{height:.1f}" '
        f'rx="{min(rounded, width / 2):.1f}" class="{css}"'
    )
    return f"{shape}><title>{escape(hint)}</title></rect>" if hint else f"{shape}/>"


def line(x1: float, y1: float, x2: float, y2: float, css: str = "axis") -> str:
    """A straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def picture(size: tuple[float, float], title: str, words: str, parts: Iterable[str]) -> str:
    """A whole picture; `title` and `words` are what a screen reader says."""
    width, height = size
    body = "\n".join(parts)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img" '
        f'aria-label={quoteattr(title)} viewBox="0 0 {width:g} {height:g}">\n'
        f"<title>{escape(title)}</title>\n"
        f"<desc>{escape(words)}</desc>\n{body}\n</svg>"
    )


def standalone(
    size: tuple[float, float], title: str, words: str, parts: Iterable[str], more_css: str = ""
) -> str:
    """A picture as a file of its own, with its colors and its paper inside."""
    paper = f'<rect width="{size[0]:g}" height="{size[1]:g}" class="paper"/>'
    return (
        picture(size, title, words, [f"<style>{PICTURE_CSS}{more_css}</style>", paper, *parts])
        + "\n"
    )
