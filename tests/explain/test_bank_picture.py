"""The bank picture: well-formed, self-contained, and drawn from the counts."""

from __future__ import annotations

from collections import Counter
from xml.etree import ElementTree

import pytest

from openmla.errors import InvalidArgument
from openmla.explain.bank_picture import BankPanel, bank_picture, v227_picture
from openmla.explain.banks import group_uses
from openmla.modular.cdna4.layout import V227, DefaultV
from openmla.modular.cdna4.layout.v import v_lane_addresses

SVG = "{http://www.w3.org/2000/svg}"


def panels(svg: str) -> dict[str, ElementTree.Element]:
    root = ElementTree.fromstring(svg)
    return {g.attrib["data-panel"]: g for g in root.iter(f"{SVG}g")}


def sums(panel: ElementTree.Element) -> dict[tuple[int, int], int]:
    """(group, bank) -> the count that the strip shows."""
    return {
        (int(r.attrib["data-group"]), int(r.attrib["data-bank"])): int(r.attrib["data-count"])
        for r in panel.iter(f"{SVG}rect")
        if "data-count" in r.attrib
    }


@pytest.mark.parametrize("cell", [(0, 0, 0), (1, 3, 2)])
def test_counts_are_the_enumerated_ones(cell: tuple[int, int, int]) -> None:
    drawn = panels(v227_picture(*cell))
    for title, v in (("default layout", DefaultV()), ("v227 layout", V227())):
        uses = group_uses(v_lane_addresses(v, *cell), 8)
        want = {(g, b): n for g, use in enumerate(uses) for b, n in enumerate(use.words)}
        assert sums(drawn[title]) == want


def test_every_lane_shows_its_two_banks() -> None:
    for panel in panels(v227_picture()).values():
        lanes = Counter(r.attrib.get("data-lane") for r in panel.iter(f"{SVG}rect"))
        del lanes[None]
        assert lanes == {str(lane): 2 for lane in range(64)}


def test_titles_state_the_counts() -> None:
    text = " ".join(ElementTree.fromstring(v227_picture()).itertext())
    assert "default layout: 16 banks per 16 lanes, 2-way conflict" in text
    assert "v227 layout: 32 banks per 16 lanes, no conflict" in text


def test_nothing_is_fetched_from_elsewhere() -> None:
    svg = v227_picture().replace("http://www.w3.org/2000/svg", "")
    assert "http" not in svg and "href" not in svg and "<script" not in svg


def test_everything_lies_inside_the_frame() -> None:
    root = ElementTree.fromstring(v227_picture())
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for g in root.iter(f"{SVG}g"):
        left = float(g.attrib["transform"].removeprefix("translate(").split()[0])
        for r in g.iter(f"{SVG}rect"):
            assert left + float(r.attrib["x"]) + float(r.attrib["width"]) <= width
            assert float(r.attrib["y"]) + float(r.attrib["height"]) <= height


def test_other_patterns_can_be_drawn() -> None:
    mixed = BankPanel('"a" & <b>', [8 * n for n in range(16)] + [256 * n for n in range(16)], 8)
    svg = bank_picture([mixed], title="two & <three>")
    assert list(panels(svg)) == ['"a" & <b>']
    text = " ".join(ElementTree.fromstring(svg).itertext())
    assert "2 to 32 banks per 16 lanes, 16-way conflict" in text
    with pytest.raises(InvalidArgument, match="panels"):
        bank_picture([], title="none")
