"""openmla beside its peers: tables of docs/peers.md and README.md, from result files."""

from __future__ import annotations

import re
import statistics
from typing import Any, NamedTuple

from results import Found, newest

Row = dict[str, Any]


class Race(NamedTuple):
    """A section of a result file: what was raced, and against whom."""

    title: str
    section: str
    peers: tuple[str, ...]


PREFILL = (
    Race("Dense prefill, bf16", "prefill", ("FA3", "FA3 varlen", "FA3 + concat", "cuDNN")),
    Race("Dense prefill, e4m3", "prefill_fp8", ("FA3 fp8",)),
    Race("Sparse prefill, bf16 rows", "sparse", ("FlashMLA",)),
    Race("Sparse prefill, 656-byte FP8 rows", "sparse_fp8", ("FlashMLA",)),
    Race(
        "Index scores and selection", "index", ("DeepGEMM", "torch.topk", "DeepGEMM + torch.topk")
    ),
)
"""Sections of `peers-prefill-h200`; those that no file has are left out."""

NO_RACE = (
    "cuDNN is in the table above, and [every shape](performance.md#dense-prefill-h200) on a page of"
    " its own.\nThere is no result file of a race against FA3 or FlashMLA's sparse prefill yet."
)


def race_table(rows: list[Row], peers: tuple[str, ...]) -> str:
    """One line per shape: our time, and our speed over each peer that ran it."""
    ran = [peer for peer in peers if any(peer in row["us"] for row in rows)]
    lines = ["| shape | openmla, us | " + " | ".join(f"over {peer}" for peer in ran) + " |"]
    lines.append("|---" * (len(ran) + 2) + "|")
    for row in rows:
        ours = _ours(row["us"])
        over = (f"{row['us'][peer] / ours:.2f}" if peer in row["us"] else "–" for peer in ran)
        lines.append(f"| {row['row']} | {ours:.0f} | " + " | ".join(over) + " |")
    return "\n".join(lines)


def prefill() -> str:
    """Every prefill race that there is a file of."""
    parts = []
    for race in PREFILL:
        found = _found("peers-prefill-h200", race.section)
        if found is not None:
            rows = [row for row in found.rows if any(peer in row["us"] for peer in race.peers)]
            parts += [f"### {race.title}", race_table(rows, race.peers), found.source]
    return "\n\n".join(parts) or NO_RACE


def summary() -> str:
    """A line per kind of work: the range of speeds over the peer, and their median."""
    lines = [
        "| on one H200, bf16 | peer | speed of openmla over the peer | shapes |",
        "|---|---|---|---|",
    ]
    dense = [row for row in _dense() if row.get("kernel")]
    lines.append(_line("dense prefill, kernel", "cuDNN", [row["kernel"] for row in dense]))
    lines.append(
        _line("dense prefill, layer (K put together)", "cuDNN", [row["layer"] for row in dense])
    )
    for race in PREFILL:
        found = _found("peers-prefill-h200", race.section)
        if found is None:
            continue
        for peer in race.peers:
            over = [row["us"][peer] / _ours(row["us"]) for row in found.rows if peer in row["us"]]
            if over:
                lines.append(_line(race.title.lower(), peer, over))
    decode = newest("peers-h200", "decode").rows
    over = [row["us"]["FlashMLA"] / row["us"]["openmla"] for row in decode]
    lines.append(_line("decode over bf16 pages", "FlashMLA", over))
    scores = [r for r in newest("peers-h200", "index").rows if r["call"] == "indexer_scores"]
    over = [row["us"]["DeepGEMM"] / row["us"]["openmla"] for row in scores]
    lines.append(_line("index scores over pages, decode", "DeepGEMM", over))
    return "\n".join(lines)


def regions() -> dict[tuple[str, str], str]:
    """What stands in the pages."""
    page = "docs/peers.md"
    text = summary()
    return {(page, "summary"): text, (page, "prefill"): prefill(), ("README.md", "peers"): text}


def pictures() -> dict[str, str]:
    """None."""
    return {}


def _line(what: str, peer: str, over: list[float]) -> str:
    span = f"{min(over):.2f} to {max(over):.2f} times, median {statistics.median(over):.2f}"
    return f"| {what} | {peer} | {span} | {len(over)} |"


def _dense() -> list[Row]:
    files = (newest(name, "speed") for name in ("hopper-dense-h200", "hopper-dense-short-h200"))
    found = {row["shape"]: row for file in files for row in file.rows if "shape" in row}
    return list(found.values())


def _found(prefix: str, section: str) -> Found | None:
    try:
        return newest(prefix, section)
    except FileNotFoundError:
        return None


def _ours(times: dict[str, float]) -> float:
    """Our time; with several ways of ours, the one whose values are bf16 comes first."""
    return next(us for name, us in times.items() if re.match(r"openmla( fp8)?\b(?! bf16)", name))
