"""A batch for the sparse backend: requests in pages, tokens selected for every query."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import formula
from integrations.vllm import fake_vllm
from openmla import LatentCache
from openmla.integrations.vllm.forward import WHOLE, Shard

PAGE, PAGES, TOPK, SCALE = 64, 12, 48, 192**-0.5
LENGTHS, QUERIES = (200, 90), (25, 15)
FORMATS = ("bf16", "bf16 between other layers", "fp8_ds_mla")


@dataclass(frozen=True, eq=False)
class Batch:
    """What vLLM hands to forward_mqa, and the bf16 values of the rows."""

    q: tuple[Tensor, Tensor]
    pages: Tensor
    values: Tensor
    tokens: Tensor
    requests: Tensor
    table: Tensor
    kv_cache_dtype: str

    def attend(self, shard: Shard = WHOLE) -> tuple[Tensor, Tensor]:
        """By OpenMLASparseImpl."""
        with fake_vllm.installed():
            from openmla.integrations.vllm.sparse import OpenMLASparseImpl

            layer = OpenMLASparseImpl(
                scale=SCALE,
                kv_lora_rank=512,
                qk_rope_head_dim=64,
                dcp_rank=shard.rank,
                dcp_world_size=shard.ranks,
                kv_cache_dtype=self.kv_cache_dtype,
                topk_indices_buffer=self.tokens,
            )
        metadata: Any = SimpleNamespace(
            block_size=PAGE,
            req_id_per_token=self.requests,
            block_table=self.table,
            cp_kv_cache_interleave_size=shard.interleave,
        )
        return layer.forward_mqa(self.q, self.pages, metadata, None)

    def exact(self) -> formula.Expected:
        """In float64, on the CPU."""
        lists = []
        for tokens, request in zip(self.tokens.tolist(), self.requests.tolist(), strict=True):
            table = self.table[request].tolist()
            lists.append([table[t // PAGE] * PAGE + t % PAGE for t in tokens if t >= 0])
        q = torch.cat(self.q, dim=-1).cpu()
        return formula.listed(q, self.values.cpu(), lists, 512, SCALE)


def batch(kind: str, heads: int = 12, device: str = "cpu") -> Batch:
    """Two requests; one query selects few tokens, one none; unused memory holds NaN."""
    fp8 = kind == "fp8_ds_mla"
    cache = LatentCache.allocate(
        num_pages=PAGES, page_size=PAGE, format="fp8_656" if fp8 else "bf16", device=device
    )
    slots = torch.arange(cache.rows, device=device)
    cache.append(*(torch.randn(cache.rows, n).to(device) for n in (512, 64)), slots)
    pages = cache.data
    if kind == "bf16 between other layers":
        both = torch.full((PAGES, 2, PAGE, 576), torch.nan, dtype=torch.bfloat16, device=device)
        both[:, 0] = pages
        pages = both[:, 0]
    requests = torch.tensor([0] * QUERIES[0] + [1] * QUERIES[1], dtype=torch.int32)
    tokens = torch.stack([torch.randperm(LENGTHS[r])[:TOPK] for r in requests.tolist()]).int()
    tokens[3, 10:] = -1
    tokens[7] = -1
    queries = [torch.randn(len(requests), heads, n).bfloat16().to(device) for n in (512, 64)]
    table = torch.randperm(PAGES)[:8].view(2, 4).int()
    return Batch(
        (queries[0], queries[1]),
        pages,
        cache.gather(slots),
        tokens.to(device),
        requests.to(device),
        table.to(device),
        "fp8_ds_mla" if fp8 else "auto",
    )
