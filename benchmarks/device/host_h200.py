"""Time the host's share of repeated calls on an H200: every form, Hopper's kernels and portable.

    PYTHONPATH=src python benchmarks/device/host_h200.py --out DIR [--section compile|host]

compile fills Triton's cache on disk, all calls side by side; host times them in one process.
`planned` counts launches that went the long way while a repeated call was timed: there are none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from sections import Section, host_microseconds, run

import openmla
from openmla import IndexCache, LatentCache, cached
from openmla.kernels.call import Call

# Microseconds that a repeated call may take, by form.
BARS = {"dense": 30, "sparse": 35, "latent": 40}
BARS |= {"select_topk": 40, "indexer_scores": 50, "index_topk": 80}
PAGE = 64


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(*shape, device="cuda", dtype=dtype)


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def dense(q_len: int, k_len: int, heads: int = 16, **options: Any) -> Callable[[], object]:
    k, v = (zeros(k_len, heads, 128) for _ in range(2))
    return partial(
        openmla.mla_prefill,
        zeros(q_len, heads, 192),
        k,
        zeros(k_len, 64),
        v,
        cu_seqlens_q=offsets(0, q_len),
        cu_seqlens_k=offsets(0, k_len),
        **options,
    )


def pool(form: str, pages: int) -> LatentCache:
    return LatentCache.allocate(num_pages=pages, page_size=PAGE, format=form, device="cuda")


def latent(form: str, backend: str, tokens: int = 64, pages: int = 64) -> Callable[[], object]:
    table = torch.arange(pages, device="cuda", dtype=torch.int32)[None]
    return partial(
        openmla.mla_prefill_latent,
        zeros(tokens, 128, 576),
        pool(form, pages),
        table,
        offsets(pages * PAGE),
        cu_seqlens_q=offsets(0, tokens),
        scale=0.04,
        backend=backend,
    )


def sparse(form: str, tokens: int, topk: int = 128, backend: str = "auto") -> Callable[[], object]:
    rows = pool(form, 64) if form else zeros(64 * PAGE, 576)
    lists = torch.randint(0, 64 * PAGE, (tokens, topk), device="cuda", dtype=torch.int32)
    return partial(
        openmla.mla_prefill_sparse, zeros(tokens, 64, 576), rows, lists, scale=0.04, backend=backend
    )


def index_operands(tokens: int, pages: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Queries, keys and weights of one sequence, and where its keys are."""
    q = zeros(tokens, 64, 128, dtype=torch.float8_e4m3fn)
    keys = IndexCache.allocate(num_pages=pages, page_size=PAGE, device="cuda")
    table = torch.arange(pages, device="cuda", dtype=torch.int32)[None]
    paging = {"block_table": table, "cache_lengths": offsets(pages * PAGE)}
    weights = zeros(tokens, 64, dtype=torch.float32)
    return (q, keys, weights), {"cu_seqlens_q": offsets(0, tokens), **paging}


def indexer_scores(tokens: int = 64, pages: int = 64, **options: Any) -> Callable[[], object]:
    operands, paging = index_operands(tokens, pages)
    return partial(openmla.indexer_scores, *operands, **paging, **options)


def select_topk(rows: int = 64, width: int = 4096, **options: Any) -> Callable[[], object]:
    return partial(openmla.select_topk, zeros(rows, width, dtype=torch.float32), 2048, **options)


def index_topk(tokens: int = 64, pages: int = 64, **options: Any) -> Callable[[], object]:
    operands, paging = index_operands(tokens, pages)
    return partial(openmla.index_topk, *operands, 2048, **paging, **options)


CALLS: dict[str, Callable[[], Callable[[], object]]] = {
    "dense": partial(dense, 256, 256),
    "dense with lse": partial(dense, 256, 256, return_lse=True),
    "dense, split": partial(dense, 64, 16384, 4),
    "dense portable": partial(dense, 256, 256, backend="portable"),
    "sparse bf16 rows": partial(sparse, "", 64),
    "sparse bf16 pages": partial(sparse, "bf16", 64),
    "sparse fp8 in the kernel": partial(sparse, "fp8_656", 64),
    "sparse fp8 in a workspace": partial(sparse, "fp8_656", 1024, 512),
    "sparse fp8 portable": partial(sparse, "fp8_656", 64, backend="portable"),
    "latent bf16": partial(latent, "bf16", "hopper"),
    "latent bf16, split": partial(latent, "bf16", "hopper", 1, 512),
    "latent fp8 in a workspace": partial(latent, "fp8_656", "hopper"),
    "latent fp8 in the kernel": partial(latent, "fp8_656", "hopper", 1, 8),
    "latent bf16 portable": partial(latent, "bf16", "portable", 64, 16),
    "latent bf16 portable, split": partial(latent, "bf16", "portable", 16, 512),
    "latent fp8 portable": partial(latent, "fp8_656", "portable", 64, 16),
    "indexer_scores": indexer_scores,
    "select_topk": select_topk,
    "index_topk": index_topk,
    "index_topk portable": partial(index_topk, backend="portable"),
}


def compile_call(name: str, rounds: int) -> Iterator[dict[str, Any]]:
    CALLS[name]()()
    torch.cuda.synchronize()
    yield {"compiled": name}


def host(_: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Repeated; with token counts never seen before; and planned anew every time."""
    planned: list[Call] = []
    long_way = Call.run
    Call.run = lambda self: planned.append(self) or long_way(self)  # type: ignore[assignment]
    for name, make in CALLS.items():
        call = make()
        call()
        planned.clear()
        microseconds = host_microseconds(lambda _, c=call: c())
        bar = BARS[name.replace(",", "").split()[0]]
        yield {"host": name, "microseconds": microseconds, "bar": bar, "planned": len(planned)}
    for name, forms in {
        "dense, new counts": [dense(n, n) for n in range(128, 428)],
        "sparse, new counts": [sparse("", n) for n in range(64, 364)],
    }.items():
        for n in (0, -1):
            forms[n]()
        planned.clear()
        microseconds = host_microseconds(lambda n, x=forms: x[n % len(x)]())
        yield {"host": name, "microseconds": microseconds, "planned": len(planned)}

    def forgotten(_: int, call: Callable[[], object]) -> None:
        cached.forget()
        call()

    for name in ("dense", "sparse bf16 rows", "latent bf16", "latent bf16 portable", "index_topk"):
        call = partial(forgotten, call=CALLS[name]())
        yield {"host": f"{name}, planned", "microseconds": host_microseconds(call, 50)}


if __name__ == "__main__":
    sections = {
        "compile": Section(compile_call, 90, tuple(CALLS), side_by_side=True),
        "host": Section(host, 60),
    }
    run(__file__, sections, json.dumps)
