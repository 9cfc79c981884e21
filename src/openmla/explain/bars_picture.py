"""Horizontal bars, in groups, as an SVG file of its own: what `openmla bench --plot` draws."""

from collections.abc import Mapping

from openmla.explain.svg import rect, standalone, text, text_width

WIDTH, MARGIN, TOP, BAR, GAP = 960, 12, 52, 14, 12
COLORS = ("q", "p", "v", "scratch")


def bars_picture(title: str, groups: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """A group per name, a bar per figure in it, all to one scale."""
    kinds = list(dict.fromkeys(kind for bars in groups.values() for kind in bars))
    color = {kind: f"kind-{COLORS[i % len(COLORS)]}" for i, kind in enumerate(kinds)}
    left = MARGIN + max(map(text_width, groups), default=0) + 8
    most = max((value for bars in groups.values() for value in bars.values()), default=1)
    scale = (WIDTH - left - text_width(f"{most:,.0f}") - MARGIN) / most
    parts, x, y = [text(MARGIN, 18, title, css="figure")], left, float(TOP)
    for kind in kinds:
        parts += [rect((x, 30, 10, 10), color[kind]), text(x + 16, 39, kind)]
        x += 32 + text_width(kind)
    parts.append(text(x, 39, unit, css="note"))
    for name, bars in groups.items():
        parts.append(text(MARGIN, y + BAR * len(bars) / 2 + 4, name))
        for kind, value in bars.items():
            hint = f"{name}, {kind}: {value:.1f} {unit}"
            parts.append(rect((left, y, value * scale, BAR - 2), color[kind], hint=hint))
            parts.append(text(left + value * scale + 4, y + 10, f"{value:,.0f}", css="note"))
            y += BAR
        y += GAP
    words = "; ".join(
        f"{n}: " + ", ".join(f"{k} {v:.0f}" for k, v in b.items()) for n, b in groups.items()
    )
    return standalone((WIDTH, y), title, words, parts)
