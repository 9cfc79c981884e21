"""Time the latent Hopper kernels over lists of FP8 rows on an H200: bf16 queries over caches, and
(queries) FP8 queries over e4m3 rows beside bf16 and the portable kernel.

PYTHONPATH=src python benchmarks/device/hopper_fp8_h200.py --out DIR [--section speed|host|queries]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from sections import Section, host_microseconds, run

import openmla
from openmla.cache import LatentCache
from openmla.dispatch import plan_call
from openmla.kernels.hopper.latent.launch import calls
from openmla.lab.bench.gpu_timing import MATMUL_FLOPS, graph_of, matmul, race
from openmla.operands import Results, SparseOperands, Weights
from openmla.planning import Plan

FUSED_BAR = 0.40
MODES = ("in_kernel", "workspace")
SCALE = 576**-0.5
MANY = 4096


def launch(chosen: Plan, op: SparseOperands, results: Results) -> None:
    """Run what a plan lists."""
    for call in calls(chosen, op, results):
        call.run()


def with_mode(chosen: Plan, mode: str) -> Plan:
    read = replace(chosen.config.cache_read, mode=mode)
    return replace(chosen, config=replace(chosen.config, cache_read=read))


@dataclass(frozen=True)
class Shape:
    """Queries over lists of rows from a region of `region` rows of a pool."""

    queries: int
    region: int = 8192
    pool: int = 1_000_000
    topk: int = 2048
    heads: int = 128
    cache_format: str = "fp8_656"

    @property
    def flops(self) -> float:
        return 2.0 * self.queries * self.heads * self.topk * (576 + 512)

    def operands(self) -> SparseOperands:
        """Rows outside the region, and their scales, are NaN."""
        generator = torch.Generator("cuda").manual_seed(1)
        pages = self.pool // 64
        cache = LatentCache.allocate(
            num_pages=pages, page_size=64, format=self.cache_format, device="cuda"
        )
        cache.data.view(torch.uint8).fill_(255)
        if cache.scales is not None:
            cache.scales.fill_(torch.nan)
        rows = torch.randperm(cache.rows, generator=generator, device="cuda")[: self.region]
        latent, rope = (
            torch.randn(self.region, width, generator=generator, device="cuda").bfloat16()
            for width in (512, 64)
        )
        cache.append(latent, rope, rows.sort().values)
        chance = torch.rand(self.queries, self.region, generator=generator, device="cuda")
        indices = rows.sort().values[chance.topk(self.topk).indices].int()
        q = torch.randn(self.queries, self.heads, 576, generator=generator, device="cuda")
        return SparseOperands(q.bfloat16(), cache, indices, None, 512, Weights(SCALE))


class Inputs:
    """A shape's tensors, and ways to compute it."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.op = shape, shape.operands()
        self.out = torch.empty(shape.queries, shape.heads, 512, device="cuda").bfloat16()
        self.results = Results(self.out, torch.empty(shape.queries, shape.heads, device="cuda"))
        self.chosen = plan_call(self.op, self.results, "hopper")

    def run(self, mode: str = "") -> torch.Tensor:
        """The plan's way, or a given one."""
        launch(with_mode(self.chosen, mode) if mode else self.chosen, self.op, self.results)
        return self.out

    def bf16(self) -> Callable[[], None]:
        """This attention over rows that are bf16 already, named by the same lists."""
        space = self.op.cache
        assert isinstance(space, LatentCache)
        named, lists = torch.unique(self.op.indices.long(), return_inverse=True)
        rows = space.gather(named)
        op = replace(self.op, cache=rows, indices=lists.int())
        results = Results(torch.empty_like(self.out), torch.empty_like(self.results.lse))
        chosen = plan_call(op, results, "hopper")
        return lambda: launch(chosen, op, results)

    def fused(self, registers: tuple[int, int]) -> Callable[[], object]:
        """Dequantizing in the kernel, with registers divided otherwise."""
        (call,) = calls(with_mode(self.chosen, "in_kernel"), self.op, self.results)
        call.arguments["REGISTERS"] = registers
        return call.run

    def stages(self) -> dict[str, float]:
        """Milliseconds of each kernel of the workspace, as they follow each other."""
        sums: dict[str, float] = {}
        for number in range(6):
            marks = []
            for call in calls(with_mode(self.chosen, "workspace"), self.op, self.results):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call.run()
                end.record()
                marks.append((call.kernel.fn.__name__, call.arguments.get("SCALED", 0), start, end))
            torch.cuda.synchronize()
            for name, scaled, start, end in marks if number else ():
                key = f"{name}{' dequantizing' if scaled else ''}"
                sums[key] = sums.get(key, 0.0) + start.elapsed_time(end) / 5
        return sums


def speed(_: str, rounds: int) -> Iterator[dict[str, Any]]:
    product = matmul()
    shapes = {
        "many, pool of 1000000": (Shape(4096), ("", "workspace"), 0.80),
        "64 queries": (Shape(64, pool=8192), MODES, FUSED_BAR),
        "256 queries": (Shape(256), MODES, 0.0),
        "1024 queries": (Shape(1024, region=65536), MODES, 0.0),
        "64 queries, fp8_block64": (Shape(64, pool=8192, cache_format="fp8_block64"), MODES, 0.0),
    }
    for name, (shape, modes, bar) in shapes.items():
        inputs = Inputs(shape)
        contestants: dict[str, Callable[[], object]] = {"matmul": product}
        for mode in modes:
            contestants[mode or "plan"] = lambda x=inputs, m=mode: x.run(m)
        contestants["bf16 rows"] = inputs.bf16()
        if bar == FUSED_BAR:
            contestants["in_kernel 208/88"] = inputs.fused((208, 88))
        timings = race(contestants, rounds)
        ceiling = MATMUL_FLOPS / timings["matmul"].median
        in_a_row = MATMUL_FLOPS / timings["matmul"].back_to_back
        row: dict[str, Any] = {
            "shape": f"{name}: {shape}",
            "bar": bar,
            "plan": inputs.chosen.config.cache_read.mode,
            "matmul_tflops": ceiling * 1e-9,
        }
        for contestant, t in timings.items():
            row[contestant] = {
                "ms": t.median,
                "share": shape.flops / t.median / ceiling,
                "share_in_a_row": shape.flops / t.back_to_back / in_a_row,
            }
        yield row
        yield {"stages": inputs.stages()}
        del inputs, contestants


def e4m3(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(torch.float8_e4m3fn)


def contestants_of(queries: int, keys: int) -> dict[str, Callable[[], object]]:
    """FP8 queries over lists of 2048 e4m3 rows, by both kernels; many also beside bf16 over the
    same numbers, few from a CUDA graph."""
    q, rows = e4m3(queries, 128, 576), e4m3(keys, 576)
    lists = torch.rand(queries, keys, device="cuda").topk(2048).indices.int()

    def call(q: torch.Tensor, rows: torch.Tensor, backend: str) -> Callable[[], object]:
        return lambda: openmla.mla_prefill_sparse(q, rows, lists, scale=SCALE, backend=backend)

    named = {f"e4m3 {backend}": call(q, rows, backend) for backend in ("hopper", "portable")}
    if queries < MANY:
        return {name: graph_of(contestant) for name, contestant in named.items()}
    return {"matmul": matmul(), "bf16": call(q.bfloat16(), rows.bfloat16(), "hopper"), **named}


def queries(_: str, rounds: int) -> Iterator[dict[str, Any]]:
    """FP8 queries beside bf16 and the portable kernel, 128 heads."""
    for number, keys in ((MANY, 8192), (MANY, 65536), (64, 8192), (8, 8192), (1, 8192)):
        timings = race(contestants_of(number, keys), rounds)
        hopper = timings["e4m3 hopper"]
        row: dict[str, Any] = {
            "shape": f"{number} x top-2048 of {keys} h128",
            "milliseconds": {name: t.median for name, t in timings.items()},
            "over_portable": timings["e4m3 portable"].median / hopper.median,
        }
        if "bf16" in timings:
            bf16 = timings["bf16"]
            row |= {
                "matmul_tflops": MATMUL_FLOPS / timings["matmul"].median * 1e-9,
                "over_bf16": bf16.median / hopper.median,
                "over_bf16_in_a_row": bf16.back_to_back / hopper.back_to_back,
            }
        yield row
        torch.cuda.empty_cache()


def host(_: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Time on the host of both ways, planned beforehand."""
    inputs = Inputs(Shape(64, region=4096, pool=64 * 100, topk=128, heads=64))
    for mode in MODES:
        microseconds = host_microseconds(lambda number, m=mode: inputs.run(m))
        yield {"host": mode, "microseconds": microseconds}


if __name__ == "__main__":
    sections = {
        "speed": Section(speed, 75),
        "host": Section(host, 60),
        "queries": Section(queries, 60),
    }
    run(__file__, sections, json.dumps)
