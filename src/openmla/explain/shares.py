"""Context parallelism in words: who has which tokens, and what is moved."""

from typing import Any

from openmla.distributed.shard import ContextShard
from openmla.distributed.volume import MIB, received_bytes
from openmla.planning.models import Model

MOST_LISTED = 16


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
    """The shares as text."""
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
