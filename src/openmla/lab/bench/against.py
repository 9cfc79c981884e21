"""A run against an earlier one: a ratio for every figure that both have.

Of every figure more is better. Times of two days differ by some percent on one machine, since its
clocks do; ratios beside a peer of the same run do not, and are compared too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.table import Table

from openmla.errors import InvalidArgument
from openmla.records import shown

LIMIT = 0.03
MACHINE = ("gpu", "processor", "threads", "torch", "triton", "cuda", "commit")


class Change(NamedTuple):
    """One figure of one case, before and now."""

    case: str
    figure: str
    before: float
    now: float

    @property
    def ratio(self) -> float:
        """Above 1: better than before."""
        return self.now / self.before

    @property
    def moved(self) -> bool:
        """Whether by more than runs of one program differ."""
        return abs(self.ratio - 1) > LIMIT


def checked(record: Any) -> dict[str, Any]:
    """The record of an earlier run; InvalidArgument if its figures cannot be read."""
    expected = "what `openmla bench --json` writes"
    try:
        figures = dict(_figures(record))
    except (AttributeError, KeyError, TypeError) as error:
        raise InvalidArgument("record", expected, f"{type(error).__name__}: {error}") from None
    for key, value in figures.items():
        if type(value) not in (int, float):
            raise InvalidArgument(" ".join(key), "a number", shown(value))
    found: dict[str, Any] = record
    return found


def changes(now: dict[str, Any], before: dict[str, Any]) -> list[Change]:
    """Figures that two records share, in the order of this run's."""
    old = dict(_figures(before))
    both = ((key, value) for key, value in _figures(now) if old.get(key))
    return [Change(*key, old[key], value) for key, value in both]


def table(found: list[Change], now: dict[str, Any], before: dict[str, Any]) -> Table:
    """All of them, with a mark at those that moved, and what differs between the machines."""
    given = before.get("provenance", before)
    other = [
        f"{n} {given.get(n)}, now {now[n]}" for n in MACHINE if n in now and now[n] != given.get(n)
    ]
    title = f"against {given.get('date')}: " + ("; ".join(other) or "the same machine and commit")
    result = Table(
        "case", "figure", "before", "now", "ratio", "", title=title, title_justify="left"
    )
    for change in found:
        mark = "" if not change.moved else "better" if change.ratio > 1 else "WORSE"
        figures = (f"{x:.4g}" for x in (change.before, change.now))
        result.add_row(change.case, change.figure, *figures, f"{change.ratio:.3f}", mark)
    return result


def _figures(record: dict[str, Any]) -> Iterator[tuple[tuple[str, str], float]]:
    """((case, figure), value) of a record of `openmla bench` or of a script's section "speed"."""
    speed = record.get("speed", [])
    if isinstance(speed, dict):  # of a script; a list is of `openmla validate`
        speed = [row for group in speed.values() for row in group["results"]]
    for row in [*record.get("rows", []), *speed]:
        case = row.get("shape") or f"{row.get('case', '')}, {row.get('dtype', '')}"
        tflops = row.get("tflops")
        if isinstance(tflops, dict):
            tflops = tflops.get("openmla")
        yield (case, "TFLOP/s"), tflops or row.get("gflops", 0.0) / 1e3
        for name in ("kernel", "layer", "share", "gather_tb_per_s"):
            yield (case, name.replace("_tb_per_s", ", TB/s")), row.get(name, 0.0)
        for peer in row.get("peers", []):
            yield (case, f"over {peer['name']}"), peer["times_faster"]
