"""Time the backward of dense attention on an H200, beside cuDNN's.

PYTHONPATH=src python benchmarks/device/backward_h200.py --out DIR [--section compile|times ...]

Widths of DeepSeek-V3, causal, bf16: keys of 128 columns a head and 64 that all heads share, values
of 128. "openmla" owns every output it writes: its gradients have the same bits every time. cuDNN's
kernel adds with atomics; torch runs it through scaled_dot_product_attention, over keys that are
concatenated before (not timed). "layer" is what a model does with cuDNN: concatenate the keys,
attend, split their gradient and sum it over heads. "deterministic" is torch where it may only use
deterministic algorithms. Every contestant is timed in turn, with caches flushed before it.
"wide" has the widths of GLM-5, keys of 192 + 64 columns and values of 256, beside the portable
kernels and what torch chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from sections import Section, run
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import openmla
from openmla.backward.operands import BackwardOperands, Gradients
from openmla.dispatch import device_target, plan_for
from openmla.kernels.call import Call
from openmla.kernels.hopper.backward import launch as hopper
from openmla.kernels.portable.backward import launch as portable
from openmla.operands import DenseOperands, Weights

NOPE, ROPE, VALUES = 128, 64, 128
SCALE = (NOPE + ROPE) ** -0.5
WIDE = 192, 64, 256
WIDE_SHAPES = {"1x4096 h64": (1, 4096, 64), "4x2048 h16": (4, 2048, 16)}
SHAPES = {
    "1x4096 h128": (1, 4096, 128),
    "1x8192 h128": (1, 8192, 128),
    "4x4096 h16": (4, 4096, 16),
    "1x8192 h16": (1, 8192, 16),
    "1x16384 h16": (1, 16384, 16),
}
# Five products of the keys' and values' widths, as everybody counts a backward: the two that a
# deterministic one repeats are not counted.
FLOPS = 2 * (3 * (NOPE + ROPE) + 2 * VALUES)
WIDE_FLOPS = 2 * (3 * 256 + 2 * 256)
LAUNCHES = {"hopper": hopper.calls, "portable": portable.calls}
FLUSHED = 256 << 20
PEERS = ("cudnn", "layer", "deterministic", "portable")
DETERMINISTIC = "1x4096 h128"


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def operands(
    batch: int, length: int, heads: int, widths: tuple[int, int, int] = (NOPE, ROPE, VALUES)
) -> tuple[DenseOperands, Tensor]:
    """A call, and the gradient of its output. K and V are parts of one projection."""
    nope, rope, values = widths
    torch.manual_seed(0)
    tokens = batch * length
    offsets = torch.arange(0, tokens + 1, length, device="cuda", dtype=torch.int32)
    kv = normal(tokens, heads, nope + values)
    q, k_rope = normal(tokens, heads, nope + rope), normal(tokens, rope)
    k, v = kv[..., :nope], kv[..., nope:]
    weights = Weights((nope + rope) ** -0.5, None)
    op = DenseOperands(q, k, k_rope, v, offsets, offsets, True, weights)
    return op, normal(tokens, heads, values)


def attend(op: DenseOperands) -> tuple[Tensor, Tensor]:
    return openmla.mla_prefill(
        op.q,
        op.k_nope,
        op.k_rope,
        op.v,
        cu_seqlens_q=op.cu_seqlens_q,
        scale=op.weights.scale,
        causal=True,
        return_lse=True,
    )


def launches(
    op: DenseOperands, d_out: Tensor, saved: tuple[Tensor, Tensor], backend: str
) -> tuple[list[Call], Gradients]:
    """The launches of a backward, and where they write."""
    backward = BackwardOperands(op, *saved, d_out)
    gradients = Gradients.allocate(op)
    plan = plan_for(backward.problem(), device_target(op.q.device), backend)
    return list(LAUNCHES[backend](plan, backward, gradients)), gradients


def compiled(backend: str, _: int) -> Iterator[dict[str, Any]]:
    op, d_out = operands(1, 256, 16)
    saved = attend(op)
    for call in launches(op, d_out, saved, backend)[0]:
        call.compile()
        yield {"compiled": call.kernel.__name__}


def expanded(op: DenseOperands, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V as scaled_dot_product_attention takes them: keys of 192 columns for every head."""
    heads = op.q.shape[1]
    k_rope = op.k_rope[:, None].expand(-1, heads, -1)
    tensors = op.q, torch.cat([op.k_nope, k_rope], -1), op.v
    return tuple(x.unflatten(0, (batch, -1)).transpose(1, 2) for x in tensors)


def sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend | None) -> Tensor:
    scale = q.shape[-1] ** -0.5
    with sdpa_kernel(backend) if backend else nullcontext():
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def cudnn(
    op: DenseOperands,
    d_out: Tensor,
    batch: int,
    backend: SDPBackend | None = SDPBackend.CUDNN_ATTENTION,
) -> Callable[[], tuple[Tensor, ...]]:
    """cuDNN's backward alone, or that of what torch chooses: gradients of Q, K and V of every
    head."""
    leaves = [x.detach().contiguous().requires_grad_() for x in expanded(op, batch)]
    out = sdpa(*leaves, backend)
    d_heads = d_out.unflatten(0, (batch, -1)).transpose(1, 2).contiguous()
    return lambda: torch.autograd.grad(out, leaves, d_heads, retain_graph=True)


def layer(
    op: DenseOperands, d_out: Tensor, batch: int, backend: SDPBackend | None
) -> Callable[[], tuple[Tensor, ...]]:
    """Backward of concatenation and attention: gradients of the tensors that a model has. The
    projection's gradient is one tensor, as with `Gradients`."""
    kv = torch.cat([op.k_nope, op.v], -1).requires_grad_()
    q, k_rope = (x.detach().requires_grad_() for x in (op.q, op.k_rope))
    parts = DenseOperands(
        q,
        kv[..., :NOPE],
        k_rope,
        kv[..., NOPE:],
        op.cu_seqlens_q,
        op.cu_seqlens_q,
        True,
        op.weights,
    )
    out = sdpa(*expanded(parts, batch), backend).transpose(1, 2).flatten(0, 1)
    return lambda: torch.autograd.grad(out, (q, kv, k_rope), d_out, retain_graph=True)


class Timer:
    """Milliseconds of a call, after a write that leaves nothing in L2."""

    def __init__(self) -> None:
        self.flushed = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")

    def __call__(self, function: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flushed.zero_()
        torch.cuda._sleep(1_500_000)  # the host enqueues everything before the first kernel runs
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)


def times(name: str, rounds: int) -> Iterator[dict[str, Any]]:
    batch, length, heads = SHAPES[name]
    op, d_out = operands(batch, length, heads)
    saved = attend(op)
    ours, gradients = launches(op, d_out, saved, "hopper")
    contestants: dict[str, Callable[[], object]] = {
        "openmla": lambda: [call.run() for call in ours],
        "cudnn": cudnn(op, d_out, batch),
        "layer": layer(op, d_out, batch, SDPBackend.CUDNN_ATTENTION),
        "forward": lambda: attend(op),
    }
    if name == DETERMINISTIC:
        torch.use_deterministic_algorithms(True)
        contestants["deterministic"] = layer(op, d_out, batch, None)
        torch.use_deterministic_algorithms(False)
        plain, _ = launches(op, d_out, saved, "portable")
        contestants["portable"] = lambda: [call.run() for call in plain]
    for function in contestants.values():
        function()
    contestants["openmla"]()
    theirs = contestants["layer"]()[0]
    far = (theirs.float() - gradients.q.float()).norm() / theirs.float().norm()
    timer = Timer()
    taken = {n: [] for n in contestants}
    for _ in range(rounds):
        for n, function in contestants.items():
            taken[n].append(timer(function))
    ms = {n: round(median(t), 4) for n, t in taken.items()}
    flops = FLOPS * heads * batch * length * (length + 1) // 2
    yield {
        "shape": name,
        "ms": ms,
        "fastest_ms": {n: round(min(t), 4) for n, t in taken.items()},
        "tflops": {n: round(flops / t / 1e9) for n, t in ms.items() if n != "forward"},
        "over": {
            n: round(t / ms["openmla"], 3) for n, t in ms.items() if n not in ("openmla", "forward")
        },
        "dq_from_cudnn": float(f"{float(far):.3g}"),
    }


def wide(name: str, rounds: int) -> Iterator[dict[str, Any]]:
    batch, length, heads = WIDE_SHAPES[name]
    op, d_out = operands(batch, length, heads, WIDE)
    saved = attend(op)
    ours, gradients = launches(op, d_out, saved, "hopper")
    plain, theirs = launches(op, d_out, saved, "portable")
    contestants: dict[str, Callable[[], object]] = {
        "openmla": lambda: [call.run() for call in ours],
        "portable": lambda: [call.run() for call in plain],
        "torch": cudnn(op, d_out, batch, None),
    }
    for function in contestants.values():
        function()
    found = {n: x.clone() for n, x in gradients.tensors().items()}
    contestants["openmla"]()
    same = all(torch.equal(x, gradients.tensors()[n]) for n, x in found.items())
    far = {
        n: float(
            f"{float((x.float() - theirs.tensors()[n].float()).norm() / x.float().norm()):.3g}"
        )
        for n, x in found.items()
    }
    timer = Timer()
    taken = {n: [] for n in contestants}
    for _ in range(rounds):
        for n, function in contestants.items():
            taken[n].append(timer(function))
    ms = {n: round(median(t), 4) for n, t in taken.items()}
    flops = WIDE_FLOPS * heads * batch * length * (length + 1) // 2
    yield {
        "shape": name,
        "ms": ms,
        "fastest_ms": {n: round(min(t), 4) for n, t in taken.items()},
        "tflops": {n: round(flops / t / 1e9) for n, t in ms.items()},
        "over": {n: round(t / ms["openmla"], 3) for n, t in ms.items() if n != "openmla"},
        "stages_ms": [
            [call.kernel.__name__, round(min(timer(call.run) for _ in range(3)), 3)]
            for call in ours
        ],
        "same_bits": same,
        "from_portable": far,
    }


def line(result: dict[str, Any]) -> str:
    if "compiled" in result:
        return f"compiled {result['compiled']}"
    if "same_bits" in result:
        return "  ".join(f"{name}: {value}" for name, value in result.items())
    ratios = f"over the others {result['over']}, dq differs by {result['dq_from_cudnn']}"
    return f"{result['shape']:12} {result['tflops']} TFLOP/s, {ratios}"


if __name__ == "__main__":
    sections = {
        "compile": Section(compiled, 120, tuple(LAUNCHES), side_by_side=True),
        "times": Section(times, 90, tuple(SHAPES)),
        "wide": Section(wide, 90, tuple(WIDE_SHAPES)),
    }
    run(__file__, sections, line)
