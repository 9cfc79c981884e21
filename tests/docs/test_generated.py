"""What scripts write into the pages is what they would write now."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from docs.pages import DOCS, ROOT
from openmla.formats import FORMATS

sys.path.insert(0, str(DOCS / "scripts"))

import generate
import performance
import results
import serving
import timelines

DRAWN = {p.name: p.read_text() for p in generate.PICTURES.glob("*.svg")}
TIMED = {f"{name}.svg" for name in timelines.CASES}
AGAIN = "run python docs/scripts/generate.py"


@pytest.fixture(scope="module")
def wanted() -> dict[Path, str]:
    return generate.wanted()


def test_pages_and_figures_are_current(wanted: dict[Path, str]):
    """The tables of README.md and docs/ are those of benchmarks/results and openmla.formats."""
    pages = {path: text for path, text in wanted.items() if path.suffix == ".md"}
    assert {p.name for p in pages} == {
        "README.md",
        "cache-formats.md",
        "peers.md",
        "performance.md",
        "training.md",
    }
    assert [p.name for p, text in pages.items() if p.read_text() != text] == [], AGAIN


def test_races_name_their_result_file_where_the_script_writes_it():
    """By hand it would be an older one after the next race."""
    page = (DOCS / "peers.md").read_text()
    by_hand = re.sub(r"<!-- ([^:]+): begin -->.*?<!-- \1: end -->", "", page, flags=re.S)
    assert "results/peers-" in page and "results/peers-" not in by_hand


def test_pictures_are_current(wanted: dict[Path, str]):
    new = {path.name: text for path, text in wanted.items() if path.suffix == ".svg"}
    assert set(new) == set(DRAWN)
    assert [n for n in set(new) - TIMED if new[n] != DRAWN[n]] == [], AGAIN


def clocks(svg: str) -> float:
    found = re.search(r"([\d,]+) nominal clocks", svg)
    assert found is not None
    return float(found[1].replace(",", ""))


def lanes(svg: str) -> list[str]:
    return re.findall(r'x="0\.0" y="\d+\.\d" class="label"[^>]*>([^<]+)', svg)


@pytest.mark.parametrize("name", sorted(TIMED))
def test_timelines_are_those_of_the_kernels(wanted: dict[Path, str], name: str):
    """`make docs` draws them anew; here they may be of a kernel that differs by a few clocks."""
    new = wanted[generate.PICTURES / name]
    assert lanes(new) == lanes(DRAWN[name]) and len(lanes(new)) >= 5, AGAIN
    assert clocks(new) == pytest.approx(clocks(DRAWN[name]), rel=0.05), AGAIN


def test_every_format_is_shown_with_all_its_bytes(wanted: dict[Path, str]):
    table = (DOCS / "cache-formats.md").read_text()
    assert [n for n in FORMATS if f"| `{n}` |" not in table] == []
    picture = DRAWN["cache-formats.svg"]
    fields = [
        f for name in FORMATS for f in FORMATS[name].layout(*generate.formats.widths(name)).fields
    ]
    assert picture.count("<title>") - 1 == len(fields)


def test_pictures_are_small_and_ask_no_other_host():
    assert {n: len(svg) for n, svg in DRAWN.items() if len(svg) > 20_000} == {}
    for svg in DRAWN.values():
        assert set(re.findall(r"https?://[\w./]+", svg)) == {"http://www.w3.org/2000/svg"}
        assert "url(" not in svg and "@import" not in svg


def test_a_stale_figure_is_found():
    """A check of the checker: one digit of one table."""
    page = ROOT / "docs/performance.md"
    table = performance.regions()["docs/performance.md", "decode"]
    changed = re.sub(r"\| (\d)", lambda m: f"| {int(m[1]) % 9 + 1}", page.read_text(), count=1)
    assert changed != page.read_text()
    assert generate.with_region(changed, "decode", table) == page.read_text()
    with pytest.raises(ValueError, match="expected one region"):
        generate.with_region("a page without it", "decode", table)


def test_a_file_that_is_added_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Figures per contestant, from the newest file that has the section."""
    what = ("indexer-h200", "scores", "of_scaled_mm", ".2f")
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    assert performance.contestants_table(*what) == "Not measured yet."
    for day, share in (("15", 0.5), ("16", 0.75)):
        rows = [{"shape": "4096 of 32768", "of_scaled_mm": {"paged": share}}]
        record = {
            "date": f"2026-11-{day}",
            "gpu": "a GPU",
            "torch": "2",
            "scores": {"": {"results": rows}},
        }
        (tmp_path / f"indexer-h200-2026-11-{day}.json").write_text(json.dumps(record))
    (tmp_path / "indexer-h200-2026-11-17.json").write_text('{"select": {}}')
    assert "| 4096 of 32768 | 0.75 |" in performance.contestants_table(*what)


def test_no_measured_figure_stands_outside_of_a_region():
    """TFLOP/s, TB/s and shares of a peer in README.md and docs/ are written by the script alone."""
    region = re.compile(r"<!-- (\S+): begin -->.*?<!-- \1: end -->", re.DOTALL)
    measured = re.compile(
        r"\d[\d.,]* (?:TFLOP/s|GFLOP/s|TB/s)|\d\.\d+ (?:times|of) (?:cuDNN|a matmul)"
    )
    found = {
        path.name: measured.findall(region.sub("", path.read_text()))
        for path in [*DOCS.glob("*.md"), ROOT / "README.md"]
    }
    assert {name: figures for name, figures in found.items() if figures} == {}


LOAD = {
    "load": "even",
    "contestant": "openmla",
    "requests": 32,
    "prompt_tokens": 65536,
    "new_tokens_per_s": 812.4,
    "first_token": {"p50_ms": 1234.5, "p99_ms": 2000.0},
    "between_tokens": {"p50_ms": 21.04, "p99_ms": 99.96},
    "cache_bytes": 2**29,
    "peak_bytes": 3 * 2**30,
}


def test_a_result_of_the_server_becomes_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    assert "Not measured yet" in serving.regions()["docs/performance.md", "serving"]
    record = {
        "provenance": {"date": "2026-01-02", "gpu": "a GPU", "torch": "2"},
        "transformers": "5.17.0",
        "loads": [LOAD],
        "skipped": ["mixed 256"],
        "again": {"same": True, "bytes_more": 0},
        "failures": {"failed": 3, "bad": 3, "same": False},
        "neighbors": {"blocks of 64 rows": {"requests": 6, "same": 5}},
    }
    (tmp_path / "serve-h200-2026-01-02.json").write_text(json.dumps(record))
    text = serving.regions()["docs/performance.md", "serving"]
    assert "| even | openmla | 32 | 65,536 | 812 | 1.23, 2.00 s | 21.0, 100.0 ms |" in text
    assert "| 0.50 GiB | 3.00 GiB |" in text
    for words in ("the same tokens, 0 bytes", "their tokens CHANGED", "5 of 6", "mixed 256"):
        assert words in text
    assert "the first launch of every kernel is inside" in text
    assert text.endswith("serve-h200-2026-01-02.json), Transformers 5.17.0")
    warmed = {
        "is_cut": True,
        "seconds": 30.2,
        "new_tokens": 800,
        "asked_new_tokens": 8704,
        "began": 12,
        "cache_rows": 1000,
        "cache_rows_wanted": 4000,
        "kernels_met_first": 2,
    }
    record |= {
        "loads": [LOAD | warmed, LOAD | warmed | {"contestant": "expanded", "is_cut": False}],
        "compiling": "12 of 12 kernels, 25 s",
        "warm_after_s": 40.0,
        "bars": {"speed": 2.5, "cache": 0.012, "first_token_p50": 0.75, "first_token_p99": 0.9},
        "neighbors": {"error": "OutOfMemoryError: none left"},
    }
    (tmp_path / "serve-h200-2026-01-03.json").write_text(json.dumps(record))
    text = serving.regions()["docs/performance.md", "serving"]
    for words in (
        "| 812 (cut) |",
        "cut after 30 s, with 800 of 8,704 new tokens; 12 of 32 requests had begun",
        "room for 1,000 of 4,000 rows",
        "12 of 12 kernels, 25 s",
        "4 kernels were met for the first time",
        " openmla 2, ",
        "2.5 times the tokens/s of the expanded cache, 0.012 of its bytes, 0.75 of its median",
        "and 0.90 of its p99.",
        "The step neighbors failed: OutOfMemoryError: none left.",
    ):
        assert words in text
    assert "even, 32 requests, expanded: 812.4" in serving.pictures()["serving.svg"]
