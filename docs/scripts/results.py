"""Result files of benchmarks/results, and the rows that the pages show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks/results"


class Found(NamedTuple):
    """One section of one file."""

    file: str
    record: dict[str, Any]
    section: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What was measured; of a device script, what its processes printed."""
        return _rows(self.record[self.section])

    @property
    def source(self) -> str:
        """Where the figures come from, as a line under a table."""
        given = provenance(self.record)
        return (
            f"{given['date'][:10]}, {given.get('gpu', given.get('processor'))}, torch "
            f"{given['torch']}: [`{self.file}`](../benchmarks/results/{self.file})"
        )


def provenance(record: dict[str, Any]) -> dict[str, Any]:
    """Date, versions and machine of a record."""
    return record.get("provenance", record)


def newest(prefix: str, *sections: str) -> Found:
    """The latest file of a benchmark that has one of the sections, which changed their names."""
    for path in sorted(FOLDER.glob(f"{prefix}-20*.json"), reverse=True):
        record = json.loads(path.read_text())
        for section in sections:
            if record.get(section):
                return Found(path.name, record, section)
    raise FileNotFoundError(f"no {prefix} with a section {' or '.join(sections)} in {FOLDER}")


def again(found: Found) -> list[dict[str, Any]]:
    """Rows of a second run that the file keeps, if it does."""
    return _rows(found.record["again"][found.section]) if "again" in found.record else []


def _rows(section: Any) -> list[dict[str, Any]]:
    if isinstance(section, list):
        return section
    groups = (g if isinstance(g, list) else g["results"] for g in section.values())
    return [row for group in groups for row in group]
