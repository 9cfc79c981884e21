"""Several processes prefill one batch: each has some of the tokens, latent rows are gathered.

    torchrun --nproc-per-node 4 examples/context_parallel.py

Runs on CPUs. On GPUs the same code needs "nccl", a device per rank and tensors on it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

import openmla
from openmla.distributed import prefill, send_latent, split

HEADS, NOPE, ROPE, V, LATENT, HIDDEN = 4, 128, 64, 128, 512, 256
LENGTHS = [300, 41, 2]  # three prompts; the last is shorter than the world


class Layer:
    """The projections of one MLA layer, without its normalization and rotation."""

    def __init__(self) -> None:
        self.q = self.weight(HIDDEN, HEADS * (NOPE + ROPE))
        self.kv_a = self.weight(HIDDEN, LATENT + ROPE)
        self.kv_b = self.weight(LATENT, HEADS * (NOPE + V))

    @staticmethod
    def weight(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns) * rows**-0.5).bfloat16()

    def queries(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.q).view(-1, HEADS, NOPE + ROPE)

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """What `prefill` asks for: latent rows -> k_nope and v of every head."""
        kv = (latent @ self.kv_b).view(-1, HEADS, NOPE + V)
        return kv[..., :NOPE], kv[..., NOPE:]


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # every rank makes the same weights and prompts, and keeps its tokens
    layer, hidden = Layer(), torch.randn(sum(LENGTHS), HIDDEN).bfloat16()

    shard = split(LENGTHS, world, rank)
    mine = hidden[shard.rows()]
    rows = mine @ layer.kv_a
    sent = send_latent(rows[:, :LATENT], rows[:, LATENT:], shard)  # under way …
    q = layer.queries(mine)  # … while this is computed
    out = prefill(q, sent, None, layer.expand, shard)

    # All of it in one process, to compare with.
    rows = hidden @ layer.kv_a
    k_nope, v = layer.expand(rows[:, :LATENT])
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    whole = openmla.mla_prefill(layer.queries(hidden), k_nope, rows[:, LATENT:], v, cu_seqlens_q=cu)
    error = (out - whole[shard.rows()]).abs().max().item()
    assert error < 2e-2, error  # bf16: the products of a projection are rounded
    print(f"rank {rank}: {shard.tokens} tokens, {shard.pairs()} pairs, off by {error:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
