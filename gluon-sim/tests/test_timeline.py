"""The pipeline picture of a timed run."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from gluon_sim import InvalidArgument
from gluon_sim.report.timeline import COST, LATENCY, NOMINAL, Rates, SharedUnit, Timeline
from launches import CASES
from launches.hopper import hopper_dense


@pytest.fixture(scope="module")
def timeline():
    report = hopper_dense([128], [256], 1, grid=1).run(schedule="timed")
    report.raise_if_bad()
    return report.timeline


def test_every_partition_and_unit_has_a_lane(timeline):
    lanes = timeline.lanes()
    for name in ("consumer#0", "consumer#1", "producer", "mma", "copy"):
        assert any(name in lane for lane in lanes), (name, lanes)


def test_bars_of_a_lane_do_not_overlap(timeline):
    for lane in timeline.lanes():
        bars = sorted((e.start, e.end) for e in timeline.events if e.lane == lane)
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(bars)), lane


def test_waits_say_what_for(timeline):
    waits = [e.label for e in timeline.events if e.kind == "wait"]
    assert any("k_full" in label for label in waits)


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_picture_is_written(timeline, tmp_path, suffix):
    path = timeline.write(tmp_path / f"tile.{suffix}")
    text = path.read_text()
    assert text.count("<rect") > 50
    if suffix == "svg":
        ElementTree.fromstring(text)
    else:
        assert "waited for" in text


def test_an_option_of_simulate_writes_it(tmp_path):
    CASES["pipeline"]().run(schedule="timed", picture=tmp_path / "pipeline.html")
    assert "ring" in (tmp_path / "pipeline.html").read_text()
    with pytest.raises(InvalidArgument, match="picture"):
        CASES["pipeline"]().run(picture=tmp_path / "x.svg")


def test_only_timed_runs_record():
    assert CASES["pipeline"]().run(schedule="random").timeline is None


def test_merging_of_adjacent_bars():
    t = Timeline()
    t.add("a", "vector", "vector", 0.0, 1.0)
    t.add("a", "vector", "vector", 1.0, 2.0)
    t.add("a", "wait", "x", 2.0, 3.0)
    assert [(e.kind, e.start, e.end) for e in t.events] == [
        ("vector", 0.0, 2.0),
        ("wait", 2.0, 3.0),
    ]
    assert t.busy("a") == pytest.approx(2 / 3)


def test_idle_times_of_a_shared_unit_are_filled():
    unit = SharedUnit()
    assert unit.take(10, 5) == [(10, 15)]
    assert unit.take(20, 5) == [(20, 25)]
    assert unit.take(12, 7) == [(15, 20), (25, 27)]
    assert unit.take(0, 4) == [(0, 4)]
    assert unit.take(0, 0) == []


def test_rates_are_obeyed():
    """Products at half the rate take twice as long; nothing else changes."""
    slow = Rates({**COST, "mma": COST["mma"] / 2}, LATENCY)
    totals = []
    for rates in (NOMINAL, slow):
        report = CASES["blackwell_attention"]().run(schedule="timed", rates=rates)
        bars = [e for e in report.timeline.events if e.kind == "mma"]
        totals.append(sum(e.end - e.start for e in bars))
    assert totals[1] == pytest.approx(2 * totals[0])
