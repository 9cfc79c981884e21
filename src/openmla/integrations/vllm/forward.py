"""What the backends compute, in openmla's terms; nothing here needs vLLM.

A prefill has new tokens, whose keys and values are at hand, and a context, whose latent rows lie in
the paged cache. Per head, with C rows of context, T new tokens per request, DeepSeek-V3's widths:

    expanded   2 C T (192 + 128) + 2 C 512 (128 + 128)     gather the rows, project, then attend
    latent     2 C T (576 + 512)                           attend to the rows where they lie

so the latent form needs less arithmetic up to T = 512 * 256 / (1088 - 320) = 170 tokens, and no
memory for gathered rows, keys and values at any T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openmla import LatentCache, mla_prefill_latent
from openmla.formats import V32
from openmla.planning.form import LayerDims, most_latent_tokens

TENSOR_SCALED = ("fp8", "fp8_e4m3")
"""vLLM's names for pages of e4m3 with one scale for all of a layer's rows."""
E4M3_MAX = 448.0


def pages_as_cache(
    pages: Tensor, name: str, latent: int, rope: int, k_scale: Tensor | None
) -> LatentCache:
    """vLLM's pages of one layer, as openmla reads them; `name` is --kv-cache-dtype.

    One scale for all rows is a scale for each row that lies at the same address.

    >>> pages = torch.zeros(4, 16, 576).to(torch.float8_e4m3fn)
    >>> cache = pages_as_cache(pages, "fp8", 512, 64, torch.tensor(0.25))
    >>> cache.format, tuple(cache.scales.shape), cache.scales.stride()
    ('fp8_token', (4, 16, 1), (0, 0, 1))
    """
    if name in TENSOR_SCALED:
        assert k_scale is not None
        scales = k_scale.float().reshape(1, 1, 1).expand(*pages.shape[:2], 1)
        return LatentCache(pages.view(torch.float8_e4m3fn), scales, latent, rope, "fp8_token")
    return LatentCache(pages, None, latent, rope, V32.name if name == "fp8_ds_mla" else "bf16")


def write_scaled(
    pages: Tensor, latent: Tensor, rope: Tensor, slots: Tensor, k_scale: Tensor
) -> None:
    """Rows as e4m3 of their quotients by `k_scale`, saturated, as vLLM writes them on a GPU."""
    quotients = torch.cat([latent, rope], dim=-1).float() / k_scale.float()
    rows = quotients.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    page, place = slots // pages.shape[1], slots % pages.shape[1]
    pages.view(torch.uint8)[page, place] = rows.view(torch.uint8)


@dataclass(frozen=True, eq=False)
class UpProjection:
    """The two halves of kv_b_proj's weight: from a latent row to each head's key and value."""

    keys: Tensor
    """[heads, d_nope, latent]"""
    values: Tensor
    """[heads, latent, d_v]"""

    def absorb(self, q: Tensor) -> Tensor:
        """Queries for latent rows: [tokens, heads, d_nope + d_rope] -> [.., latent + d_rope]."""
        heads, d_nope, latent = self.keys.shape
        absorbed = q.new_empty(q.shape[0], heads, latent + q.shape[2] - d_nope)
        by_head = absorbed[..., :latent].transpose(0, 1)
        torch.bmm(q[..., :d_nope].transpose(0, 1), self.keys, out=by_head)
        absorbed[..., latent:] = q[..., d_nope:]
        return absorbed

    def release(self, latent: Tensor) -> Tensor:
        """What was attended to in latent rows as values: [tokens, heads, latent] -> [.., d_v]."""
        return torch.bmm(latent.transpose(0, 1), self.values).transpose(0, 1)

    def most_latent_tokens(self, d_rope: int) -> int:
        """New tokens of a request up to which the latent form needs less arithmetic."""
        _, d_nope, latent = self.keys.shape
        return most_latent_tokens(LayerDims(latent, d_nope, d_rope, self.values.shape[2]))


@dataclass(frozen=True, eq=False)
class Context:
    """The part of each request that is in the cache already."""

    cache: LatentCache
    block_table: Tensor
    lengths: Tensor
    """int32 [requests], 0 where there is no context."""


def attend_context(
    q: Tensor, context: Context, projection: UpProjection, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Every new token to its request's whole context, in latent form: out, and lse [tokens, heads].

    Tokens of a request without context get zeros, and -inf in lse: merging ignores them.
    """
    latent, lse = mla_prefill_latent(
        projection.absorb(q),
        context.cache,
        context.block_table,
        context.lengths,
        cu_seqlens_q=cu_seqlens,
        scale=scale,
        causal=False,
        return_lse=True,
    )
    return projection.release(latent), lse


def attend_rows(
    q: Tensor,
    rows: Context,
    cu_seqlens: Tensor,
    scale: float,
    q_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Absorbed queries, causal, over all rows of their requests: out [.., latent] and lse.

    `rows.lengths` counts new tokens, whose rows are in the pages already. A query's bits depend on
    itself and on the rows that it sees: not on its neighbors, nor on how its request was cut into
    chunks, cached prefixes and decoded tokens.
    """
    return mla_prefill_latent(
        q,
        rows.cache,
        rows.block_table,
        rows.lengths,
        cu_seqlens_q=cu_seqlens,
        scale=scale,
        q_scale=q_scale,
        invariant=True,
        return_lse=True,
    )


def query_scale(q: Tensor, layer: Any) -> Tensor | None:
    """float32 [tokens] of FP8 queries, which vLLM has divided by one scale; None for others."""
    if q.dtype != torch.float8_e4m3fn:
        return None
    scale: Tensor = layer._q_scale
    return scale.float().reshape(1).expand(len(q))


def requests_of_tokens(starts: Tensor) -> Tensor:
    """int32 [tokens]: the request of each token, from the requests' offsets [requests + 1].

    >>> requests_of_tokens(torch.tensor([0, 2, 2, 3])).tolist()
    [0, 0, 2]
    """
    lengths = (starts[1:] - starts[:-1]).long()
    requests = torch.arange(len(lengths), dtype=torch.int32, device=starts.device)
    return requests.repeat_interleave(lengths)


def refresh_requests(requests: Tensor, starts: Tensor) -> None:
    """Write the request of each token into `requests` [tokens]; nothing waits for the GPU.

    Tokens after the last request's, which fill up a batch, get the last one.

    >>> requests = torch.full((5,), -1, dtype=torch.int32)
    >>> refresh_requests(requests, torch.tensor([0, 2, 2, 3]))
    >>> requests.tolist()
    [0, 0, 2, 2, 2]
    """
    tokens = torch.arange(len(requests), dtype=starts.dtype, device=starts.device)
    found = torch.searchsorted(starts[1:].contiguous(), tokens, right=True)
    requests.copy_(found.clamp_max(len(starts) - 2))


@dataclass(frozen=True)
class Shard:
    """Decode context parallelism: runs of `interleave` tokens go to the ranks in turn."""

    ranks: int = 1
    rank: int = 0
    interleave: int = 1


WHOLE = Shard()


def physical_rows(
    tokens: Tensor,
    requests: Tensor,
    block_table: Tensor,
    block_size: int,
    block_stride: int,
    shard: Shard = WHOLE,
) -> Tensor:
    """The cache rows of each query's selected tokens; -1 for no token and for another rank's.

    tokens int32 [queries, topk] count from the start of the query's request; requests [queries]
    are rows of block_table. Blocks lie block_stride rows apart.

    >>> table = torch.tensor([[7, 3]], dtype=torch.int32)
    >>> tokens = torch.tensor([[0, 17, -1]], dtype=torch.int32)
    >>> physical_rows(tokens, torch.tensor([0]), table, block_size=16, block_stride=20).tolist()
    [[140, 61, -1]]
    >>> two = Shard(ranks=2, rank=1, interleave=4)
    >>> tokens = torch.tensor([[3, 4, 12]], dtype=torch.int32)     # rank 1 has 4..7, 12..15, ..
    >>> physical_rows(tokens, torch.tensor([0]), table, 16, 16, two).tolist()
    [[-1, 112, 116]]
    """
    known = tokens >= 0
    if shard.ranks > 1:
        run = tokens // shard.interleave
        known = known & (run % shard.ranks == shard.rank)
        tokens = run // shard.ranks * shard.interleave + tokens % shard.interleave
    page = tokens // block_size
    known = known & (page < block_table.shape[1])
    page = page.clamp(0, block_table.shape[1] - 1)
    block = block_table[requests.long().unsqueeze(1), page.long()]
    return torch.where(known, block * block_stride + tokens % block_size, -1)
