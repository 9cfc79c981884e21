"""`openmla bench sparse`: sparse prefill on a GPU, interleaved with a matmul in one run.

Rates are of `2 * queries * heads * topk * (d_qk + d_v)` operations, whatever is padded. The share
is that of torch's 8192^3 bf16 matmul, which takes its turns between the timed calls: a GPU's clock
follows its power, and a rate means little without what the chip gave at that moment. `gather` is
what the kernel reads of the rows: every row that an index names, once per block of 64 heads.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor

import openmla
from openmla.cache import LatentCache
from openmla.formats import FORMATS, FormatName
from openmla.lab.bench.gpu_timing import MATMUL_FLOPS, GpuTiming, matmul, race
from openmla.lab.bench.report import Report

ROW_BLOCK = 64  # heads that share one gather
PAGE = 64  # rows of a page of a cache


@dataclass(frozen=True)
class Shape:
    """q_len queries with topk indices each, into a pool of `rows`."""

    heads: int
    q_len: int
    rows: int
    topk: int
    latent: int = 512
    rope: int = 64
    kv: str = "bf16"
    """How rows are stored: bf16, or a format of LatentCache."""
    bar: float = 0.0
    """Least share of the matmul's rate that a release must reach; 0: none is set."""
    bar_gather: float = 0.0
    """Least bytes gathered per second, in TB/s."""

    @property
    def flops(self) -> float:
        """Floating-point operations of the products."""
        return 2.0 * self.q_len * self.heads * self.topk * (2 * self.latent + self.rope)

    @property
    def gathered(self) -> float:
        """Bytes of rows read."""
        blocks = -(-self.heads // ROW_BLOCK)
        row = FORMATS[self.kv].layout(self.latent, self.rope).row_bytes
        return 1.0 * self.q_len * blocks * self.topk * row

    def __str__(self) -> str:
        dims = f"{self.latent}+{self.rope}"
        kind = "" if self.kv == "bf16" else f" {self.kv}"
        return f"{self.q_len} x top-{self.topk} of {self.rows} h{self.heads} {dims}{kind}"


SHAPES = (
    Shape(128, 4096, 8192, 2048, bar=0.88),
    Shape(128, 4096, 65536, 2048, bar=0.84),
    Shape(64, 4096, 32768, 2048, bar=0.83),
    Shape(128, 4096, 8192, 512, bar=0.76),
    Shape(32, 4096, 8192, 2048, bar_gather=4.5),
    Shape(16, 4096, 8192, 2048, bar_gather=4.5),
    Shape(8, 4096, 8192, 2048, bar_gather=4.5),
    Shape(64, 4096, 8192, 2048),
    Shape(128, 4096, 8192, 2048, rope=0),
    Shape(128, 64, 8192, 2048),
)


@dataclass(frozen=True)
class Row:
    """One shape's figures. Times in milliseconds, rates in TFLOP/s."""

    shape: Shape
    timings: dict[str, GpuTiming]

    def __str__(self) -> str:
        return str(self.shape)

    @property
    def tflops(self) -> float:
        """openmla's rate, from the median."""
        return self.shape.flops / self.timings["openmla"].median * 1e-9

    @property
    def matmul(self) -> float:
        """The matmul's rate between openmla's calls."""
        return MATMUL_FLOPS / self.timings["matmul"].median * 1e-9

    def share(self, in_a_row: bool = False) -> float:
        """openmla's rate over the matmul's."""
        if not in_a_row:
            return self.tflops / self.matmul
        ours, theirs = self.timings["openmla"].back_to_back, self.timings["matmul"].back_to_back
        return self.shape.flops / ours / (MATMUL_FLOPS / theirs)

    @property
    def gather(self) -> float:
        """TB/s of rows."""
        return self.shape.gathered / self.timings["openmla"].median * 1e-9

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "shape": str(self.shape),
            **asdict(self.shape),
            "timings": {name: asdict(t) for name, t in self.timings.items()},
            "tflops": self.tflops,
            "matmul_tflops": self.matmul,
            "share": self.share(),
            "share_back_to_back": self.share(True),
            "gather_tb_per_s": self.gather,
        }

    def cells(self) -> tuple[str, ...]:
        """The line of a table."""
        shape = self.shape
        bar = f"{shape.bar:.2f}" if shape.bar else ""
        bar = f"{shape.bar_gather:.1f} TB/s" if shape.bar_gather else bar
        return (
            str(shape),
            f"{self.timings['openmla'].median:.3f}",
            f"{self.tflops:.0f}",
            f"{self.matmul:.0f}",
            f"{self.share():.3f}",
            f"{self.share(True):.3f}",
            f"{self.gather:.2f}",
            bar,
        )


class Inputs:
    """Random tensors of a shape; every index is valid."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        width = shape.latent + shape.rope
        make: dict[str, Any] = {
            "device": "cuda",
            "dtype": torch.bfloat16,
            "generator": generator,
        }
        self.shape = shape
        self.q = torch.randn(shape.q_len, shape.heads, width, **make)
        self.rows = torch.randn(shape.rows, width, **make)
        self.kv = self.rows if shape.kv == "bf16" else self._cache()
        self.indices = torch.randint(
            0,
            shape.rows,
            (shape.q_len, shape.topk),
            device="cuda",
            dtype=torch.int32,
            generator=generator,
        )
        self.out = torch.empty(
            shape.q_len, shape.heads, shape.latent, device="cuda", dtype=torch.bfloat16
        )

    def _cache(self) -> LatentCache:
        """The rows as the shape stores them; from now on they are what it holds."""
        shape = self.shape
        cache = LatentCache.allocate(
            num_pages=shape.rows // PAGE,
            page_size=PAGE,
            latent=shape.latent,
            rope=shape.rope,
            format=cast(FormatName, shape.kv),
            device="cuda",
        )
        slots = torch.arange(shape.rows, device="cuda")
        cache.append(self.rows[:, : shape.latent], self.rows[:, shape.latent :], slots)
        self.rows = cache.gather(slots)
        return cache

    def openmla(self) -> Tensor:
        """The public call."""
        width = self.shape.latent + self.shape.rope
        result = openmla.mla_prefill_sparse(
            self.q,
            self.kv,
            self.indices,
            scale=width**-0.5,
            d_v=self.shape.latent,
            out=self.out,
            backend="hopper",
        )
        assert isinstance(result, Tensor)
        return result

    def check(self) -> None:
        """A timing of something wrong is worth nothing: the first queries against fp32."""
        rows = slice(0, 8)
        kv = self.rows.float()[self.indices[rows].long()]
        scores = self.q[rows].float() @ kv.transpose(1, 2)
        scores *= kv.shape[2] ** -0.5
        expected = torch.softmax(scores, -1) @ kv[..., : self.shape.latent]
        error = float((self.openmla()[rows].float() - expected).norm() / expected.norm())
        if not error < 1e-2:
            raise ArithmeticError(f"openmla and fp32 differ by {error:.2g}")


def run_sparse(rounds: int, shapes: tuple[Shape, ...] = SHAPES) -> Iterator[Row]:
    """Time every shape, the matmul in between."""
    ceiling = matmul()
    for shape in shapes:
        inputs = Inputs(shape)
        inputs.check()
        yield Row(shape, race({"openmla": inputs.openmla, "matmul": ceiling}, rounds))


def report(rows: Iterable[Row]) -> Report:
    """One line per shape."""
    found = list(rows)
    return Report(
        "openmla bench sparse, shares of an 8192³ bf16 matmul timed in between",
        ("shape", "ms", "TFLOP/s", "matmul", "share", "in a row", "TB/s", "bar"),
        [row.cells() for row in found],
        {"rows": [row.to_json() for row in found]},
        {str(row): {"openmla": row.tflops, "8192³ matmul": row.matmul} for row in found},
    )
