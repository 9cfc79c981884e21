"""`openmla bench dense`: dense prefill on a GPU against cuDNN, interleaved in one run.

Two ratios per shape, both of medians:

    kernel   cuDNN's K is assembled beforehand ([b, h, s, d_qk], contiguous) and not timed
    layer    from k_nope, k_rope and v, as an MLA layer has them: cuDNN also pays for assembling K

and torch's 8192^3 bf16 matmul in the same run, as the chip's ceiling that day.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import openmla
from openmla.lab.bench.gpu_timing import MATMUL_FLOPS, GpuTiming, matmul, race
from openmla.lab.bench.report import Report

NAMES = {"openmla": "openmla", "cudnn": "cuDNN", "cudnn layer": "cuDNN + assembling K"}


@dataclass(frozen=True)
class Shape:
    """`batch` requests of q_len queries and k_len keys."""

    heads: int
    q_len: int
    k_len: int
    batch: int = 1
    causal: bool = True
    d_nope: int = 128
    d_rope: int = 64
    d_v: int = 128
    bar_kernel: float = 0.0
    """Least ratio over cuDNN that a release must reach; 0: none is set."""
    bar_layer: float = 0.0

    @property
    def flops(self) -> float:
        """Floating-point operations of the products; a causal square counts half."""
        pairs = self.q_len * self.k_len
        if self.causal:
            pairs -= self.q_len * (self.q_len - 1) // 2
        return 2.0 * self.batch * self.heads * pairs * (self.d_nope + self.d_rope + self.d_v)

    def __str__(self) -> str:
        lengths = f"{self.batch}x{self.q_len}"
        if self.k_len != self.q_len:
            lengths += f" on {self.k_len}"
        mask = "causal" if self.causal else "full"
        dims = f"{self.d_nope}+{self.d_rope}→{self.d_v}"
        return f"{mask} {lengths} h{self.heads} {dims}"


CHUNKS = (
    Shape(128, 4096, 4096, bar_kernel=1.23, bar_layer=1.29),
    Shape(128, 8192, 8192, bar_kernel=1.20, bar_layer=1.26),
    Shape(128, 16384, 16384, bar_kernel=1.23, bar_layer=1.29),
    Shape(16, 8192, 8192, bar_kernel=1.25, bar_layer=1.27),
    Shape(16, 16384, 16384, bar_kernel=1.24, bar_layer=1.27),
    Shape(128, 4096, 4096, batch=4, bar_kernel=1.23, bar_layer=1.28),
    Shape(128, 8192, 8192, causal=False, bar_kernel=1.14, bar_layer=1.19),
    Shape(64, 4096, 4096, d_nope=192, d_v=256, bar_kernel=1.0),
    Shape(64, 4096, 4096, d_nope=256, d_rope=0, d_v=256, bar_kernel=1.0),
    Shape(32, 8192, 8192, d_rope=0),
)
SHORT = (
    Shape(128, 128, 128, bar_kernel=1.0),
    Shape(128, 512, 512, batch=4, bar_kernel=1.0),
    Shape(128, 512, 512, batch=8, bar_kernel=1.1),
    Shape(16, 512, 512, batch=8, bar_kernel=1.0),
    Shape(16, 64, 131072),
    Shape(16, 512, 32768),
    Shape(16, 1024, 16384),
)
SHAPES = (*CHUNKS, *SHORT)


@dataclass(frozen=True)
class Row:
    """One shape's figures. Times in milliseconds, rates in TFLOP/s."""

    shape: Shape
    timings: dict[str, GpuTiming]

    def __str__(self) -> str:
        return str(self.shape)

    def tflops(self, name: str) -> float:
        """From the median."""
        return self.shape.flops / self.timings[name].median * 1e-9

    def over(self, peer: str, in_a_row: bool = False) -> float:
        """How many times faster openmla is; 0 where the peer did not run."""
        if peer not in self.timings:
            return 0.0
        ours, theirs = self.timings["openmla"], self.timings[peer]
        return theirs.back_to_back / ours.back_to_back if in_a_row else theirs.median / ours.median

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "shape": str(self.shape),
            **asdict(self.shape),
            "timings": {name: asdict(t) for name, t in self.timings.items()},
            "tflops": {name: self.tflops(name) for name in self.timings},
            "kernel": self.over("cudnn"),
            "layer": self.over("cudnn layer"),
            "kernel_back_to_back": self.over("cudnn", True),
            "layer_back_to_back": self.over("cudnn layer", True),
        }

    def cells(self) -> tuple[str, ...]:
        """The line of a table."""
        shape, peer = self.shape, "cudnn" in self.timings
        rates = [f"{self.tflops(n):.0f}" for n in ("openmla", *["cudnn"] * peer)]
        ratios = [f"{self.over(n):.3f}" for n in ("cudnn", "cudnn layer") if peer]
        bars = f"{shape.bar_kernel:.2f} / {shape.bar_layer:.2f}" if shape.bar_kernel else ""
        figures = (*rates, *ratios) if peer else (*rates, "–", "–", "–")
        return str(shape), f"{self.timings['openmla'].median:.3f}", *figures, bars


class Inputs:
    """Random tensors of a shape: ours ragged, cuDNN's copies [b, h, s, d]."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        generator = torch.Generator(device="cuda").manual_seed(seed)

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, device="cuda", dtype=torch.bfloat16, generator=generator)

        tokens_q, tokens_k = shape.batch * shape.q_len, shape.batch * shape.k_len
        self.shape = shape
        self.q = draw(tokens_q, shape.heads, shape.d_nope + shape.d_rope)
        self.k_nope = draw(tokens_k, shape.heads, shape.d_nope)
        self.k_rope = draw(tokens_k, shape.d_rope) if shape.d_rope else None
        self.v = draw(tokens_k, shape.heads, shape.d_v)
        self.cu_q = _offsets(shape.batch, shape.q_len)
        self.cu_k = _offsets(shape.batch, shape.k_len)
        self.out = torch.empty_like(self.v[:1]).expand(tokens_q, -1, -1).contiguous()
        self.peer_q, self.peer_v = self._peer(self.q), self._peer(self.v)
        self.peer_k = self.assemble()

    def _peer(self, x: Tensor) -> Tensor:
        return x.view(self.shape.batch, -1, *x.shape[1:]).transpose(1, 2).contiguous()

    def assemble(self) -> Tensor:
        """K of every head at full width, as cuDNN takes it."""
        shape = self.shape
        width = shape.d_nope + shape.d_rope
        k = torch.empty(
            shape.batch, shape.heads, shape.k_len, width, device="cuda", dtype=self.q.dtype
        )
        nope = self.k_nope.view(shape.batch, shape.k_len, shape.heads, -1)
        k[..., : shape.d_nope].copy_(nope.transpose(1, 2))
        if self.k_rope is not None:
            rope = self.k_rope.view(shape.batch, 1, shape.k_len, -1)
            k[..., shape.d_nope :].copy_(rope.expand(-1, shape.heads, -1, -1))
        return k

    def openmla(self) -> Tensor:
        """The public call."""
        # One tensor of offsets where queries and keys are the same tokens, as a model calls it.
        square = self.shape.q_len == self.shape.k_len
        result = openmla.mla_prefill(
            self.q,
            self.k_nope,
            self.k_rope,
            self.v,
            cu_seqlens_q=self.cu_q,
            cu_seqlens_k=None if square else self.cu_k,
            causal=self.shape.causal,
            out=self.out,
            backend="hopper",
        )
        assert isinstance(result, Tensor)
        return result

    def cudnn(self, k: Tensor | None = None) -> Tensor:
        """torch SDPA on cuDNN. Its causal mask is aligned top-left, so only square ones compare."""
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(
                self.peer_q,
                self.peer_k if k is None else k,
                self.peer_v,
                is_causal=self.shape.causal,
            )

    def cudnn_layer(self) -> Tensor:
        """torch SDPA on cuDNN with K assembled from k_nope and k_rope first, as a layer must."""
        return self.cudnn(self.assemble())


def _offsets(batch: int, length: int) -> Tensor:
    return torch.arange(0, (batch + 1) * length, length, device="cuda", dtype=torch.int32)


def run_dense(rounds: int, shapes: tuple[Shape, ...] = SHAPES) -> Iterator[Row]:
    """Time every shape; peers that cannot run it are left out."""
    for shape in shapes:
        inputs = Inputs(shape)
        contestants: dict[str, Callable[[], object]] = {"openmla": inputs.openmla}
        inputs.openmla()
        if shape.q_len == shape.k_len:
            contestants |= {"cudnn": inputs.cudnn, "cudnn layer": inputs.cudnn_layer}
            try:
                theirs = inputs.cudnn().transpose(1, 2).reshape(inputs.out.shape)
                _same(inputs.out, theirs)
            except RuntimeError:
                del contestants["cudnn"], contestants["cudnn layer"]
        yield Row(shape, race(contestants, rounds))


def _same(ours: Tensor, theirs: Tensor) -> None:
    """A timing of something wrong is worth nothing."""
    error = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
    if not error < 1e-2:
        raise ArithmeticError(f"openmla and cuDNN differ by {error:.2g}")


def matmul_tflops(rounds: int) -> float:
    """The 8192^3 bf16 product: what this chip gives today."""
    return MATMUL_FLOPS / race({"matmul": matmul()}, rounds)["matmul"].median * 1e-9


def report(rows: Iterable[Row], matmul: float) -> Report:
    """One line per shape, with the matmul's rate in the same run."""
    found = list(rows)
    return Report(
        f"openmla bench dense, matmul {matmul:.0f} TFLOP/s in the same run",
        ("shape", "ms", "TFLOP/s", "cuDNN", "kernel", "layer", "bars"),
        [row.cells() for row in found],
        {"matmul_tflops": matmul, "rows": [row.to_json() for row in found]},
        {
            str(row.shape): {NAMES[name]: row.tflops(name) for name in row.timings}
            | {"8192³ matmul": matmul}
            for row in found
        },
    )
