"""Public calls of every form and kernel that is cached, small, each with tensors of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import openmla
from openmla import IndexCache, LatentCache


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dense(
    q_len: int = 100,
    k_len: int = 300,
    batch: int = 1,
    heads: int = 16,
    key_heads: int = 0,
    gap: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    v_dtype: torch.dtype | None = None,
    rope: str = "shared",
    equal: bool = False,
    factors: bool = False,
    shared: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    def rows(count: int, *rest: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(count, *rest[:-1], rest[-1] + gap, dtype=dtype)[..., : rest[-1]]

    total_q, total_k = batch * q_len, batch * k_len
    ropes: dict[str, Any] = {
        "shared": rows(total_k, 64),
        "one head": rows(total_k, 1, 64),
        "per head": rows(total_k, heads, 64),
        "none": None,
    }
    width = 128 if rope == "none" else 192
    if rope == "pages":
        pages = -(-k_len // 64)
        ropes[rope] = LatentCache.allocate(num_pages=batch * pages, page_size=64)
        options["block_table"] = torch.arange(batch * pages, dtype=torch.int32).view(batch, -1)
        options["cache_lengths"] = i32(*[k_len] * batch)
    if factors:
        options |= {"q_scale": torch.ones(total_q), "k_scale": torch.ones(total_k)}
    offsets = i32(*(n * q_len for n in range(batch + 1)))
    if shared:
        options["k_start"] = i32(*[0] * batch)
    if not equal:
        options["cu_seqlens_k"] = i32(*(n * k_len for n in range(batch + 1)))
    return partial(
        openmla.mla_prefill,
        rows(total_q, heads, width),
        rows(total_k, key_heads or heads, 128),
        ropes[rope],
        rows(total_k, key_heads or heads, 128, dtype=v_dtype or dtype),
        cu_seqlens_q=offsets,
        **options,
    )


def pool(form: str, pages: int = 40, dtype: torch.dtype = torch.bfloat16, page: int = 64) -> Any:
    """Rows of a tensor where there is no format."""
    if not form:
        return torch.zeros(pages * page, 576, dtype=dtype)
    return LatentCache.allocate(num_pages=pages, page_size=page, format=form)


def latent(
    form: str = "bf16",
    tokens: int = 70,
    heads: int = 128,
    pages: int = 40,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    plain: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    cache = pool(form, pages)
    table = torch.arange(pages, dtype=torch.int32).view(batch, -1)
    return partial(
        openmla.mla_prefill_latent,
        torch.zeros(batch * tokens, heads, 576, dtype=dtype),
        cache.data if plain else cache,
        table,
        i32(*[pages // batch * 64] * batch),
        cu_seqlens_q=i32(*(n * tokens for n in range(batch + 1))),
        scale=0.1,
        **options,
    )


def sparse(
    form: str = "",
    tokens: int = 9,
    heads: int = 20,
    topk: int = 130,
    pages: int = 40,
    dtype: torch.dtype = torch.bfloat16,
    lengths: bool = False,
    factors: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    if factors:
        options["q_scale"] = torch.ones(tokens)
        options |= {} if form else {"k_scale": torch.ones(64 * pages)}
    if lengths:
        options["topk_lengths"] = torch.zeros(tokens, dtype=torch.int32)
    return partial(
        openmla.mla_prefill_sparse,
        torch.zeros(tokens, heads, 576, dtype=dtype),
        pool(form, pages, dtype),
        torch.zeros(tokens, topk, dtype=torch.int32),
        scale=0.1,
        **options,
    )


def attend(tokens: int = 9, heads: int = 20, lengths: bool = False, **options: Any) -> Any:
    """A span of pages beside a list of a cache of another format."""
    place = [torch.zeros(tokens, dtype=torch.int32) for _ in range(4)]
    table = torch.arange(40, dtype=torch.int32).view(2, 20)
    window = openmla.Span(pool("bf16"), table, *place[:3])
    lists = torch.zeros(tokens, 130, dtype=torch.int32)
    listed = openmla.Listed(pool("fp8_656", page=32), lists, place[3] if lengths else None)
    q = torch.zeros(tokens, heads, 576, dtype=torch.bfloat16)
    return partial(openmla.mla_attend, q, [window, listed], scale=0.1, **options)


def attend_v4(
    tokens: int = 99, kinds: str = "span list", lengths: bool = False, **options: Any
) -> Any:
    """DeepSeek-V4's rows: a window and entries, each a span or a list."""
    sources: list[openmla.Listed | openmla.Span] = []
    for kind, page, count in zip(kinds.split(), (64, 2), (128, 512), strict=False):
        shape = {"num_pages": 1024 // page, "page_size": page}
        cache = LatentCache.allocate(**shape, rope=0, format="fp8_584")
        place = [torch.zeros(tokens, dtype=torch.int32) for _ in range(3)]
        if kind == "list":
            lists = torch.zeros(tokens, count, dtype=torch.int32)
            sources.append(openmla.Listed(cache, lists, place[0] if lengths else None))
        else:
            table = torch.zeros(2, count // page, dtype=torch.int32)
            sources.append(openmla.Span(cache, table, *place))
    q = torch.zeros(tokens, 64, 512, dtype=torch.bfloat16)
    return partial(openmla.mla_attend, q, sources, scale=0.1, **options)


def turned(made: Callable[..., Any], tokens: int = 99, dtype: Any = torch.int64) -> Any:
    """A call whose results are turned back, by a table with gaps."""
    table = torch.zeros(50, 72)[:, :64]
    positions = torch.zeros(tokens, dtype=dtype)
    return partial(made, tokens=tokens, turn_back=openmla.TurnBack(table, positions))


def index_pool(pages: int, page: int = 64) -> IndexCache:
    return IndexCache.allocate(num_pages=pages, page_size=page)


def index_paging(tokens: int, pages: int, batch: int = 2) -> dict[str, Tensor]:
    """Sequences of so many tokens each, with all keys that their pages hold."""
    return {
        "cu_seqlens_q": i32(*(n * tokens for n in range(batch + 1))),
        "block_table": torch.arange(batch * pages, dtype=torch.int32).view(batch, -1),
        "cache_lengths": i32(*[64 * pages] * batch),
    }


def scores(
    tokens: int = 9, heads: int = 64, pages: int = 3, contiguous: int = 0, **options: Any
) -> Callable[..., Any]:
    """Over pages, or over so many contiguous keys."""
    q = torch.zeros(2 * tokens, heads, 128).to(torch.float8_e4m3fn)
    weights = torch.zeros(2 * tokens, heads)
    if contiguous:
        pair = torch.zeros(contiguous, 128).to(torch.float8_e4m3fn), torch.zeros(contiguous)
        return partial(openmla.indexer_scores, q, pair, weights, **options)
    paging = index_paging(tokens, pages)
    return partial(openmla.indexer_scores, q, index_pool(2 * pages), weights, **paging, **options)


def select(
    tokens: int = 9, width: int = 192, topk: int = 64, table: bool = False, **options: Any
) -> Callable[..., Any]:
    if table:
        paging = index_paging(tokens, -(-width // 64))
        options |= {name: paging[name] for name in ("cu_seqlens_q", "block_table")}
        options["page_size"] = 64
    return partial(openmla.select_topk, torch.zeros(2 * tokens, width), topk, **options)


def topk(tokens: int = 9, heads: int = 64, pages: int = 3, **options: Any) -> Callable[..., Any]:
    q = torch.zeros(2 * tokens, heads, 128).to(torch.float8_e4m3fn)
    weights, pool = torch.zeros(2 * tokens, heads), index_pool(2 * pages)
    paging = index_paging(tokens, pages)
    return partial(openmla.index_topk, q, pool, weights, 64, **paging, **options)


HOPPER, PORTABLE = {"backend": "hopper"}, {"backend": "portable"}
LSE = {"return_lse": True}
E4M3 = {"dtype": torch.float8_e4m3fn}
WIDE_V = {**E4M3, "v_dtype": torch.bfloat16}
CALLS: dict[str, tuple[Callable[..., Callable[..., Any]], dict[str, Any], int]] = {
    # name: builder, its arguments, number of kernels
    "dense": (dense, LSE, 1),
    "dense, equal offsets": (dense, {"k_len": 100, "equal": True}, 1),
    "dense, two query tiles": (dense, {"q_len": 2000, "k_len": 2000}, 1),
    "dense, fp16 with gaps": (dense, {"dtype": torch.float16, "gap": 8}, 1),
    "dense, rope of one head": (dense, {"rope": "one head"}, 1),
    "dense, rope per head": (dense, {"rope": "per head", "causal": False}, 1),
    "dense, rope from pages": (dense, {"rope": "pages", "batch": 2}, 1),
    "dense, no rope": (dense, {"rope": "none", "scale": 0.2}, 1),
    "dense, one block": (dense, {"q_len": 70, "k_len": 70}, 1),
    "dense, split": (dense, {"q_len": 64, "k_len": 9000, **LSE}, 2),
    "dense, window": (dense, {"window": 128, **LSE}, 1),
    "dense, window, split": (dense, {"q_len": 64, "k_len": 9000, "window": 8000}, 2),
    "dense, fp8": (dense, {**WIDE_V, **LSE}, 1),
    "dense, fp8, factors": (dense, {**WIDE_V, "factors": True}, 1),
    "dense, fp8, rope from pages": (dense, {**WIDE_V, "rope": "pages", "batch": 2}, 1),
    "dense, fp8, split": (dense, {**WIDE_V, "factors": True, "q_len": 64, "k_len": 9000, **LSE}, 2),
    "dense, fp8 values": (dense, {**E4M3, "gap": 16, **LSE}, 2),
    "dense, fp8 values, factors": (dense, {**E4M3, "factors": True, "shared": True}, 2),
    "dense, fp8 values, one block": (dense, {**E4M3, "q_len": 70, "k_len": 70}, 2),
    "dense, fp8 values, split": (dense, {**E4M3, "q_len": 64, "k_len": 9000, **LSE}, 3),
    "portable dense": (dense, {**PORTABLE, **LSE}, 1),
    "portable dense, split": (dense, {"q_len": 64, "k_len": 4096, **PORTABLE}, 3),
    "portable dense, window": (dense, {"window": 128, **PORTABLE, **LSE}, 1),
    "portable dense, window, split": (
        dense,
        {"q_len": 64, "k_len": 9000, "window": 8000, **PORTABLE},
        3,
    ),
    "portable dense, grouped heads": (dense, {"key_heads": 4, **PORTABLE}, 1),
    "portable dense, factors": (dense, {"factors": True, **PORTABLE}, 1),
    "latent": (latent, {**HOPPER, **LSE}, 1),
    "latent, split": (latent, {"pages": 512, "tokens": 1, "heads": 16, **HOPPER, **LSE}, 2),
    "latent, named ranges": (
        latent,
        {"pages": 512, "tokens": 1, "heads": 16, "range_keys": 512, **HOPPER},
        2,
    ),
    "latent, plain pages": (latent, {**HOPPER, "plain": True}, 1),
    "latent, fp8 in a workspace": (latent, {"form": "fp8_656", "pages": 640, **HOPPER}, 5),
    "latent, fp8 blocks": (latent, {"form": "fp8_block64", "batch": 2, **HOPPER}, 2),
    "latent, fp8 in the kernel": (
        latent,
        {"form": "fp8_656", "tokens": 1, "heads": 8, **HOPPER},
        1,
    ),
    "portable latent": (latent, {"pages": 8, **PORTABLE, **LSE}, 1),
    "portable latent, split": (latent, {"pages": 256, **PORTABLE}, 3),
    "portable latent, window": (latent, {"pages": 256, "window": 500, **PORTABLE, **LSE}, 1),
    "portable latent, fp8": (latent, {"form": "fp8_token", "pages": 8, **PORTABLE}, 2),
    "sparse": (sparse, {**HOPPER, **LSE}, 1),
    "sparse, few": (sparse, {"tokens": 1, "topk": 600, **HOPPER, **LSE}, 3),
    "sparse, few, fp8": (sparse, {"form": "fp8_656", "tokens": 2, "topk": 600, **HOPPER}, 3),
    "sparse, everything": (
        sparse,
        {"form": "bf16", "lengths": True, **LSE, "return_max_logits": True, "heads": 70},
        1,
    ),
    "portable attend": (attend, {**PORTABLE, **LSE}, 1),
    "portable attend, lengths": (attend, {"lengths": True, "heads": 70, **PORTABLE}, 1),
    "attend": (attend_v4, {**HOPPER, **LSE, "sink": torch.zeros(64)}, 1),
    "attend, two lists": (attend_v4, {"kinds": "list list", "lengths": True, **LSE}, 1),
    "attend, two spans": (attend_v4, {"kinds": "span span", **HOPPER}, 1),
    "attend, pools once": (attend_v4, {"tokens": 999, **HOPPER, **LSE}, 3),
    "attend, turned back": (turned(attend_v4), {**HOPPER, **LSE}, 1),
    "attend, one list, turned back": (turned(attend_v4, 7), {"kinds": "list", **HOPPER}, 1),
    "attend, few, turned back": (turned(attend_v4, 2, torch.int32), {**HOPPER, **LSE}, 3),
    "portable attend, turned back": (turned(attend, 9, torch.int32), {**PORTABLE}, 1),
    "attend, few": (attend_v4, {"tokens": 2, **HOPPER, **LSE}, 3),
    "attend, few, two spans": (attend_v4, {"tokens": 2, "kinds": "span span", **HOPPER}, 3),
    "sparse, fp16": (sparse, {"dtype": torch.float16}, 1),
    "sparse, fp8 in the kernel": (sparse, {"form": "fp8_656", "lengths": True, "topk": 100}, 1),
    "sparse, fp8 in a workspace": (sparse, {"form": "fp8_656", "tokens": 1000, "topk": 600}, 2),
    "sparse, fp8 blocks": (sparse, {"form": "fp8_block128", "tokens": 1000, "topk": 600}, 2),
    "sparse, fp8 queries": (sparse, {**E4M3, **LSE}, 1),
    "sparse, fp8 queries, factors": (
        sparse,
        {**E4M3, "factors": True, "lengths": True, "return_max_logits": True},
        1,
    ),
    "sparse, fp8 queries, pages": (
        sparse,
        {**E4M3, "form": "fp8_token", "factors": True, "lengths": True},
        1,
    ),
    "latent, fp8 queries": (latent, {**E4M3, "form": "fp8_token", "batch": 2, **HOPPER}, 1),
    "scores": (scores, {}, 2),
    "scores, one query a request": (scores, {"tokens": 1, **HOPPER}, 1),
    "scores, two queries a request": (scores, {"tokens": 2, **HOPPER}, 1),
    "scores, contiguous keys": (scores, {"contiguous": 300}, 2),
    "scores, rows that are padded": (scores, {"contiguous": 301, "heads": 128}, 2),
    "scores, windows": (
        scores,
        {"contiguous": 300, "starts": i32(*[3] * 18), "ends": i32(*[200] * 18)},
        1,
    ),
    "scores, one bound": (scores, {"contiguous": 300, "starts": i32(*[3] * 18)}, 2),
    "select": (select, {}, 2),
    "select, everything": (
        select,
        {"table": True, "width": 9024, "return_counts": True, "return_mask": True},
        2,
    ),
    "select, windows": (
        select,
        {"starts": i32(*[3] * 18), "ends": i32(*[99] * 18), "add_starts": True},
        1,
    ),
    "index_topk": (topk, {"return_counts": True}, 3),
    "index_topk, relative": (topk, {"rows": "relative", "return_mask": True}, 3),
    "index_topk, one query a request": (topk, {"tokens": 1, "return_counts": True, **HOPPER}, 2),
    "index_topk, kept keys": (topk, {"keep_first": 1, "keep_last": 2}, 3),
    "portable scores": (scores, {**PORTABLE, "heads": 5}, 2),
    "portable scores, contiguous keys": (scores, {**PORTABLE, "contiguous": 300}, 2),
    "portable select": (select, {**PORTABLE, "table": True, "return_mask": True}, 2),
    "portable index_topk": (topk, {**PORTABLE}, 3),
    "portable sparse": (sparse, {**PORTABLE, "return_max_logits": True}, 1),
    "portable sparse, fp8": (sparse, {"form": "fp8_656", **PORTABLE}, 2),
}
