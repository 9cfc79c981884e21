"""A benchmark's result: a table for people, a JSON record with provenance, a picture."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from openmla.explain.bars_picture import bars_picture


@dataclass(frozen=True)
class Report:
    """What a run found, in words and as data."""

    title: str
    columns: tuple[str, ...]
    """The first is text, the others are figures."""
    lines: list[tuple[str, ...]]
    record: dict[str, Any]
    """For the JSON file, beside the provenance of the run."""
    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    """TFLOP/s by shape and contestant, for the picture."""

    def table(self) -> Table:
        """One line per case and contestant."""
        result = Table(title=self.title, title_justify="left")
        for number, column in enumerate(self.columns):
            result.add_column(column, justify="right" if number else "left")
        for line in self.lines:
            result.add_row(*line)
        return result

    def write_json(self, path: Path, provenance: dict[str, Any]) -> None:
        """One file per run, in a folder that may have to be made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**provenance, **self.record}, indent=1) + "\n")

    def write_picture(self, path: Path) -> None:
        """Bars of TFLOP/s, as SVG."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(bars_picture(self.title, self.rates, "TFLOP/s"), encoding="utf-8")


def duration(seconds: float) -> str:
    """Microseconds below one millisecond, then milliseconds, then seconds.

    >>> duration(25e-6), duration(0.0123), duration(2.5)
    ('25.0 us', '12.3 ms', '2.50 s')
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
