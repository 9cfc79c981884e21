"""Dense FP8 prefill on an H200: how accurate, and how fast beside bf16 in the same run.

    PYTHONPATH=src python benchmarks/device/hopper_dense_fp8_h200.py --out DIR [--section NAME ...]

| section | what |
|---|---|
| compile | every kernel that `speed` times, side by side; its error beside float64 |
| errors | of both against float64: random, peaky, outliers, flat; 8192 and 131072 keys |
| speed | ratios to our bf16 kernel on the unquantized numbers, and to matmuls of both types |

`mixed` has e4m3 q, k_nope, k_rope and bf16 v; `fp8` has e4m3 v too, with its upcast timed.
`… scales` has a scale per token of q and of the keys. The host is ahead of the device, so that none
of its time is in the figures.

All of these reach the chip's power limit, and its clock follows what ran for the last tenth of a
second. So `sustained` times each contestant after it has had the chip for SETTLE seconds, and says
at which clock and in how many cycles: ratios of cycles are those of a chip without that limit.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from sections import Section, run
from torch import Tensor

import openmla
from openmla.lab.bench.gpu_timing import race

E4M3, LARGEST = torch.float8_e4m3fn, 448.0
MATMUL = 8192
KERNELS = {"mixed": False, "fp8": True}
"""Whether V is e4m3."""
CONTESTANTS = {
    "mixed": ("mixed", False),
    "fp8": ("fp8", False),
    "mixed scales": ("mixed", True),
    "fp8 scales": ("fp8", True),
}
"""Kernel, whether tokens have scales."""
BARS = {
    (1, 8192, 128): {"mixed": 1.25, "fp8": 1.33},
    (1, 8192, 16): {"mixed": 1.2, "fp8": 1.2},
    (4, 4096, 128): {"mixed": 1.25, "fp8": 1.25},
    (1, 16384, 128): {"mixed": 1.25, "fp8": 1.33},
}
"""Sequences, length, heads: times as fast as bf16."""
SETTLE, SUSTAIN, PASSES = 0.08, 0.08, 2
"""Seconds, seconds, times in turn."""
SMS = 132
MOST_ERROR = 3e-3
"""Against float64 of the quantized inputs."""


@dataclass(frozen=True)
class Shape:
    """Causal sequences, of each the last `q_len` tokens of `k_len`."""

    q_len: int
    k_len: int
    heads: int
    values: str = "random"
    batch: int = 1

    @property
    def flops(self) -> float:
        pairs = self.q_len * self.k_len - self.q_len * (self.q_len - 1) // 2
        return 2.0 * self.batch * self.heads * pairs * 320

    def __str__(self) -> str:
        lengths = f"{self.batch} x {self.q_len} of {self.k_len}"
        return f"causal {lengths}, {self.heads} heads, {self.values}"


def quantized(x: Tensor, per_token: bool) -> tuple[Tensor, Tensor]:
    """e4m3 and the scale of each token, or of all."""
    dims = tuple(range(1, x.dim())) if per_token else tuple(range(x.dim()))
    scale = x.float().abs().amax(dims, keepdim=True) / LARGEST
    return (x.float() / scale).to(E4M3), scale.flatten()


class Inputs:
    """bf16 numbers and their e4m3, as a layer would call with them."""

    def __init__(self, shape: Shape) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device="cuda").bfloat16()

        self.shape, heads = shape, shape.heads
        queries, keys = shape.batch * shape.q_len, shape.batch * shape.k_len
        self.q, self.k = draw(queries, heads, 192), draw(keys, heads, 128)
        self.rope, self.v = draw(keys, 64), draw(keys, heads, 128)
        if shape.values == "peaky":
            self.q *= 4
        if shape.values == "flat":  # nearly equal weights, values of one sign: sums only grow
            self.q *= 0.125
            self.v = self.v.abs()
        if shape.values == "outliers":  # a few columns carry most of every score
            self.q[..., :4] *= 8
            self.k[..., :4] *= 8
        self.cu_q, self.cu_k = (
            torch.arange(shape.batch + 1, dtype=torch.int32, device="cuda") * n
            for n in (shape.q_len, shape.k_len)
        )
        self.out = torch.empty(queries, heads, 128, dtype=torch.bfloat16, device="cuda")

    def bf16(self) -> Callable[[], object]:
        return partial(
            openmla.mla_prefill,
            self.q,
            self.k,
            self.rope,
            self.v,
            cu_seqlens_q=self.cu_q,
            cu_seqlens_k=self.cu_k,
            out=torch.empty_like(self.out),
            backend="hopper",
        )

    def quantize(self) -> None:
        """What a layer does before a call with scales."""
        openmla.quantize(self.q)
        openmla.quantize(self.k, self.rope)

    def fp8(
        self, name: str, per_token: bool = False
    ) -> tuple[Callable[[], Tensor], Callable[[], list[Tensor]]]:
        """A call, and what gives its inputs as float64: q, k, rope, v."""
        q, q_scale = quantized(self.q, per_token)
        keys = torch.cat([self.k.flatten(1), self.rope], 1)
        _, k_scale = quantized(keys, per_token)
        by = k_scale[:, None] if per_token else k_scale
        k = (self.k.float() / by[..., None]).to(E4M3)
        rope = (self.rope.float() / by).to(E4M3)
        v = self.v.to(E4M3) if KERNELS[name] else self.v
        scale: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "scale": 192**-0.5}
        if not per_token:
            scale = {"scale": 192**-0.5 * float(q_scale) * float(k_scale)}
        call = partial(
            openmla.mla_prefill,
            q,
            k,
            rope,
            v,
            cu_seqlens_q=self.cu_q,
            cu_seqlens_k=self.cu_k,
            out=torch.empty_like(self.out),
            backend="hopper",
            **scale,
        )
        factors = ((q, q_scale[:, None, None]), (k, by[..., None]), (rope, by))
        return call, lambda: [*(x.double() * f.double() for x, f in factors), v.double()]


def exact(shape: Shape, inputs: list[Tensor], head: int, rows: slice) -> Tensor:
    """float64 attention of some rows of one head."""
    q, k, rope, v = inputs
    keys = torch.cat([k[:, head], rope], 1).double()
    scores = q[rows, head].double() @ keys.T * 192**-0.5
    first = torch.arange(shape.q_len, device="cuda")[rows] + shape.k_len - shape.q_len
    hidden = torch.arange(shape.k_len, device="cuda") > first[:, None]
    return scores.masked_fill_(hidden, -torch.inf).softmax(-1) @ v[:, head].double()


def relative(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth).norm() / truth.norm())


def errors(name: str, shape: Shape, per_token: bool) -> dict[str, Any]:
    inputs = Inputs(shape)
    call, used = inputs.fp8(name, per_token)
    out = call().clone()
    again = torch.equal(call(), out)
    given = [inputs.q, inputs.k, inputs.rope, inputs.v]
    found: dict[str, Any] = {
        "errors": str(shape),
        "kernel": name,
        "per_token": per_token,
        "same_bits": again,
    }
    # The last rows see all keys; the first few hundred few.
    for label, rows in (("last", slice(-512, None)), ("first", slice(0, 512))):
        truths = [exact(shape, x, shape.heads // 2, rows) for x in (used(), given)]
        got = out[rows, shape.heads // 2]
        found[label] = {
            "to_quantized": relative(got, truths[0]),
            "to_bf16": relative(got, truths[1]),
            "inputs_alone": relative(truths[0], truths[1]),
        }
        found["ok"] = found.get("ok", True) and found[label]["to_quantized"] <= MOST_ERROR
    return found


def all_errors(group: str, _: int) -> Iterator[dict[str, Any]]:
    name, _, kind = group.partition(" ")
    for q_len, k_len in ((2048, 8192), (512, 131072)):
        for values in ("random", "peaky", "outliers", "flat"):
            yield errors(name, Shape(q_len, k_len, 4, values), kind == "scales")


def compiled(group: str, _: int) -> Iterator[dict[str, Any]]:
    name, _, heads = group.rpartition(" ")
    shape = Shape(8192, 8192, int(heads))
    inputs = Inputs(shape)
    if name not in CONTESTANTS:
        inputs.bf16()()
        inputs.quantize()
        torch.cuda.synchronize()
        return
    call, used = inputs.fp8(*CONTESTANTS[name])
    out = call().clone()
    one = [x[:, 3:4] if x.dim() == 3 else x for x in used()]
    error = relative(out[-256:, 3], exact(replace(shape, heads=1), one, 0, slice(-256, None)))
    ok = error <= MOST_ERROR and torch.equal(call(), out)
    yield {"kernel": name, "heads": int(heads), "error": error, "ok": ok}


@triton.jit
def read_clocks(out_ptr):
    """Cycles and nanoseconds so far, by each multiprocessor."""
    sm = tl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
    cycles = tl.inline_asm_elementwise(
        "mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
    time = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
    tl.store(out_ptr + 2 * sm, cycles)
    tl.store(out_ptr + 2 * sm + 1, time)


def clocks() -> Tensor:
    """[multiprocessors, 2], after what was launched before; 0 where none answered."""
    found = torch.zeros(SMS, 2, dtype=torch.int64, device="cuda")
    read_clocks[(2 * SMS,)](found, num_warps=1)
    return found


def sustained(contestants: dict[str, Callable[[], object]], ms: dict[str, float]) -> dict[str, Any]:
    """Milliseconds and megacycles of a call and the clock, medians of PASSES, each contestant in
    turn at the clock that its own power allows. `ms`: of a call, about."""
    clocks()
    found: dict[str, list[tuple[float, float]]] = {n: [] for n in contestants}
    for name in [n for _ in range(PASSES) for n in contestants]:
        calls = [max(1, int(1e3 * seconds / ms[name])) for seconds in (SETTLE, SUSTAIN)]
        for _ in range(calls[0]):
            contestants[name]()
        before = clocks()
        for _ in range(calls[1]):
            contestants[name]()
        after = clocks()
        both = (before[:, 1] > 0) & (after[:, 1] > 0)
        cycles, nanoseconds = (after - before)[both].double().median(0).values.tolist()
        found[name].append((nanoseconds / calls[1] * 1e-6, cycles / calls[1] * 1e-6))
    medians = {n: [statistics.median(x) for x in zip(*f, strict=True)] for n, f in found.items()}
    return {n: {"ms": a, "megacycles": b, "mhz": 1e3 * b / a} for n, (a, b) in medians.items()}


def speed(_: str, rounds: int) -> Iterator[dict[str, Any]]:
    a, b = (torch.randn(MATMUL, MATMUL, device="cuda").bfloat16() for _ in range(2))
    torch.mm(a, b)  # cuBLAS takes its memory before the inputs do
    a8, b8, one = a.to(E4M3), b.to(E4M3).T, torch.ones((), device="cuda")
    for batch, length, heads in BARS:
        shape = Shape(length, length, heads, batch=batch)
        inputs = Inputs(shape)
        contestants: dict[str, Callable[[], object]] = {"bf16": inputs.bf16()}
        for name, which in CONTESTANTS.items():
            contestants[name] = inputs.fp8(*which)[0]
        contestants["quantize q, k"] = inputs.quantize
        contestants["matmul bf16"] = lambda: torch.mm(a, b)
        contestants["matmul e4m3"] = lambda: torch._scaled_mm(
            a8, b8, one, one, out_dtype=torch.bfloat16
        )
        times = race(contestants, rounds)
        ms = {n: t.median for n, t in times.items()}
        quantize = ms["quantize q, k"]  # V is the projection's, in bf16
        work = dict.fromkeys(("bf16", *CONTESTANTS), shape.flops)
        work |= dict.fromkeys(("matmul bf16", "matmul e4m3"), 2.0 * MATMUL**3)
        rates = {n: work[n] / ms[n] * 1e-9 for n in work}
        in_a_row = {n: work[n] / times[n].back_to_back * 1e-9 for n in work}
        steady = sustained({n: contestants[n] for n in work}, ms)
        yield {
            "shape": str(shape),
            "tflops": rates,
            "tflops_in_a_row": in_a_row,
            "ms": ms,
            "tflops_sustained": {n: work[n] / steady[n]["ms"] * 1e-9 for n in work},
            "sustained": steady,
            **{
                f"over_bf16_{what}": {n: steady["bf16"][of] / steady[n][of] for n in CONTESTANTS}
                for what, of in (("sustained", "ms"), ("in_cycles", "megacycles"))
            },
            "over_bf16": {n: rates[n] / rates["bf16"] for n in CONTESTANTS},
            "over_bf16_in_a_row": {n: in_a_row[n] / in_a_row["bf16"] for n in CONTESTANTS},
            "mixed_with_quantize_over_bf16": ms["bf16"] / (ms["mixed scales"] + quantize),
            "of_matmul": {n: rates[n] / rates["matmul e4m3"] for n in KERNELS},
            "bars": BARS[batch, length, heads],
        }


def line(result: dict[str, Any]) -> str:
    if "shape" not in result:
        return json.dumps(result)
    kinds = ("over_bf16", "over_bf16_sustained", "over_bf16_in_cycles")
    ratios = "  ".join(
        f"{n} {'/'.join(f'{result[kind][n]:.3f}' for kind in kinds)}" for n in CONTESTANTS
    )
    ratios += f"  with quantize {result['mixed_with_quantize_over_bf16']:.3f}"
    rates = "  ".join(f"{n} {x:.0f}" for n, x in result["tflops_sustained"].items())
    return (
        f"{result['shape']}: over bf16 cold/sustained/cycles {ratios} | TFLOP/s sustained {rates}"
    )


if __name__ == "__main__":
    EVERY = tuple(f"{name} {heads}" for name in ("bf16", *CONTESTANTS) for heads in (128, 16))
    both = ("mixed", "mixed scales", "fp8", "fp8 scales")
    run(
        __file__,
        {
            "compile": Section(compiled, 100, EVERY, side_by_side=True),
            "errors": Section(all_errors, 75, both, side_by_side=True),
            "speed": Section(speed, 75),
        },
        line,
    )
