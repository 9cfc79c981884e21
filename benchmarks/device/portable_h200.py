"""Time the portable kernels on one H200: every tile candidate of every shape, and the cache's own.

    PYTHONPATH=src python benchmarks/device/portable_h200.py --out DIR [--section NAME ...]

Sections: compile (all candidates, side by side, into Triton's cache on disk), time (one group per
shape; `--only h16` times those whose name has it), cache. The winners go to
src/openmla/kernels/portable/tuned/h200.json.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from sections import Section, run
from triton.testing import do_bench

from openmla.cache import LatentCache
from openmla.dispatch import plan_call
from openmla.formats import FORMATS
from openmla.kernels.call import Call
from openmla.kernels.portable import cache_ops
from openmla.kernels.portable.launch import calls
from openmla.lab.bench.gpu_timing import MATMUL_FLOPS, matmul
from openmla.operands import DenseOperands, LatentOperands, Results, SparseOperands, Weights

WORKERS = 12


@dataclass(frozen=True)
class Tile:
    """A candidate: what the planner would choose."""

    BM: int
    BN: int
    num_stages: int
    num_warps: int
    bulk_copies: bool = False
    group_heads: int = 4
    dequantize: bool = False
    """Dequantize an FP8 cache into a workspace first."""


def _dense_tiles() -> list[Tile]:
    shapes = [(128, 64, 3, 8), (128, 64, 2, 8), (128, 128, 2, 8), (64, 64, 3, 4), (64, 64, 2, 4)]
    tiles = [Tile(*shape, bulk_copies=bulk) for bulk in (True, False) for shape in shapes]
    groups = [Tile(128, 64, 3, 8, True, group_heads=g) for g in (1, 2, 8, 16)]
    return [*tiles, Tile(128, 64, 4, 8, True), *groups]


ROW_TILES = [
    Tile(64, 64, 2, 8),
    Tile(64, 64, 3, 8),
    Tile(64, 32, 2, 8),
    Tile(64, 32, 3, 8),
]
FP8_TILES = [Tile(64, 64, 2, 8, dequantize=True), *ROW_TILES]
FEW_HEADS_TILES = [
    Tile(16, 64, 2, 4),
    Tile(16, 64, 2, 8),
    Tile(16, 64, 3, 4),
    Tile(16, 32, 2, 4),
    Tile(16, 32, 3, 4),
]
MORE_HEADS_TILES = [Tile(16, 64, 2, 4), Tile(32, 64, 2, 8), Tile(32, 64, 2, 4), Tile(32, 32, 2, 4)]


@dataclass(frozen=True)
class Shape:
    """One timed problem: `tokens` queries per sequence, `keys` keys or rows, top-k when sparse."""

    form: str
    heads: int
    tokens: int
    keys: int
    topk: int = 0
    format: str = ""
    """Cache format; plain rows when empty."""

    @property
    def flops(self) -> float:
        """Operations as the peers count them: a causal dense product has half of the pairs."""
        if self.form == "dense":
            return 2 * self.heads * 320 * (self.tokens * self.keys - self.tokens**2 / 2)
        pairs = self.tokens * self.topk
        if self.form == "latent":
            pairs = self.tokens * self.keys - self.tokens**2 / 2
        return 2 * self.heads * 1088 * pairs

    @property
    def gathered_bytes(self) -> float:
        """What the index lists name, counted once per token."""
        row = {"": 1152, "bf16": 1152, "fp8_656": 656, "fp8_block64": 612}[self.format]
        return float(self.tokens * self.topk * row)


SHAPES: dict[str, tuple[Shape, list[Tile]]] = {
    "dense h128 1x8192": (Shape("dense", 128, 8192, 8192), _dense_tiles()),
    "dense h128 1x4096": (Shape("dense", 128, 4096, 4096), _dense_tiles()[:4]),
    "dense h16 1x8192": (Shape("dense", 16, 8192, 8192), _dense_tiles()[:4]),
    "sparse h128 bf16": (Shape("sparse", 128, 4096, 8192, 2048), ROW_TILES),
    "sparse h128 fp8_656": (Shape("sparse", 128, 4096, 8192, 2048, "fp8_656"), FP8_TILES),
    "sparse h128 fp8_block64": (
        Shape("sparse", 128, 4096, 8192, 2048, "fp8_block64"),
        FP8_TILES[:4],
    ),
    "sparse h16 bf16": (Shape("sparse", 16, 4096, 8192, 2048), FEW_HEADS_TILES),
    "sparse h32 bf16": (Shape("sparse", 32, 4096, 8192, 2048), MORE_HEADS_TILES),
    "sparse h16 fp8_656": (
        Shape("sparse", 16, 4096, 8192, 2048, "fp8_656"),
        [Tile(16, 64, 2, 4, dequantize=True), Tile(16, 64, 2, 4)],
    ),
    "latent h16": (Shape("latent", 16, 2048, 8192, 0, "bf16"), ROW_TILES),
    "latent h128": (Shape("latent", 128, 512, 8192, 0, "bf16"), ROW_TILES),
}


def operands(shape: Shape, small: bool = False) -> tuple[Any, Any]:
    """Random tensors of a shape; `small` has fewer tokens and compiles the same kernels."""
    make = {"dtype": torch.bfloat16, "device": "cuda"}
    T, N, H = 256 if small else shape.tokens, shape.keys, shape.heads
    cu, cu_k = (torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (T, N))
    if shape.form == "dense":
        q = torch.randn(T, H, 192, **make)
        k, v = torch.randn(N, H, 128, **make), torch.randn(N, H, 128, **make)
        op = DenseOperands(q, k, torch.randn(N, 64, **make), v, cu, cu_k, True, Weights(192**-0.5))
        return op, Results(torch.empty(T, H, 128, **make), torch.empty(T, H, device="cuda"))
    q = torch.randn(T, H, 576, **make) / 10
    results = Results(torch.empty(T, H, 512, **make), torch.empty(T, H, device="cuda"))
    rows: Any = torch.randn(N, 576, **make) / 10
    if shape.format:
        cache = LatentCache.allocate(
            num_pages=N // 64, page_size=64, format=shape.format, device="cuda"
        )
        cache.append(rows[:, :512], rows[:, 512:], torch.arange(N, device="cuda"))
        rows = cache
    if shape.form == "latent":
        table = torch.randperm(N // 64, device="cuda").to(torch.int32)[None]
        lengths = torch.tensor([N], dtype=torch.int32, device="cuda")
        return LatentOperands(q, rows, table, lengths, cu, True, 512, Weights(192**-0.5)), results
    indices = torch.randint(0, N, (T, shape.topk), dtype=torch.int32, device="cuda")
    return SparseOperands(q, rows, indices, None, 512, Weights(192**-0.5)), results


def candidate(tile: Tile, op: Any, results: Results) -> list[Call]:
    """The calls of the plan for these operands, with this tile in place of its own."""
    chosen = plan_call(op, results, "portable")
    fields = asdict(tile)
    mode = "workspace" if fields.pop("dequantize") else "plain"
    read = replace(chosen.config.cache_read, mode=mode)
    # Branches around the arithmetic of rows help from 64 rows on, as the planner says.
    config = replace(chosen.config, **fields, cache_read=read, branches=tile.BM >= 64)
    return list(calls(replace(chosen, config=config), op, results))


def compile_all(worker: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Every WORKERS-th candidate, so that timing finds it in Triton's cache."""
    jobs = [(name, tile) for name, (_, tiles) in SHAPES.items() for tile in tiles]
    for name, tile in jobs[int(worker) :: WORKERS]:
        found: dict[str, Any] = {"shape": name, "tile": asdict(tile)}
        started = time.perf_counter()
        try:
            made = [call.compile() for call in candidate(tile, *operands(SHAPES[name][0], True))]
            found["shared"] = [kernel.metadata.shared for kernel in made]
        except Exception as error:
            found["error"] = repr(error)[-300:]
        yield {**found, "seconds": time.perf_counter() - started}


def bench(run: Callable[[], object]) -> float:
    return float(do_bench(run, warmup=20, rep=60, return_mode="median"))


def time_shape(name: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Every candidate of one shape, with the matrix product before each."""
    shape, tiles = SHAPES[name]
    product = matmul()
    op, results = operands(shape)
    reference = None
    for tile in tiles:
        found: dict[str, Any] = {"shape": name, "tile": asdict(tile)}
        ceiling = MATMUL_FLOPS / bench(product) / 1e9
        try:
            listed = candidate(tile, op, results)
            compiled, *_ = [call.run() for call in listed]
            ms = bench(lambda calls=listed: [call.run() for call in calls])
        except Exception as error:
            yield {**found, "error": repr(error)[-300:]}
            if "CUDA" in repr(error):
                return  # the context is gone
            continue
        if reference is None:
            reference = results.out.float()
        tflops = shape.flops / ms / 1e9
        yield {
            **found,
            "ms": ms,
            "tflops": tflops,
            "matmul": ceiling,
            "share": tflops / ceiling,
            "gathered_tbps": shape.gathered_bytes / ms / 1e9,
            "registers": compiled.n_regs,
            "spills": compiled.n_spills,
            "shared": compiled.metadata.shared,
            # A timing of something wrong is worth nothing: the distance from the first candidate.
            "apart": float((results.out.float() - reference).norm() / reference.norm()),
        }


def cache(_: str, rounds: int) -> Iterator[dict[str, Any]]:
    """append and gather of 4096 rows, every format."""
    slots = torch.randperm(128 * 64, device="cuda")[:4096]
    for name, format in FORMATS.items():
        latent, rope = (format.widths or ((512, 64),))[0]
        x = torch.randn(4096, latent + rope, device="cuda").bfloat16()
        pool = LatentCache.allocate(
            num_pages=128, page_size=64, latent=latent, rope=rope, format=name, device="cuda"
        )
        append = partial(cache_ops.append, pool, x[:, :latent], x[:, latent:], slots)
        append()
        gather = partial(cache_ops.gather, pool, slots, torch.empty_like(x))
        yield {"format": name, "append_us": bench(append) * 1e3, "gather_us": bench(gather) * 1e3}


def line(r: dict[str, Any]) -> str:
    if "ms" not in r:
        return json.dumps(r)
    t = r["tile"]
    extras = [k for k in ("bulk_copies", "dequantize") if t[k]] + [f"g{t['group_heads']}"]
    return (
        f"  {r['shape']:24s} {t['BM']:>3}x{t['BN']:<3} s{t['num_stages']} w{t['num_warps']} "
        f"{' '.join(extras):<22} {r['ms']:8.3f} ms {r['tflops']:6.1f} TF share {r['share']:.3f} "
        f"{r['gathered_tbps']:5.2f} TB/s r{r['registers']} sp{r['spills']} {r['shared']} B "
        f"apart {r['apart']:.1e}"
    )


if __name__ == "__main__":
    workers = tuple(map(str, range(WORKERS)))
    run(
        __file__,
        {
            "compile": Section(compile_all, 120, workers, side_by_side=True),
            "time": Section(time_shape, 60, tuple(SHAPES)),
            "cache": Section(cache, 60),
        },
        line,
    )
