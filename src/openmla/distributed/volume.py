"""What one rank receives per layer, in bytes: rows, or what other ways would move.

>>> from openmla.planning.models import model_by_name
>>> shard, v3 = split([131072], world=8, rank=0), model_by_name("deepseek-v3")
>>> [amount >> 20 for amount in received_bytes(shard, v3).values()]   # MiB
[126, 71, 8960, 28784]
"""

from __future__ import annotations

from openmla.distributed.shard import ContextShard, split
from openmla.formats import FORMATS
from openmla.planning.models import Model

ROWS = "latent rows, bf16"
KEYS_AND_VALUES = "K and V of every head"
MIB = 2**20


def received_bytes(shard: ContextShard, model: Model, tp: int = 1) -> dict[str, int]:
    """By way of sharing a batch: what a rank gets from the others in one layer.

    Rows of every rank are padded to the longest share. K and V are those that a ring or a gather
    of bf16 heads moves, 1/tp of the heads on every rank. A sharded pool exchanges partial results
    of all queries in latent form, twice: to be merged, and merged.
    """
    rope = 0 if model.one_row else model.rope
    heads, others = model.heads // tp, shard.world - 1
    most, row = max(shard.counts), 2 * (model.kv_lora + rope)
    found = {ROWS: others * most * row}
    widths = model.kv_lora, rope
    fp8 = next((f for f in FORMATS.values() if widths in f.widths), FORMATS["fp8_block64"])
    found[f"latent rows, {fp8.name}"] = others * most * fp8.layout(*widths).row_bytes
    if not model.one_row:
        each = 2 * heads * (model.nope + model.rope + model.v)
        found[KEYS_AND_VALUES] = others * most * each
    each = heads * (2 * model.kv_lora + 4)
    found["sharded pool, merged"] = 2 * others * -(-sum(shard.lengths) // shard.world) * each
    return found


def volume_table(model: Model, world: int, prompts: tuple[int, ...]) -> str:
    """MiB that a rank receives per layer, by prompt length, as a Markdown table."""
    rows = [received_bytes(split([tokens], world, 0), model) for tokens in prompts]
    lines = ["| tokens | " + " | ".join(rows[0]) + " |", "|---" * (len(rows[0]) + 1) + "|"]
    for tokens, row in zip(prompts, rows, strict=True):
        lines.append(f"| {tokens} | " + " | ".join(f"{n / MIB:.0f}" for n in row.values()) + " |")
    return "\n".join(lines)
