"""One small valid set of arguments per public call, built afresh each time.

dense(q_lens=[2, 3])        keyword arguments for openmla.mla_prefill
latent(...), sparse(...)    likewise; merge(), merge_many(), flash_mla() and flash_attn() too
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from formula import cu_seqlens
from openmla import LatentCache
from openmla.formats import FORMATS

HEADS, D_NOPE, D_ROPE, D_V = 2, 8, 4, 6
LATENT, ROPE = 8, 4


def widths_of(format: str) -> tuple[int, int]:
    """(latent, rope) to try a cache format with: some rope, if it exists so."""
    return (FORMATS[format].widths or ((512, 64),))[-1]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers that depend on the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dense(
    q_lens: list[int] | None = None,
    k_lens: list[int] | None = None,
    heads: int = HEADS,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, Any]:
    """mla_prefill: rope shared by all heads."""
    q_lens = [2, 3] if q_lens is None else q_lens
    k_lens = q_lens if k_lens is None else k_lens
    queries, keys = sum(q_lens), sum(k_lens)
    return {
        "q": numbers(queries, heads, D_NOPE + D_ROPE, seed=seed, dtype=dtype),
        "k_nope": numbers(keys, heads, D_NOPE, seed=seed + 1, dtype=dtype),
        "k_rope": numbers(keys, D_ROPE, seed=seed + 2, dtype=dtype),
        "v": numbers(keys, heads, D_V, seed=seed + 3, dtype=dtype),
        "cu_seqlens_q": cu_seqlens(q_lens),
        "cu_seqlens_k": cu_seqlens(k_lens),
    }


def latent(
    q_lens: list[int] | None = None,
    k_lens: list[int] | None = None,
    heads: int = HEADS,
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, Any]:
    """mla_prefill_latent: pages handed out from the last one down, spare ones left zero."""
    q_lens = [2, 3] if q_lens is None else q_lens
    k_lens = [3, 6] if k_lens is None else k_lens
    keys = numbers(sum(k_lens), LATENT + ROPE, seed=seed + 1)
    cache, table = paged(keys, k_lens, page_size)
    return {
        "q": numbers(sum(q_lens), heads, LATENT + ROPE, seed=seed, dtype=dtype),
        "cache": cache,
        "block_table": table,
        "cache_lengths": torch.tensor(k_lens, dtype=torch.int32),
        "cu_seqlens_q": cu_seqlens(q_lens),
        "scale": 0.3,
    }


def paged(
    keys: Tensor, k_lens: list[int], page_size: int, order: list[int] | None = None
) -> tuple[LatentCache, Tensor]:
    """Rows of sequences laid end to end, put into the pages of a bf16 cache."""
    per_sequence = [-(-n // page_size) for n in k_lens]
    used = sum(per_sequence)
    order = list(reversed(range(used + 1))) if order is None else order
    cache = LatentCache.allocate(
        num_pages=used + 1, page_size=page_size, latent=LATENT, rope=keys.shape[1] - LATENT
    )
    table = torch.full((len(k_lens), max([*per_sequence, 1])), 10**6, dtype=torch.int32)
    pages, at = iter(order), 0
    for b, length in enumerate(k_lens):
        for p in range(per_sequence[b]):
            table[b, p] = next(pages)
        position = torch.arange(length)
        slots = table[b].long()[position // page_size] * page_size + position % page_size
        rows = keys[at : at + length]
        cache.append(rows[:, :LATENT], rows[:, LATENT:], slots)
        at += length
    return cache, table


def sparse(
    queries: int = 5, rows: int = 7, topk: int = 3, heads: int = HEADS, seed: int = 0
) -> dict[str, Any]:
    """mla_prefill_sparse over a plain tensor."""
    generator = torch.Generator().manual_seed(seed + 2)
    return {
        "q": numbers(queries, heads, LATENT + ROPE, seed=seed),
        "kv": numbers(rows, LATENT + ROPE, seed=seed + 1),
        "indices": torch.randint(
            0, max(rows, 1), (queries, topk), generator=generator, dtype=torch.int32
        ),
        "scale": 0.3,
        "d_v": LATENT,
    }


def merge(queries: int = 5, heads: int = HEADS, seed: int = 0) -> dict[str, Any]:
    """merge_states."""
    return {
        "out_a": numbers(queries, heads, D_V, seed=seed),
        "lse_a": numbers(queries, heads, seed=seed + 1),
        "out_b": numbers(queries, heads, D_V, seed=seed + 2),
        "lse_b": numbers(queries, heads, seed=seed + 3),
    }


def merge_many(queries: int = 5, heads: int = HEADS, seed: int = 0) -> dict[str, Any]:
    """merge_many of three parts: outs as a list, lses stacked."""
    return {
        "outs": list(numbers(3, queries, heads, D_V, seed=seed)),
        "lses": numbers(3, queries, heads, seed=seed + 1),
    }


def flash_mla(seed: int = 0) -> dict[str, Any]:
    """compat.flash_mla.flash_mla_sparse_fwd."""
    call = sparse(seed=seed)
    return {
        "q": call["q"],
        "kv": call["kv"][:, None],
        "indices": call["indices"][:, None],
        "sm_scale": 0.3,
        "d_v": LATENT,
    }


def flash_attn(
    q_lens: list[int] | None = None,
    k_lens: list[int] | None = None,
    heads: int = 4,
    key_heads: int = 4,
    seed: int = 0,
) -> dict[str, Any]:
    """compat.flash_attn.flash_attn_varlen_func."""
    q_lens = [2, 3] if q_lens is None else q_lens
    k_lens = [4, 3] if k_lens is None else k_lens
    return {
        "q": numbers(sum(q_lens), heads, 12, seed=seed),
        "k": numbers(sum(k_lens), key_heads, 12, seed=seed + 1),
        "v": numbers(sum(k_lens), key_heads, 6, seed=seed + 2),
        "cu_seqlens_q": cu_seqlens(q_lens),
        "cu_seqlens_k": cu_seqlens(k_lens),
        "max_seqlen_q": max([*q_lens, 0]),
        "max_seqlen_k": max([*k_lens, 0]),
    }
