"""A batch for the sparse backend: requests in pages, tokens selected for every query."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import formula
from integrations.vllm import fake_vllm
from openmla import LatentCache
from openmla.integrations.vllm.forward import WHOLE, Shard, write_scaled

PAGE, PAGES, TOPK, SCALE = 64, 12, 48, 192**-0.5
LENGTHS, QUERIES = (200, 90), (25, 15)
FORMATS = ("bf16", "bf16 between other layers", "fp8_ds_mla", "fp8", "fp8 between other layers")
K_SCALE, Q_SCALE = 0.0173, 0.0131


@dataclass(frozen=True, eq=False)
class Batch:
    """What vLLM hands to forward_mqa, and the bf16 values of the rows."""

    q: tuple[Tensor, Tensor] | Tensor
    pages: Tensor
    values: Tensor
    tokens: Tensor
    requests: Tensor
    table: Tensor
    kv_cache_dtype: str
    scales: Any = None
    """What forward_mqa reads of vLLM's layer."""

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
        return layer.forward_mqa(self.q, self.pages, metadata, self.scales)

    def fp8_queries(self) -> Batch:
        """The same queries as vLLM quantizes them: in one piece, one scale for all."""
        q = torch.cat(self.q, dim=-1).float() / Q_SCALE
        return replace(self, q=q.clamp(-448, 448).to(torch.float8_e4m3fn))

    def exact(self) -> formula.Expected:
        """In float64, on the CPU."""
        lists = []
        for tokens, request in zip(self.tokens.tolist(), self.requests.tolist(), strict=True):
            table = self.table[request].tolist()
            lists.append([table[t // PAGE] * PAGE + t % PAGE for t in tokens if t >= 0])
        q = torch.cat(self.q, dim=-1) if isinstance(self.q, tuple) else self.q.double() * Q_SCALE
        q = q.cpu()
        return formula.listed(q, self.values.cpu(), lists, 512, SCALE)


def batch(kind: str, heads: int = 12, device: str = "cpu") -> Batch:
    """Two requests; one query selects few tokens, one none; unused memory holds NaN."""
    name = kind.partition(" ")[0]
    cache = LatentCache.allocate(
        num_pages=PAGES,
        page_size=PAGE,
        format="fp8_656" if name == "fp8_ds_mla" else "bf16",
        device=device,
    )
    slots = torch.arange(cache.rows, device=device)
    rows = [torch.randn(cache.rows, n).to(device) for n in (512, 64)]
    cache.append(*rows, slots)
    pages, values = cache.data, cache.gather(slots)
    if name == "fp8":
        pages = torch.zeros(PAGES, PAGE, 576, dtype=torch.uint8, device=device)
        write_scaled(pages, *rows, slots, torch.tensor(K_SCALE, device=device))
        pages = pages.view(torch.float8_e4m3fn)
        values = (pages.flatten(0, 1).float() * K_SCALE).bfloat16()
    if kind.endswith("between other layers"):
        both = torch.full((PAGES, 2, PAGE, 576), torch.nan, device=device).to(pages.dtype)
        both.view(torch.uint8)[:, 0] = pages.view(torch.uint8)
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
        values,
        tokens.to(device),
        requests.to(device),
        table.to(device),
        "auto" if name == "bf16" else name,
        SimpleNamespace(
            _k_scale=torch.tensor(K_SCALE, device=device),
            _q_scale=torch.tensor([Q_SCALE], device=device),
        ),
    )
