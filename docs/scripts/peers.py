"""openmla beside its peers: tables of docs/peers.md and README.md, from result files."""

from __future__ import annotations

import re
import statistics
from typing import Any, NamedTuple

from results import newest

Row = dict[str, Any]


FILE = "peers-all-h200"


class Race(NamedTuple):
    """A section of the result file: what was raced, and against whom."""

    title: str
    section: str
    peers: tuple[str, ...]


RACES = (
    Race("Dense prefill, bf16", "prefill", ("FA3", "FA3 + concat", "cuDNN")),
    Race("Dense prefill, e4m3", "prefill_fp8", ("FA3 fp8",)),
    Race("Sparse prefill, bf16 rows", "sparse", ("FlashMLA",)),
    Race("Sparse prefill, 656-byte FP8 rows", "sparse_fp8", ("FlashMLA b=n",)),
    Race("DeepSeek-V4, two caches of 584-byte rows", "v4", ("FlashMLA",)),
    Race("Decode over bf16 pages", "decode", ("FlashMLA",)),
    Race(
        "Index scores and selection", "index", ("DeepGEMM", "torch.topk", "DeepGEMM + torch.topk")
    ),
)


def race_table(rows: list[Row], peers: tuple[str, ...]) -> str:
    """One line per shape: our time, and our speed over each peer that ran it, cold and in a row."""
    ran = [peer for peer in peers if any(peer in row["us"] for row in rows)]
    heads = (f"over {peer} | in a row" for peer in ran)
    lines = ["| shape | openmla, us | " + " | ".join(heads) + " |"]
    lines.append("|---" * (2 * len(ran) + 2) + "|")
    for row in rows:
        cells = [row["row"], f"{_ours(row['us']):.1f}"]
        for peer in ran:
            for times in (row["us"], row["in_a_row_us"]):
                cells.append(f"{times[peer] / _ours(times):.2f}" if peer in times else "–")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def races() -> str:
    """Every race, also the shapes where a peer is ahead."""
    parts = []
    for race in RACES:
        found = newest(FILE, race.section)
        parts += [f"### {race.title}", race_table(found.rows, race.peers)]
    return "\n\n".join([*parts, found.source])


def summary() -> str:
    """A line per kind of work and peer: the range of speeds over it, and their median."""
    lines = [
        "| on one H200 | peer | speed of openmla over the peer | shapes |",
        "|---|---|---|---|",
    ]
    for race in RACES:
        # For decode another file has more shapes, the unfavorable ones among them.
        rows = newest("peers-h200" if race.section == "decode" else FILE, race.section).rows
        for peer in race.peers:
            over = [row["us"][peer] / _ours(row["us"]) for row in rows if peer in row["us"]]
            lines.append(_line(race.title, peer.split(" b=")[0], over))
    gradients = newest("backward-h200", "times").rows
    for peer, name in {"cudnn": "cuDNN, not deterministic", "layer": "cuDNN + concat"}.items():
        over = [row["over"][peer] for row in gradients]
        lines.append(_line("Gradients of dense prefill, bf16", name, over))
    return "\n".join(lines)


def regions() -> dict[tuple[str, str], str]:
    """What stands in the pages."""
    page = "docs/peers.md"
    text = summary()
    return {(page, "summary"): text, (page, "races"): races(), ("README.md", "peers"): text}


def pictures() -> dict[str, str]:
    """None."""
    return {}


def _line(what: str, peer: str, over: list[float]) -> str:
    span = f"{min(over):.2f} to {max(over):.2f} times, median {statistics.median(over):.2f}"
    return f"| {what} | {peer} | {span} | {len(over)} |"


def _ours(times: dict[str, float]) -> float:
    """Our time; with several ways of ours, the one whose values are bf16 comes first."""
    return next(us for name, us in times.items() if re.match(r"openmla( fp8)?\b(?! bf16)", name))
