"""Pictures of LDS bank conflicts as self-contained SVG.

Banks run to the right, lanes downwards. A small cell is one word that a lane asks for, colored by
how many words its 16-lane group asks of that bank; the strip under each group adds the group up.

>>> v227_picture().startswith("<svg")
True
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from openmla.errors import InvalidArgument
from openmla.explain.banks import CDNA4_LDS, Banks, BankUse, group_uses, words_of
from openmla.modular.cdna4.layout.v import READ_BYTES, DefaultV, v_lane_addresses
from openmla.modular.cdna4.layout.v227 import V227

#: Fill by number of words asked of a bank: none, one (free), two, three or more (costly).
_FILLS = ("#e9edf2", "#2a9d8f", "#e76f51", "#9d2235")
_MEANINGS = ("unused", "1 word: no conflict", "2 words: two cycles", "3 or more")

_CELL = 9  # width of a bank
_LANE = 6  # height of a lane's row
_SUM = 14  # height of a group's sum
_GAP = 9  # between groups
_LEFT = 74  # room for row labels
_TOP = 104  # room for titles
_BETWEEN = 34  # between panels
_BOTTOM = 40  # room for the axis and the legend


@dataclass(frozen=True)
class BankPanel:
    """One access pattern to draw: the byte address of every lane of a wave."""

    title: str
    lane_addresses: Sequence[int]
    access_bytes: int

    def uses(self, banks: Banks) -> tuple[BankUse, ...]:
        """The counts that the panel shows, one per lane group."""
        return group_uses(self.lane_addresses, self.access_bytes, banks)


def v227_picture(i_strip: int = 0, j_depth: int = 0, r: int = 0) -> str:
    """One transposing read of V, default layout beside v227."""
    cell = (i_strip, j_depth, r)
    panels = [
        BankPanel("default layout", v_lane_addresses(DefaultV(), *cell), READ_BYTES),
        BankPanel("v227 layout", v_lane_addresses(V227(), *cell), READ_BYTES),
    ]
    what = (
        f"One 8-byte transposing read of V by 64 lanes (strip {i_strip}, tile {j_depth}, read {r})"
    )
    return bank_picture(panels, title=what)


def bank_picture(panels: Sequence[BankPanel], *, title: str, banks: Banks = CDNA4_LDS) -> str:
    """Draw panels side by side. Each states the banks a group touches and its conflict."""
    if not panels:
        raise InvalidArgument("panels", "at least one", 0)
    panel_width = _LEFT + banks.count * _CELL
    groups = max(len(panel.uses(banks)) for panel in panels)
    width = len(panels) * (panel_width + _BETWEEN) + 10
    height = _TOP + groups * _group_height(banks) + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="system-ui, sans-serif" fill="#1d2733">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape('; '.join(_headline(panel, banks) for panel in panels))}</desc>",
        f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>',
        _text(22, 34, title, size=18, weight=600),
    ]
    for n, panel in enumerate(panels):
        left = 10 + n * (panel_width + _BETWEEN)
        parts.append(f'<g data-panel={quoteattr(panel.title)} transform="translate({left} 0)">')
        parts.extend(_panel(panel, banks))
        parts.append("</g>")
    parts.extend(_legend(10 + _LEFT, height - 16))
    parts.append("</svg>")
    return "\n".join(parts)


def _headline(panel: BankPanel, banks: Banks) -> str:
    """The panel's counts in words: "32 banks per 16 lanes, no conflict"."""
    uses = panel.uses(banks)
    distinct = _span([use.distinct for use in uses])
    ways = max(use.ways for use in uses)
    verdict = "no conflict" if ways == 1 else f"{ways}-way conflict"
    return f"{panel.title}: {distinct} banks per {banks.group} lanes, {verdict}"


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _panel(panel: BankPanel, banks: Banks) -> Iterator[str]:
    ways = max(use.ways for use in panel.uses(banks))
    color = _fill(ways)
    yield f'<circle cx="{_LEFT + 5}" cy="63" r="5" fill="{color}"/>'
    yield _text(_LEFT + 17, 68, _headline(panel, banks), size=15, weight=600)
    for bank in (*range(0, banks.count, 8), banks.count - 1):
        yield _text(_LEFT + bank * _CELL + _CELL / 2, _TOP - 8, str(bank), anchor="middle")
    yield _text(_LEFT - 8, _TOP - 8, "bank", anchor="end")
    for group, use in enumerate(panel.uses(banks)):
        yield from _group(panel, banks, group, use)


def _group(panel: BankPanel, banks: Banks, group: int, use: BankUse) -> Iterator[str]:
    """A group's lanes, then its sum."""
    top = _TOP + group * _group_height(banks)
    first = group * banks.group
    yield _text(
        _LEFT - 8,
        top + banks.group * _LANE / 2 + 4,
        f"lanes {first}–{first + banks.group - 1}",
        anchor="end",
    )
    yield (
        f'<rect x="{_LEFT}" y="{top}" width="{banks.count * _CELL}" '
        f'height="{banks.group * _LANE}" fill="#f6f8fa"/>'
    )
    for row in range(banks.group):
        address = panel.lane_addresses[first + row]
        for word in words_of(address, panel.access_bytes, banks):
            bank = word % banks.count
            yield (
                f'<rect x="{_LEFT + bank * _CELL}" y="{top + row * _LANE}" width="{_CELL - 1}" '
                f'height="{_LANE - 1}" fill="{_fill(use.words[bank])}" '
                f'data-lane="{first + row}" data-bank="{bank}"/>'
            )
    yield from _sums(use, group, top + banks.group * _LANE + 2)


def _sums(use: BankUse, group: int, top: int) -> Iterator[str]:
    """One cell per bank with the number of words asked of it."""
    yield _text(_LEFT - 8, top + 11, "sum", anchor="end", fill="#5b6b7b")
    for bank, count in enumerate(use.words):
        x = _LEFT + bank * _CELL
        yield (
            f'<rect x="{x}" y="{top}" width="{_CELL - 1}" height="{_SUM}" rx="1.5" '
            f'fill="{_fill(count)}" data-group="{group}" data-bank="{bank}" '
            f'data-count="{count}"/>'
        )
        if count:
            center = x + (_CELL - 1) / 2
            yield _text(center, top + 10.5, str(count), size=9, anchor="middle", fill="#ffffff")


def _legend(left: float, baseline: float) -> Iterator[str]:
    x = left
    for fill, meaning in zip(_FILLS, _MEANINGS, strict=True):
        yield f'<rect x="{x}" y="{baseline - 10}" width="12" height="12" rx="2" fill="{fill}"/>'
        yield _text(x + 18, baseline, meaning)
        x += 46 + 6.4 * len(meaning)


def _group_height(banks: Banks) -> int:
    return banks.group * _LANE + 2 + _SUM + _GAP


def _fill(count: int) -> str:
    return _FILLS[min(count, len(_FILLS) - 1)]


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 11,
    weight: int = 400,
    anchor: str = "start",
    fill: str = "#1d2733",
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'
    )
