"""Time few queries over many keys on an H200: pages, uneven lists, few lists, FP8 rows read in two
ways; ranges of keys of several lengths, beside FlashMLA where that is installed.

PYTHONPATH=src python benchmarks/device/few_h200.py --out DIR [--section ranges|pages|lists ...]

Every call is replayed from a CUDA graph, so host time is not measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from sections import Section, run
from torch import Tensor

from openmla.cache import LatentCache
from openmla.dispatch import plan_call
from openmla.kernels.hopper.latent.launch import calls
from openmla.lab.bench.few import SCALE, SHAPES, Inputs, Shape, fill, on_gpu
from openmla.lab.bench.gpu_timing import MATMUL_FLOPS, graph_of, matmul, race
from openmla.operands import Results, SparseOperands, Weights
from openmla.planning.dequantize import LISTED_CAP
from openmla.planning.latent_split import suggested_range_keys

# The shapes of `openmla bench few`, and chunks beside them, which must not become slower.
CHUNKS = (Shape(1, 4096, 8192, 128), Shape(1, 2048, 16384, 16), Shape(4, 512, 8192, 128))
PAGES = {
    "bf16": [(s, "hopper") for s in (*SHAPES, *CHUNKS) if s.cache_format == "bf16"],
    "fp8_656": [
        (s, b) for s in SHAPES if s.cache_format == "fp8_656" for b in ("hopper", "portable")
    ],
}


def pages(group: str, rounds: int) -> Iterator[dict[str, Any]]:
    for shape, backend in PAGES[group]:
        yield {"backend": backend, **on_gpu(shape, rounds, backend).to_json()}
        torch.cuda.empty_cache()


# Decode where ranges follow from requests that are few: lengths that are even, or drawn from 1 on.
# The last two are batches that fill the chip, which short ranges must be expected to slow down.
RANGED = {
    "1 of 32768, 128 heads": (Shape(1, 1, 32768, 128), False),
    "1 of 131072, 128 heads": (Shape(1, 1, 131072, 128), False),
    "1 of 32768, 16 heads": (Shape(1, 1, 32768, 16), False),
    "1 of 8192, 16 heads": (Shape(1, 1, 8192, 16), False),
    "8 of 1 to 32768, 128 heads": (Shape(8, 1, 32768, 128), True),
    "32 of 8192, 128 heads": (Shape(32, 1, 8192, 128), False),
    "32 of 8192, 16 heads": (Shape(32, 1, 8192, 16), False),
    "32 of 1 to 8192, 16 heads": (Shape(32, 1, 8192, 16), True),
    "32 of 32768, 128 heads": (Shape(32, 1, 32768, 128), False),
    "128 of 8192, 128 heads": (Shape(128, 1, 8192, 128), False),
}
RANGES = (None, 256, 512, 1024, 2048, 4096)


def ranges(group: str, rounds: int) -> Iterator[dict[str, Any]]:
    """The rule of the plan (None), ranges of several lengths, and FlashMLA."""
    shape, drawn = RANGED[group]
    inputs = Inputs(shape, "cuda")
    if drawn:
        inputs.lengths.random_(1, shape.keys + 1)
    mean = int(inputs.lengths.float().mean())
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    suggested = suggested_range_keys(shape.heads, shape.requests, mean, sms)
    lengths = list(dict.fromkeys((*RANGES, suggested)))
    outs = {str(keys): inputs.openmla(range_keys=keys).clone() for keys in lengths}
    contestants: dict[str, Callable[[], object]] = {
        str(keys): graph_of(partial(inputs.openmla, range_keys=keys)) for keys in lengths
    }
    peer = flash_mla(inputs)
    if peer is not None:
        outs["FlashMLA"] = peer().view_as(inputs.out).clone()
        contestants["FlashMLA"] = graph_of(peer)
    timings = race(contestants, rounds)
    usual = timings["None"].median
    yield {
        "shape": group,
        "suggested": suggested,
        **{f"us {name}": 1e3 * timings[name].median for name in contestants},
        **{f"us {name} in a row": 1e3 * timings[name].back_to_back for name in contestants},
        **{f"times faster {name}": usual / timings[name].median for name in contestants},
        **{f"apart {n}": float((x - outs["None"]).abs().max()) for n, x in outs.items()},
    }


def flash_mla(inputs: Inputs) -> Callable[[], Tensor] | None:
    """FlashMLA's call, or None where there is no such package. It makes its schedule in the first
    call, which is not timed."""
    if find_spec("flash_mla") is None:
        return None
    package = import_module("flash_mla")
    schedule, splits = package.get_mla_metadata()
    q = inputs.q.view(inputs.shape.requests, inputs.shape.queries, *inputs.q.shape[1:])
    rows = inputs.cache.data.unsqueeze(2)
    common = {"softmax_scale": SCALE, "causal": inputs.shape.causal}

    def call() -> Tensor:
        asked = q, rows, inputs.table, inputs.lengths, inputs.out.shape[2], schedule, splits
        out: Tensor = package.flash_mla_with_kvcache(*asked, **common)[0]
        return out

    return call


def sparse(queries: int, rows: int, heads: int = 128, topk: int = 2048) -> SparseOperands:
    """Lists of distinct rows, bf16."""
    chance = torch.rand(queries, rows, device="cuda")
    indices = chance.topk(topk).indices.int()
    kv = torch.randn(rows, 576, device="cuda").bfloat16()
    q = torch.randn(queries, heads, 576, device="cuda").bfloat16()
    return SparseOperands(q, kv, indices, None, 512, Weights(SCALE))


def launched(op: SparseOperands, mode: str = "") -> Callable[[], object]:
    """What the plan lists; or attention in one launch, over FP8 rows with those read in a given
    way: see CacheRead.by."""
    shape = op.q.shape[0], op.q.shape[1], 512
    results = Results(torch.empty(shape, device="cuda", dtype=torch.bfloat16))
    chosen = plan_call(op, results, "hopper")
    if mode:
        read = chosen.config.cache_read
        read = read if mode == "plain" else read.by(mode, op.rows, op.rows)
        chosen = replace(chosen, config=replace(chosen.config, cache_read=read, few=None))

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
            launched(replace(op, topk_lengths=lengths)),
            float(lengths.float().mean()) / 2048,
        ),
        "all lengths 2048": (
            launched(replace(op, topk_lengths=torch.full_like(lengths, 2048))),
            1.0,
        ),
        "20 % invalid": (launched(replace(op, indices=holes)), 1.0),
    }
    timings = race({"matmul": matmul(), **{n: c for n, (c, _) in contestants.items()}}, rounds)
    ceiling = MATMUL_FLOPS / timings["matmul"].median
    flops = 2.0 * 4096 * 128 * 2048 * (576 + 512)
    for name, (_, part) in contestants.items():
        median = timings[name].median
        yield {
            "lists": name,
            "us": 1e3 * median,
            "share_of_matmul": part * flops / median / ceiling,
        }


def few(kind: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Lists of few queries as planned, and in one launch."""
    cache = fp8_rows(2**20 if kind == "fp8_656" else 64)
    for queries in (1, 2, 4, 8, 16):
        op = sparse(queries, 32768) if kind == "bf16" else fp8_operands(queries, cache, False)
        one = "plain" if kind == "bf16" else "in_kernel"
        timings = race({"planned": launched(op), "one launch": launched(op, one)}, rounds)
        yield {
            "queries": queries,
            "rows": kind,
            **{f"{n} us": 1e3 * t.median for n, t in timings.items()},
            **{f"{n} us in a row": 1e3 * t.back_to_back for n, t in timings.items()},
        }


def fp8_rows(pool: int) -> LatentCache:
    cache = LatentCache.allocate(
        num_pages=pool // 64, page_size=64, format="fp8_656", device="cuda"
    )
    fill(cache)
    return cache


def fp8_operands(queries: int, cache: LatentCache, clustered: bool) -> SparseOperands:
    """Rows at random of the whole pool, or of a stretch of 8192 rows that all queries share."""
    region = min(cache.rows, 8192) if clustered else cache.rows
    indices = torch.randint(0, region, (queries, 2048), device="cuda").int()
    q = torch.randn(queries, 128, 576, device="cuda").bfloat16()
    return SparseOperands(q, cache, indices, None, 512, Weights(SCALE))


QUERIES = (1, 16, 64, 128, 256, 1024, 4096)
POOLS = (8192, 65536, 1_000_000, 4_194_304)


def fp8(_: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Every way to read FP8 rows; `loss`: how far the plan's is behind the best."""
    multiply = matmul()
    for pool in POOLS:
        cache = fp8_rows(pool)
        rows = [
            fp8_ways(fp8_operands(queries, cache, clustered), multiply, rounds)
            | {"clustered": clustered}
            for queries in QUERIES
            for clustered in (False, True)
        ]
        yield from rows
        yield {"pool": pool, "worst loss of the plan": max(row["loss"] for row in rows)}
        del cache
        torch.cuda.empty_cache()


def fp8_ways(op: SparseOperands, multiply: Callable[[], object], rounds: int) -> dict[str, Any]:
    """One shape, all ways."""
    queries, pool = op.q.shape[0], op.rows
    fits = 2 * 576 * pool <= LISTED_CAP
    ways = {n: launched(op, n) for n in ("in_kernel", "named", *["whole"] * fits)}
    results = Results(torch.empty(queries, 128, 512, device="cuda", dtype=torch.bfloat16))
    config = plan_call(op, results, "hopper").config
    mode = config.cache_read.mode
    if mode == "workspace":
        mode = "named" if config.cache_read.mapped else "whole"
    if config.few:
        mode = "few"
        ways[mode] = launched(op)
    timings = race({"matmul": multiply, **ways}, rounds)
    ceiling = MATMUL_FLOPS / timings["matmul"].median
    flops = 2.0 * queries * 128 * 2048 * (576 + 512)
    times = {n: 1e3 * timings[n].median for n in ways}
    return {
        "queries": queries,
        "pool": pool,
        "plan": mode,
        "loss": times[mode] / min(times.values()) - 1,
        **times,
        **{f"share {n}": flops / timings[n].median / ceiling for n in ways},
    }


SECTIONS = {
    "pages": Section(pages, 60, ("bf16", "fp8_656")),
    "ranges": Section(ranges, 60, tuple(RANGED)),
    "lists": Section(lists, 40),
    "few": Section(few, 40, ("bf16", "fp8_656")),
    "fp8": Section(fp8, 60),
}

if __name__ == "__main__":
    run(
        __file__,
        SECTIONS,
        lambda result: json.dumps(
            {k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}
        ),
    )
