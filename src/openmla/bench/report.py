"""Benchmark results as a table for people and as JSON for the record, with provenance."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from openmla.bench.cpu import Row
from openmla.bench.provenance import cpu_provenance


def write_json(path: Path, rows: list[Row], command: str) -> None:
    """One file per run."""
    record = cpu_provenance(command) | {
        "rows": [asdict(row) | {"mm_share": row.mm_share} for row in rows]
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def table(rows: list[Row]) -> Table:
    """A line per case with our result, then one per peer."""
    result = Table(title="openmla bench cpu", title_justify="left", box=None, pad_edge=False)
    result.add_column("case and contestants")
    for column in ("time", "GFLOP/s", "openmla is"):
        result.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        result.add_row(f"[bold]{row.case}, {row.dtype}[/]{_memory(row)}")
        share = f"{row.mm_share:.2f} of torch.mm"
        result.add_row("  openmla", duration(row.seconds), f"{row.gflops:.1f}", share)
        for peer in row.peers:
            name = f"  {peer.name}" + (f" ({peer.note})" if peer.note else "")
            rate = f"{row.gflops * row.seconds / peer.seconds:.1f}"
            result.add_row(name, duration(peer.seconds), rate, f"{peer.times_faster:.2f}x")
    return result


def duration(seconds: float) -> str:
    """Milliseconds below one second, seconds above.

    >>> duration(0.0123), duration(2.5)
    ('12.3 ms', '2.50 s')
    """
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _memory(row: Row) -> str:
    if row.extra_bytes is None or not row.peer_extra_bytes:
        return ""
    part = row.extra_bytes / row.peer_extra_bytes
    return f"; peak memory +{row.extra_bytes / 2**20:.0f} MiB, {part:.1%} of the first peer's"
