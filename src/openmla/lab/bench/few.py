"""`openmla bench few`: few queries over many keys, as decode has them, on a GPU or a CPU.

A call is `mla_prefill_latent` over a paged cache. On a GPU it is replayed from a CUDA graph between
turns of torch's 8192^3 bf16 matmul; on a CPU it takes turns with plain torch, on fewer requests and
keys. Two figures say how good a time is: the share of the matmul's rate, and the bytes of rows per
second. With few heads the second is the limit, with many the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import openmla
from openmla.cache import LatentCache
from openmla.formats import FormatName
from openmla.lab.bench import gpu_timing, peers, timing
from openmla.lab.bench.cpu import mm_gflops
from openmla.lab.bench.report import Report, duration
from openmla.problem import Backend

LATENT, ROPE, PAGE = 512, 64, 64
SCALE = (LATENT + ROPE) ** -0.5
# A CPU gets so many times fewer requests and keys of each.
FEWER_REQUESTS, FEWER_KEYS, QUICK_KEYS = 32, 4, 32


@dataclass(frozen=True)
class Shape:
    """Requests of `queries` new tokens and `keys` keys each, on pages of 64 rows."""

    requests: int
    queries: int
    keys: int
    heads: int
    causal: bool = True
    cache_format: FormatName = "bf16"

    @property
    def flops(self) -> float:
        """Floating-point operations of the products."""
        hidden = (self.queries - 1) / 2 if self.causal else 0.0
        pairs = self.requests * self.queries * (self.keys - hidden)
        return 2.0 * pairs * self.heads * (2 * LATENT + ROPE)

    @property
    def bytes(self) -> float:
        """Bytes of the rows, each read once."""
        layout = LatentCache.allocate(num_pages=0, page_size=1, format=self.cache_format).layout
        return float(layout.row_bytes * self.requests * self.keys)

    def on_cpu(self, quick: bool) -> Shape:
        """A shape of the same kind that a CPU can be asked for."""
        keys = self.keys // (QUICK_KEYS if quick else FEWER_KEYS)
        return replace(self, requests=max(self.requests // FEWER_REQUESTS, 1), keys=keys)

    def __str__(self) -> str:
        rows = "" if self.cache_format == "bf16" else f" {self.cache_format}"
        return f"{self.requests}x{self.queries} on {self.keys} h{self.heads}{rows}"


SHAPES = (
    Shape(128, 1, 4096, 128),
    Shape(32, 1, 32768, 128),
    Shape(128, 1, 4096, 16),
    Shape(1, 1, 32768, 16),
    Shape(1, 1, 32768, 128),
    Shape(128, 2, 4096, 128),
    Shape(32, 1, 32768, 16),
    Shape(128, 1, 32768, 16),
    Shape(32, 1, 32768, 128, cache_format="fp8_656"),
    Shape(128, 1, 4096, 16, cache_format="fp8_656"),
    Shape(1, 1, 32768, 16, cache_format="fp8_656"),
)


class Inputs:
    """Random tensors of a shape, pages in no order."""

    def __init__(self, shape: Shape, device: str) -> None:
        pages = -(-shape.keys // PAGE)
        total = shape.requests * shape.queries
        self.shape = shape
        self.cache = LatentCache.allocate(
            num_pages=shape.requests * pages,
            page_size=PAGE,
            format=shape.cache_format,
            device=device,
        )
        fill(self.cache)
        table = torch.randperm(shape.requests * pages, device=device).int()
        self.table = table.view(shape.requests, pages)
        self.lengths = torch.full((shape.requests,), shape.keys, device=device).int()
        self.cu_q = torch.arange(shape.requests + 1, device=device).int() * shape.queries
        self.q = torch.randn(total, shape.heads, LATENT + ROPE, device=device).bfloat16()
        self.out = torch.empty(total, shape.heads, LATENT, device=device, dtype=torch.bfloat16)

    def openmla(self, backend: Backend = "auto", range_keys: int | None = None) -> Tensor:
        """The public call."""
        result = openmla.mla_prefill_latent(
            self.q,
            self.cache,
            self.table,
            self.lengths,
            cu_seqlens_q=self.cu_q,
            scale=SCALE,
            causal=self.shape.causal,
            range_keys=range_keys,
            out=self.out,
            backend=backend,
        )
        assert isinstance(result, Tensor)
        return result

    def plain(self) -> Tensor:
        """What one would write with torch, one request after another."""
        of_request = self.q.view(self.shape.requests, self.shape.queries, *self.q.shape[1:])
        offset = torch.arange(PAGE)
        outs = []
        for q, pages in zip(of_request, self.table, strict=True):
            rows = (pages[:, None] * PAGE + offset).view(-1)[: self.shape.keys]
            outs.append(peers.over_rows(q, self.cache.gather(rows), LATENT, SCALE))
        return torch.cat(outs)


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
class Row:
    """One shape's figures, in seconds and in operations per second."""

    shape: Shape
    seconds: float
    matmul: float
    """Rate of a matmul in the same run."""
    plain_seconds: float | None = None
    """Plain torch's, on a CPU."""

    def __str__(self) -> str:
        return str(self.shape)

    @property
    def rate(self) -> float:
        """Floating-point operations per second."""
        return self.shape.flops / self.seconds

    @property
    def bandwidth(self) -> float:
        """Bytes of rows per second."""
        return self.shape.bytes / self.seconds

    @property
    def times_faster(self) -> float | None:
        """Than plain torch."""
        return None if self.plain_seconds is None else self.plain_seconds / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            **asdict(self.shape),
            "shape": str(self.shape),
            "us": 1e6 * self.seconds,
            "tflops": 1e-12 * self.rate,
            "matmul_tflops": 1e-12 * self.matmul,
            "share": self.rate / self.matmul,
            "tb_per_s": 1e-12 * self.bandwidth,
            "over_torch": self.times_faster,
        }

    def cells(self) -> tuple[str, ...]:
        """The line of a table."""
        faster = "–" if self.times_faster is None else f"{self.times_faster:.2f}x"
        share = f"{self.rate / self.matmul:.3f}"
        return str(self), duration(self.seconds), share, f"{1e-9 * self.bandwidth:.3g}", faster


def run_few(rounds: int, quick: bool = False) -> Iterator[Row]:
    """Every shape, on the GPU if there is one."""
    if torch.cuda.is_available():
        for shape in SHAPES:
            yield on_gpu(shape, rounds)
            torch.cuda.empty_cache()
    else:
        rate = 1e9 * mm_gflops(torch.bfloat16)
        for shape in dict.fromkeys(shape.on_cpu(quick) for shape in SHAPES):
            yield _on_cpu(shape, rounds, rate)


def on_gpu(shape: Shape, rounds: int, backend: Backend = "auto") -> Row:
    """From a CUDA graph, between turns of the matmul."""
    ours = gpu_timing.graph_of(partial(Inputs(shape, "cuda").openmla, backend))
    times = gpu_timing.race({"matmul": gpu_timing.matmul(), "openmla": ours}, rounds)
    rate = gpu_timing.MATMUL_FLOPS / (1e-3 * times["matmul"].median)
    return Row(shape, 1e-3 * times["openmla"].median, rate)


def _on_cpu(shape: Shape, rounds: int, rate: float) -> Row:
    inputs = Inputs(shape, "cpu")
    contestants = {"openmla": inputs.openmla, "plain": inputs.plain}
    found = timing.race([timing.Contestant(n, f) for n, f in contestants.items()], rounds)
    return Row(shape, found["openmla"].seconds, rate, found["plain"].seconds)


def report(rows: Iterable[Row]) -> Report:
    """One line per shape."""
    found = list(rows)
    return Report(
        "openmla bench few",
        ("requests x queries on keys", "time", "of matmul", "GB/s", "over torch"),
        [row.cells() for row in found],
        {"rows": [row.to_json() for row in found]},
        {str(row): {"openmla": 1e-12 * row.rate, "matmul": 1e-12 * row.matmul} for row in found},
    )
