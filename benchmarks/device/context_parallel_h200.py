"""Time one rank's share of a context-parallel prefill on one H200, against an eighth of the whole.

    PYTHONPATH=src python benchmarks/device/context_parallel_h200.py --out DIR

131072 tokens over 8 ranks, dense, bf16, DeepSeek-V3 dims. A rank's share is simulated: its queries,
and the keys that `openmla.distributed.prefill` would have expanded, which its parts share in one
call (k_start); beside it, a call per wave, as where kernels do not take shared keys. What several
GPUs would add, gathering rows and hiding that behind attention, one cannot show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from sections import Section, run
from torch import Tensor

import openmla
from openmla.distributed import ContextShard, split
from openmla.distributed.indexes import ragged
from openmla.lab.bench.gpu_timing import race

TOKENS, WORLD = 131072, 8
NOPE, ROPE, V = 128, 64, 128
# The rank with the first and the last keys, one in between, and the one whose parts are neighbors.
RANKS = (0, 3, 7)
BY_WAVE = ", by wave"
BAR = 1.08
"""A share may take this much of an eighth of the whole."""
MOST_ROUNDS = 5  # the whole takes a second
ROOM = 64 * 2**30  # bytes that 128 heads need, with results and the buffer that empties the cache


@dataclass(frozen=True, eq=False)
class Inputs:
    """One sequence: all queries and all keys. `heads` 128 where they fit."""

    q: Tensor
    k_nope: Tensor
    k_rope: Tensor
    v: Tensor

    @staticmethod
    def random(tokens: int, heads: int, device: str) -> Inputs:
        def make(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16, device=device)

        kv = make(tokens, heads, NOPE + V)
        q, rope = make(tokens, heads, NOPE + ROPE), make(tokens, ROPE)
        return Inputs(q, kv[..., :NOPE], rope, kv[..., NOPE:])

    def of(self, shard: ContextShard, at_once: bool = True) -> Callable[[], list[Tensor]]:
        """The attention of one rank, on its own queries: in one call, or in one per wave."""
        device, calls = self.q.device, []
        for parts in (shard.parts,) if at_once else filter(None, shard.waves):
            where, keys = ragged(parts, device), slice(0, max(part.keys for part in parts))
            q = torch.cat([self.q[part.start : part.end] for part in parts])
            rest = self.k_nope[keys], self.k_rope[keys], self.v[keys]
            starts = torch.zeros(len(parts), dtype=torch.int32, device=device)
            offsets = {"cu_seqlens_q": where.cu_seqlens_q, "cu_seqlens_k": where.cu_seqlens_k}
            calls.append((q, rest, offsets | ({"k_start": starts} if len(parts) > 1 else {})))

        def attend() -> list[Tensor]:
            return [openmla.mla_prefill(q, *rest, **offsets) for q, rest, offsets in calls]

        return attend


def shares(_: str, rounds: int) -> Iterator[dict[str, Any]]:
    """The whole, zigzag shares, and the last contiguous one, in turns."""
    memory = torch.cuda.get_device_properties(0).total_memory
    heads = 128 if memory > ROOM else 16
    inputs = Inputs.random(TOKENS, heads, "cuda")
    whole = split([TOKENS], 1, 0)
    timed = {"whole": whole}
    timed |= {f"zigzag, rank {rank}": split([TOKENS], WORLD, rank) for rank in RANKS}
    timed["contiguous, rank 7"] = split([TOKENS], WORLD, WORLD - 1, "contiguous")
    timed[f"zigzag, rank 3{BY_WAVE}"] = timed["zigzag, rank 3"]
    calls = {name: inputs.of(shard, not name.endswith(BY_WAVE)) for name, shard in timed.items()}
    found = race(calls, min(rounds, MOST_ROUNDS))
    eighth = {key: ms / WORLD for key, ms in asdict(found["whole"]).items()}
    for name, shard in timed.items():
        ratios = {key: ms / eighth[key] for key, ms in asdict(found[name]).items()}
        tflops = 2 * heads * (NOPE + ROPE + V) * shard.pairs() / found[name].median / 1e9
        yield {
            "share": name,
            "heads": heads,
            "tokens": shard.tokens,
            "pairs": shard.pairs(),
            "of_an_eighth": ratios,
            "ms": asdict(found[name]),
            "tflops": tflops,
            "bar": BAR if name.startswith("zigzag") else None,
        }


def line(r: dict[str, Any]) -> str:
    ratio, row, bar = *(r["of_an_eighth"][key] for key in ("median", "back_to_back")), r["bar"]
    judged = "" if bar is None else f"  bar {bar}: {'met' if ratio <= bar else 'MISSED'}"
    return (
        f"  {r['share']:23s} {r['heads']} heads {r['ms']['median']:9.2f} ms "
        f"{r['tflops']:5.0f} TFLOP/s {ratio:6.3f} of an eighth (in a row {row:.3f}){judged}"
    )


if __name__ == "__main__":
    run(__file__, {"shares": Section(shares, 100)}, line)
