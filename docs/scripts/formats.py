"""Cache rows byte by byte, drawn from `openmla.formats`."""

from __future__ import annotations

from openmla.explain.svg import rect, standalone, text, text_width
from openmla.formats import FORMATS, Field, RowLayout

WIDTH, LEFT, TOP, ROW, BAR = 960, 150, 34, 46, 22
COLORS = {"e2m1": "k", "e4m3": "k", "bf16": "rope", "byte": "scratch"}
"""By type; scales have a color of their own."""
NAMES = {"byte": "unused"}
LIE = {"row": "in the row", "page": "behind the rows of a page", "tensor": "in their own tensor"}
ALSO = {
    "bf16": "every engine",
    "fp8_656": "DeepSeek-V3.2: FlashMLA's `V32`, vLLM's `fp8_ds_mla`",
    "fp8_584": "DeepSeek-V4: FlashMLA's `V4`, vLLM's `fp8_ds_mla`, SGLang",
    "fp8_528_v32": "GLM-5.3-Flash: FlashMLA's `V32_NO_ROPE`",
    "fp8_528_v41": "DeepSeek-V4.1, window rows: FlashMLA's newest",
    "fp8_528_v41_split": "the same: FlashMLA's `V41`, vLLM, SGLang, FlashInfer",
    "fp4_288": "DeepSeek-V4.1, compressed rows: FlashMLA's newest",
    "fp4_288_split": "the same: FlashMLA's `V41_FP4`, vLLM, SGLang, FlashInfer",
    "nvfp4_352": "vLLM's `nvfp4_ds_mla`",
}
"""Whose rows they are; formats that are not here are openmla's own."""


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
        kind = f"kind-{'p' if field.role == 'scales' else COLORS[field.dtype]} edge"
        parts.append(rect((end, y, width, BAR), kind, hint=_words(field)))
        label = f"{field.count} {NAMES.get(field.dtype, field.dtype)}"
        if text_width(label) + 6 < width:
            parts.append(text(end + width / 2, y + 15, label, css="inside", anchor="middle"))
        end += width
    return parts


def _legend(y: float) -> list[str]:
    parts, x = [], float(LEFT)
    labels = {"k": "e4m3 or e2m1 columns", "rope": "bf16 columns", "p": "scales"}
    for color, label in labels.items():
        parts += [rect((x, y - 10, 12, 12), f"kind-{color}"), text(x + 18, y, label)]
        x += 40 + text_width(label)
    return parts


def _words(field: Field) -> str:
    kind = NAMES.get(field.dtype, field.dtype)
    return f"{field.tensor} bytes {field.offset} to {field.end - 1}: {field.count} {kind}"


def regions() -> dict[tuple[str, str], str]:
    """The tables of every format and of every field of it."""
    page = "docs/cache-formats.md"
    return {(page, "formats"): _formats(), (page, "fields"): _fields()}


def _formats() -> str:
    lines = [
        "| format | columns | a scale per | scales lie | other columns | bytes | whose rows |",
        "|---|---|---|---|---|---|---|",
    ]
    for layout in layouts():
        format = layout.format
        per = f"{layout.block}: {format.scale}" if format.scale else "–"
        lie = LIE[format.scales_lie] if format.scale else "–"
        other = f"{format.tail_columns} {format.tail}" if format.tail_columns else "–"
        columns = f"{layout.width - format.tail_columns} {format.element}"
        cells = (f"`{format.name}`", columns, per, lie, other, layout.row_bytes)
        lines.append(
            "| " + " | ".join(map(str, cells)) + f" | {ALSO.get(format.name, 'openmla')} |"
        )
    return "\n".join(lines)


def _fields() -> str:
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
    return "\n".join(lines)
