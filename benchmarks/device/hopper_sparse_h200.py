"""Time the latent Hopper kernel on an H200: lists of bf16 rows, and whole sequences over pages
(hopper_fp8_h200.py has lists of FP8 rows).

    PYTHONPATH=src python benchmarks/device/hopper_sparse_h200.py --out DIR [--section NAME ...]

Sections: speed, latent, host.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from sections import Section, host_microseconds, run

import openmla
from openmla import cached
from openmla.cache import LatentCache
from openmla.lab.bench.gpu_timing import MATMUL_FLOPS, matmul, race
from openmla.lab.bench.sparse import SHAPES, Inputs, Shape, run_sparse

# A chunk of tokens at the end of a sequence: heads, tokens, keys, format of the cache.
CHUNKS = (
    (128, 4096, 32768, "bf16"),
    (128, 512, 32768, "bf16"),
    (128, 128, 32768, "bf16"),
    (16, 2048, 65536, "bf16"),
    (128, 1024, 32768, "fp8_656"),
)


def speed(_: str, rounds: int) -> Iterator[dict[str, Any]]:
    for row in run_sparse(rounds, SHAPES):
        yield row.to_json()


def chunk_call(heads: int, tokens: int, keys: int, form: str) -> Callable[[str], object]:
    """The chunk's attention over scattered pages, by backend."""
    pages = keys // 64
    cache = LatentCache.allocate(num_pages=pages, page_size=64, format=form, device="cuda")
    rows = torch.randn(keys, 576, device="cuda", dtype=torch.bfloat16)
    order = torch.randperm(pages, device="cuda", dtype=torch.int32)
    slots = (order[:, None] * 64 + torch.arange(64, device="cuda")).flatten().long()
    cache.append(rows[:, :512], rows[:, 512:], slots)
    q = torch.randn(tokens, heads, 576, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([keys], device="cuda", dtype=torch.int32)
    cu = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)
    return lambda backend: openmla.mla_prefill_latent(
        q, cache, order[None], lengths, cu_seqlens_q=cu, scale=576**-0.5, backend=backend
    )


def latent(_: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Whole sequences over pages, beside the portable kernel."""
    product = matmul()
    for heads, tokens, keys, form in CHUNKS:
        call = chunk_call(heads, tokens, keys, form)
        contestants = {name: partial(call, name) for name in ("hopper", "portable")}
        times = race({**contestants, "matmul": product}, max(rounds // 3, 2))
        flops = 2.0 * heads * 1088 * (tokens * (keys - tokens) + tokens * (tokens + 1) / 2)
        ceiling = MATMUL_FLOPS / times["matmul"].median
        yield {
            "chunk": f"{tokens} tokens of {keys}, {heads} heads, {form}",
            "milliseconds": {name: t.median for name, t in times.items()},
            "share": {name: flops / times[name].median / ceiling for name in contestants},
        }


def host(_: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Time on the host of the public call: known, and planned anew."""
    inputs = Inputs(Shape(128, 64, 8192, 128))

    def forgotten(number: int) -> None:
        cached.forget()
        inputs.openmla()

    yield {"host": "known", "microseconds": host_microseconds(lambda number: inputs.openmla())}
    yield {"host": "new", "microseconds": host_microseconds(forgotten)}


def line(r: dict[str, Any]) -> str:
    if "timings" not in r:
        return json.dumps(r)
    return (
        f"{r['shape']:40s} {r['timings']['openmla']['median']:.3f} ms {r['tflops']:.0f} of "
        f"{r['matmul_tflops']:.0f} = {r['share']:.3f} (in a row {r['share_back_to_back']:.3f}, "
        f"bar {r['bar']}) {r['gather_tb_per_s']:.2f} TB/s"
    )


if __name__ == "__main__":
    run(
        __file__,
        {"speed": Section(speed, 90), "latent": Section(latent, 60), "host": Section(host, 60)},
        line,
    )
