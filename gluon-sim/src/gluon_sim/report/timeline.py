"""The simulated timeline of a run, and its picture.

With `schedule="timed"` a nominal clock runs: every unit has a rate, every asynchronous operation a
latency. `NOMINAL` rates are round numbers per SM, good for seeing who waits for whom; they are not
a performance model. Other `Rates` may say that partitions share the units of their SM, and how fast
shared memory is: then no operation is faster than its bytes there. Operations do not wait for one
another there, so the bars of that lane may overlap.
"""

from __future__ import annotations

import bisect
import html
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# Work per nominal clock: elements for the register units, bytes for copies, multiply-adds for MMA.
COST = {
    "vector": 128.0,
    "exp": 16.0,
    "memory": 64.0,
    "global": 64.0,
    "copy": 48.0,
    "mma": 2048.0,
}
LATENCY = {"copy": 500.0, "mma": 60.0}


@dataclass(frozen=True)
class Rates:
    """What the units of one SM do per clock."""

    cost: Mapping[str, float]
    """Work per clock and unit, in the units of COST."""
    latency: Mapping[str, float]
    """Clocks from the end of an operation's work to its completion."""
    shared: bool = False
    """Whether the partitions of a block take turns at the units, or have each to themselves."""
    smem_bytes: float = 0.0
    """Bytes per clock of shared memory; 0: not modeled."""


NOMINAL = Rates(COST, LATENCY)


class SharedUnit:
    """A unit that several partitions use: when it is taken, in order.

    A partition runs far ahead of the others before they get their turn, so idle times of the unit
    are filled, not only what comes after its last use.
    """

    def __init__(self) -> None:
        self._taken: list[tuple[float, float]] = []

    def take(self, ready: float, clocks: float) -> list[tuple[float, float]]:
        """The first free times from `ready` on that make up `clocks`."""
        taken, now, left = self._taken, ready, clocks
        at = bisect.bisect_right(taken, (ready, float("inf")))
        if at:
            now = max(now, taken[at - 1][1])
        spans = []
        while left > 0:
            step = min(left, taken[at][0] - now) if at < len(taken) else left
            if step > 0:
                spans.append((now, now + step))
                taken.insert(at, spans[-1])
                left, at = left - step, at + 1
            if left > 0:
                now, at = taken[at][1], at + 1
        return spans


_COLOR = {
    "wait": "#d9d9d9",
    "vector": "#7fb3d5",
    "exp": "#2e86c1",
    "memory": "#a9cce3",
    "global": "#5d6d7e",
    "copy": "#f5b041",
    "mma": "#58a55c",
    "smem": "#af7ac5",
}


class Event(NamedTuple):
    """One bar: `lane` did `label` from `start` to `end`."""

    lane: str
    kind: str
    label: str
    start: float
    end: float


class Timeline:
    """Bars by lane; adjacent bars of the same kind are merged."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._last: dict[str, int] = {}

    def add(self, lane: str, kind: str, label: str, start: float, end: float) -> None:
        """Append a bar."""
        if end <= start:
            return
        at = self._last.get(lane)
        if at is not None and kind in ("vector", "exp", "memory"):
            old = self.events[at]
            if old.kind == kind and abs(old.end - start) < 1e-6:
                self.events[at] = old._replace(end=end)
                return
        self._last[lane] = len(self.events)
        self.events.append(Event(lane, kind, label, start, end))

    def lanes(self) -> list[str]:
        """Lane names in order of first use."""
        return list(dict.fromkeys(e.lane for e in self.events))

    def busy(self, lane: str) -> float:
        """Share of the whole run in which `lane` did something other than wait."""
        total = max((e.end for e in self.events), default=0.0)
        work = sum(e.end - e.start for e in self.events if e.lane == lane and e.kind != "wait")
        return work / total if total else 0.0

    def svg(self, width: int = 1400, start: float = 0.0, end: float | None = None) -> str:
        """The picture between two times, one row per partition and unit."""
        last = max((e.end for e in self.events), default=1.0)
        stop = min(end if end is not None else last, last)
        shown = [e for e in self.events if e.end > start and e.start < stop]
        lanes = list(dict.fromkeys(e.lane for e in shown))
        row, left, top = 26, 230, 40
        scale = (width - left - 10) / max(stop - start, 1e-9)
        height = top + row * len(lanes) + 40
        parts = [_head(width, height, f"nominal clocks {start:.0f} to {stop:.0f}")]
        for i, lane in enumerate(lanes):
            y = top + i * row
            busy = f"{100 * self.busy(lane):.0f} %"
            parts.append(f'<text x="8" y="{y + 16}">{html.escape(lane)}</text>')
            parts.append(f'<text x="{left - 8}" y="{y + 16}" text-anchor="end">{busy}</text>')
            parts += _bars((e for e in shown if e.lane == lane), y, row, left, scale, start, stop)
        parts += _legend(height - 14)
        return "\n".join([*parts, "</svg>"])

    def waits(self, lane: str) -> list[tuple[str, float]]:
        """What a lane waited for and for how long, longest first."""
        total: dict[str, float] = {}
        for e in self.events:
            if e.lane == lane and e.kind == "wait":
                name = e.label.split(" (")[0]
                total[name] = total.get(name, 0.0) + e.end - e.start
        return sorted(total.items(), key=lambda item: -item[1])

    def _waits(self) -> str:
        rows = []
        for lane in self.lanes():
            longest = [
                f"{html.escape(name)}: {clocks:.0f}" for name, clocks in self.waits(lane)[:4]
            ]
            if longest:
                rows.append(f"<tr><td>{html.escape(lane)}</td><td>{', '.join(longest)}</td></tr>")
        head = "<tr><th>partition</th><th>waited for (nominal clocks)</th></tr>"
        return f"<table cellpadding='6'>{head}{''.join(rows)}</table>"

    def write(self, path: str | Path, **window: float) -> Path:
        """Write the picture; `.html` wraps the SVG in a page, anything else is the bare SVG."""
        target = Path(path)
        picture = self.svg(**window)  # type: ignore[arg-type]
        if target.suffix == ".html":
            picture = (
                "<!doctype html><meta charset='utf-8'><title>gluon-sim timeline</title>"
                "<body style='margin:16px;background:#fff;font-family:sans-serif'>"
                f"{picture}{self._waits()}</body>"
            )
        target.write_text(picture)
        return target


def _head(width: int, height: int, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="8" y="22" font-size="14">{html.escape(title)}</text>'
    )


def _bars(
    events: Iterable[Event],
    y: int,
    row: int,
    left: int,
    scale: float,
    start: float,
    stop: float,
) -> list[str]:
    out = []
    for e in events:
        low, high = max(e.start, start), min(e.end, stop)
        color = _COLOR.get(e.kind, "#999")
        tip = f"{e.label}: {e.start:.0f} to {e.end:.0f}"
        out.append(
            f'<rect x="{left + (low - start) * scale:.2f}" y="{y + 4}" '
            f'width="{max((high - low) * scale, 0.4):.2f}" height="{row - 8}" fill="{color}">'
            f"<title>{html.escape(tip)}</title></rect>"
        )
    return out


def _legend(y: int) -> list[str]:
    out, x = [], 230
    for kind, color in _COLOR.items():
        out.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{color}"/>')
        out.append(f'<text x="{x + 16}" y="{y}">{kind}</text>')
        x += 90
    return out
