"""Time few queries over many keys on an H200: pages, uneven lists, FP8 rows read in two ways.

PYTHONPATH=src python benchmarks/device/few_h200.py --out DIR [--section pages|lists|fp8 ...]

Every call is replayed from a CUDA graph, so host time is not measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from sections import Section, run

import openmla
from openmla.bench.gpu_timing import race
from openmla.cache import LatentCache
from openmla.dispatch import plan_call
from openmla.kernels.hopper.latent.launch import calls
from openmla.operands import Results, SparseOperands, Weights

MATMUL = 8192
SCALE = 576**-0.5


def graph_of(function: Callable[[], object]) -> Callable[[], object]:
    """Replays what a function launches."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def matmul() -> Callable[[], object]:
    a, b = (torch.randn(MATMUL, MATMUL, device="cuda").bfloat16() for _ in range(2))
    return lambda: torch.mm(a, b)


def fill(cache: LatentCache) -> None:
    """With numbers about 1."""
    if cache.format == "bf16":
        cache.data.normal_()
        return
    cache.data.view(torch.uint8).random_(0, 100)
    for name, value in (("scales", 0.01), ("bf16", 1.0)):
        field = cache.field(name)
        assert field is not None
        field.fill_(value)


@dataclass(frozen=True)
class Pages:
    """Requests of `queries` new tokens and `keys` keys each, on pages of 64 rows."""

    requests: int
    queries: int
    keys: int
    heads: int
    causal: bool = True
    cache_format: str = "bf16"
    backend: str = "hopper"

    @property
    def flops(self) -> float:
        hidden = (self.queries - 1) / 2 if self.causal else 0.0
        pairs = self.requests * self.queries * (self.keys - hidden)
        return 2.0 * pairs * self.heads * (576 + 512)

    @property
    def bytes(self) -> float:
        return 1152.0 * self.requests * self.keys

    def call(self) -> Callable[[], object]:
        pages = -(-self.keys // 64)
        cache = LatentCache.allocate(
            num_pages=self.requests * pages, page_size=64, format=self.cache_format, device="cuda"
        )
        fill(cache)
        table = torch.randperm(self.requests * pages, device="cuda").int()
        total = self.requests * self.queries
        arguments: dict[str, Any] = {
            "block_table": table.view(self.requests, pages),
            "cache_lengths": torch.full((self.requests,), self.keys, device="cuda").int(),
            "cu_seqlens_q": torch.arange(self.requests + 1, device="cuda").int() * self.queries,
            "scale": SCALE, "causal": self.causal, "backend": self.backend,
            "out": torch.empty(total, self.heads, 512, device="cuda", dtype=torch.bfloat16),
        }  # fmt: skip
        q = torch.randn(total, self.heads, 576, device="cuda").bfloat16()
        return graph_of(lambda: openmla.mla_prefill_latent(q, cache, **arguments))


PAGES = (
    Pages(128, 1, 4096, 128), Pages(32, 1, 32768, 128), Pages(128, 1, 4096, 16),
    Pages(1, 1, 32768, 16), Pages(1, 1, 32768, 128), Pages(128, 2, 4096, 128),
    Pages(32, 1, 32768, 16), Pages(128, 1, 32768, 16),
    Pages(1, 4096, 8192, 128), Pages(1, 2048, 16384, 16), Pages(4, 512, 8192, 128),
)  # fmt: skip


FP8_PAGES = tuple(
    replace(shape, cache_format="fp8_656", backend=backend)
    for shape in (Pages(32, 1, 32768, 128), Pages(128, 1, 4096, 16), Pages(1, 1, 32768, 16))
    for backend in ("hopper", "portable")
)


def pages(group: str, rounds: int) -> Iterator[dict[str, Any]]:
    for shape in {"bf16": PAGES, "fp8_656": FP8_PAGES}[group]:
        timings = race({"matmul": matmul(), "ours": shape.call()}, rounds)
        t, ceiling = timings["ours"], 2.0 * MATMUL**3 / timings["matmul"].median
        yield {
            "shape": str(shape), "us": 1e3 * t.median, "us_in_a_row": 1e3 * t.back_to_back,
            "share_of_matmul": shape.flops / t.median / ceiling,
            "terabytes_per_second": shape.bytes / t.median * 1e-9,
        }  # fmt: skip
        torch.cuda.empty_cache()


def sparse(queries: int, rows: int, heads: int = 128, topk: int = 2048) -> SparseOperands:
    """Lists of distinct rows, bf16."""
    chance = torch.rand(queries, rows, device="cuda")
    indices = chance.topk(topk).indices.int()
    kv = torch.randn(rows, 576, device="cuda").bfloat16()
    q = torch.randn(queries, heads, 576, device="cuda").bfloat16()
    return SparseOperands(q, kv, indices, None, 512, Weights(SCALE))


def launched(op: SparseOperands, mode: str = "") -> Callable[[], object]:
    """What the plan lists, or with FP8 rows read in a given way."""
    shape = op.q.shape[0], op.q.shape[1], 512
    results = Results(torch.empty(shape, device="cuda", dtype=torch.bfloat16))
    chosen = plan_call(op, results, "hopper")
    if mode:
        read = replace(chosen.config.cache_read, mode=mode)
        chosen = replace(chosen, config=replace(chosen.config, cache_read=read))

    def launch() -> None:
        for call in calls(chosen, op, results):
            call.run()

    return graph_of(launch)


def lists(_: str, rounds: int) -> Iterator[dict[str, Any]]:
    op = sparse(4096, 8192)
    lengths = torch.randint(1, 2049, (4096,), device="cuda").int()
    missing = torch.rand(4096, 2048, device="cuda") < 0.2
    holes = torch.where(missing, -1, op.indices)
    contestants = {
        "whole": (launched(op), 1.0),
        "random topk_lengths": (
            launched(replace(op, topk_lengths=lengths)), float(lengths.float().mean()) / 2048,
        ),
        "all lengths 2048": (
            launched(replace(op, topk_lengths=torch.full_like(lengths, 2048))), 1.0,
        ),
        "20 % invalid": (launched(replace(op, indices=holes)), 1.0),
    }  # fmt: skip
    timings = race({"matmul": matmul(), **{n: c for n, (c, _) in contestants.items()}}, rounds)
    ceiling = 2.0 * MATMUL**3 / timings["matmul"].median
    flops = 2.0 * 4096 * 128 * 2048 * (576 + 512)
    for name, (_, part) in contestants.items():
        median = timings[name].median
        yield {
            "lists": name,
            "us": 1e3 * median,
            "share_of_matmul": part * flops / median / ceiling,
        }


def fp8_operands(queries: int, pool: int, clustered: bool) -> SparseOperands:
    """Rows at random of the whole pool, or of a stretch of 8192 rows that all queries share."""
    cache = LatentCache.allocate(
        num_pages=pool // 64, page_size=64, format="fp8_656", device="cuda"
    )
    fill(cache)
    region = min(pool, 8192) if clustered else pool
    indices = torch.randint(0, region, (queries, 2048), device="cuda").int()
    q = torch.randn(queries, 128, 576, device="cuda").bfloat16()
    return SparseOperands(q, cache, indices, None, 512, Weights(SCALE))


def fp8(group: str, rounds: int) -> Iterator[dict[str, Any]]:
    multiply, pool = matmul(), int(group)
    for queries in (1, 16, 64, 128, 256, 512, 1024, 4096):
        for clustered in (False, True):
            op = fp8_operands(queries, pool, clustered)
            ways = {mode: launched(op, mode) for mode in ("in_kernel", "workspace")}
            results = Results(torch.empty(queries, 128, 512, device="cuda", dtype=torch.bfloat16))
            mode = plan_call(op, results, "hopper").config.cache_read.mode
            timings = race({"matmul": multiply, **ways}, rounds)
            ceiling = 2.0 * MATMUL**3 / timings["matmul"].median
            flops = 2.0 * queries * 128 * 2048 * (576 + 512)
            yield {
                "queries": queries, "pool": pool, "clustered": clustered, "plan": mode,
                **{n: 1e3 * timings[n].median for n in ways},
                **{f"share {n}": flops / timings[n].median / ceiling for n in ways},
            }  # fmt: skip


SECTIONS = {
    "pages": Section(pages, 60, ("bf16", "fp8_656")),
    "lists": Section(lists, 40),
    "fp8": Section(fp8, 40, ("8192", "65536", "1048576", "4194304")),
}

if __name__ == "__main__":
    run(__file__, SECTIONS, lambda result: json.dumps(
        {k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}
    ))  # fmt: skip
