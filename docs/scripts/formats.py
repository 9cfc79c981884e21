"""Cache rows byte by byte, drawn from `openmla.formats`."""

from __future__ import annotations

from openmla.explain.svg import rect, standalone, text, text_width
from openmla.formats import FORMATS, Field, RowLayout

WIDTH, LEFT, TOP, ROW, BAR = 960, 150, 34, 46, 22
COLORS = {"e4m3": "k", "bf16": "rope", "fp32": "p", "ue8m0": "p", "byte": "scratch"}
NAMES = {"byte": "unused"}


def widths(name: str) -> tuple[int, int]:
    """The (latent, rope) that a format is shown at: its own, or DeepSeek-V3's."""
    return (FORMATS[name].widths or ((512, 64),))[0]


def layouts() -> list[RowLayout]:
    """One per format, in the order of `FORMATS`."""
    return [format.layout(*widths(name)) for name, format in FORMATS.items()]


def pictures() -> dict[str, str]:
    """All formats to one scale, scales that lie in a tensor of their own after a gap."""
    scale = (WIDTH - LEFT - 60) / max(layout.row_bytes for layout in layouts())
    parts = [text(0, 16, "bytes of one token, to scale", css="figure")]
    for number, layout in enumerate(layouts()):
        y = TOP + number * ROW
        parts.append(text(0, y + 15, layout.format.name, css="figure"))
        parts.append(text(0, y + 30, f"{layout.row_bytes} bytes", css="note"))
        parts += _row(layout, y, scale)
    words = "; ".join(str(layout).replace("\n", ",") for layout in layouts())
    height = TOP + len(layouts()) * ROW + 26
    parts += _legend(height - 10)
    return {"cache-formats.svg": standalone((WIDTH, height), "Cache rows", words, parts)}


def _row(layout: RowLayout, y: float, scale: float) -> list[str]:
    parts, end = [], LEFT
    for field in layout.fields:
        if field.tensor == "scales" and field.offset == 0:
            end += 8  # another tensor
        width = max((field.end - field.offset) * scale, 3.0)
        kind = f"kind-{COLORS[field.dtype]} edge"
        parts.append(rect((end, y, width, BAR), kind, hint=_words(field)))
        label = f"{field.count} {NAMES.get(field.dtype, field.dtype)}"
        if text_width(label) + 6 < width:
            parts.append(text(end + width / 2, y + 15, label, css="inside", anchor="middle"))
        end += width
    return parts


def _legend(y: float) -> list[str]:
    parts, x = [], float(LEFT)
    for dtype in ("e4m3", "bf16", "fp32"):
        label = "scales (fp32 or ue8m0)" if dtype == "fp32" else f"{dtype} columns"
        parts += [rect((x, y - 10, 12, 12), f"kind-{COLORS[dtype]}"), text(x + 18, y, label)]
        x += 40 + text_width(label)
    return parts


def _words(field: Field) -> str:
    kind = NAMES.get(field.dtype, field.dtype)
    return f"{field.tensor} bytes {field.offset} to {field.end - 1}: {field.count} {kind}"


def regions() -> dict[tuple[str, str], str]:
    """The table of every field of every format."""
    lines = [
        "| format | latent + rope | tensor | bytes | holds | bytes per token |",
        "|---|---|---|---|---|---|",
    ]
    for layout in layouts():
        first = (f"`{layout.format.name}`", f"{layout.latent} + {layout.rope}", layout.row_bytes)
        for field in layout.fields:
            name, columns, size = first
            place = f"{field.offset} … {field.end - 1}"
            holds = f"{field.count} {NAMES.get(field.dtype, field.dtype)}"
            lines.append(f"| {name} | {columns} | `{field.tensor}` | {place} | {holds} | {size} |")
            first = ("", "", "")
    return {("docs/cache-formats.md", "fields"): "\n".join(lines)}
