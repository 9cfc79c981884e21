"""Context parallelism in words and in a picture: who has which tokens, and what is moved."""

from __future__ import annotations

from typing import Any

from openmla.distributed.shard import LAYOUTS, ContextShard, Layout, split
from openmla.distributed.volume import MIB, received_bytes
from openmla.explain import svg
from openmla.planning.models import Model

MOST_LISTED = 16
CELL, MARGIN, HEAD = 14, 24, 56
# One hue per rank, as light as text on it needs; they repeat.
COLORS = ("#9ec5f4", "#f6c38b", "#a6d8a8", "#d9b3e6")
STYLE = (
    ".label{font:13px system-ui,sans-serif;fill:#1f2328}"
    ".note{font:12px system-ui,sans-serif;fill:#57606a}"
    ".inside{font:10px system-ui,sans-serif;fill:#1f2328}"
    "@media (prefers-color-scheme: dark){.label{fill:#e6edf3}.note{fill:#9ea7b3}}"
    + "".join(f".rank-{i}{{fill:{color}}}" for i, color in enumerate(COLORS))
)


def share_report(shard: ContextShard, model: Model, tp: int = 1) -> dict[str, Any]:
    """Shares, balance and bytes of every rank, as plain values."""
    ranks = [shard.at(rank) for rank in range(shard.world)]
    return {
        "world": shard.world,
        "layout": shard.layout,
        "tokens": list(shard.counts),
        "pairs": [one.pairs() for one in ranks],
        "balance": shard.balance(),
        "received_bytes": received_bytes(shard, model, tp),
    }


def share_lines(shard: ContextShard, model: Model, tp: int = 1) -> list[str]:
    """The same as text."""
    report = share_report(shard, model, tp)
    mean = max(shard.total_pairs() / shard.world, 1)
    lines = [
        f"context parallel: {sum(shard.lengths)} tokens on {shard.world} ranks, {shard.layout}",
        f"  {'rank':>4} {'tokens':>8} {'causal pairs':>16} {'of the mean':>12}  parts",
    ]
    for rank in range(min(shard.world, MOST_LISTED)):
        pairs = report["pairs"][rank]
        parts = ", ".join(f"{part.start} to {part.end - 1}" for part in shard.at(rank).parts)
        lines.append(f"  {rank:4} {shard.counts[rank]:8} {pairs:16} {pairs / mean:12.3f}  {parts}")
    if shard.world > MOST_LISTED:
        lines.append(f"  … and {shard.world - MOST_LISTED} more ranks")
    lines += [f"  the busiest rank has {report['balance']:.3f} of the mean's work", ""]
    lines.append("received per layer and rank (openmla.distributed moves latent rows)")
    received = report["received_bytes"].items()
    return [*lines, *(f"  {way:24} {amount / MIB:10.1f} MiB" for way, amount in received)]


def split_picture(length: int = 16, world: int = 4) -> str:
    """The causal triangle of one sequence, every query in the color of its rank, both ways."""
    panel = length * CELL
    parts: list[str] = [f"<style>{STYLE}</style>"]
    for number, layout in enumerate(reversed(LAYOUTS)):
        parts += _panel(MARGIN + number * (panel + 3 * MARGIN), split([length], world, 0, layout))
    size = (2 * panel + 5 * MARGIN, HEAD + panel + 2 * MARGIN)
    words = "Rows are queries, columns the keys they see; the color is the rank that has the query."
    return svg.picture(size, f"{length} tokens on {world} ranks", words, parts) + "\n"


def _panel(left: float, shard: ContextShard) -> list[str]:
    layout: Layout = shard.layout
    owner = {
        token: rank
        for rank in range(shard.world)
        for part in shard.at(rank).parts
        for token in range(part.start, part.end)
    }
    found = [
        svg.text(left, 20, layout),
        svg.text(left, 40, "row: a query, as long as the keys it sees", css="note"),
    ]
    for token, rank in owner.items():
        top = HEAD + token * CELL
        box = (left, top, (token + 1) * CELL, CELL - 1)
        found.append(
            svg.rect(box, f"rank-{rank % len(COLORS)}", hint=f"query {token}, rank {rank}")
        )
        found.append(svg.text(left + 4, top + CELL - 4, str(rank), css="inside"))
    pairs = ", ".join(str(shard.at(rank).pairs()) for rank in range(shard.world))
    foot = HEAD + sum(shard.lengths) * CELL + 18
    return [*found, svg.text(left, foot, f"pairs of ranks 0 to {shard.world - 1}: {pairs}")]
