"""Launches of the test kernels: arguments, the expected result, and what must be written."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from openmla import sim
from sim.kernels import hopper_dense as hopper_dense_kernels


@dataclass
class Launch:
    """One launch. `module` may be replaced by a mutated copy of the kernel file."""

    module: ModuleType
    kernel: str
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    check: Callable[[], None]
    kwargs: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()

    def run(self, seed: int = 0, schedule: str = "random", **options: Any) -> sim.Report:
        kernel = getattr(self.module, self.kernel)
        given = {"outputs": self.outputs, **options}
        return sim.simulate(
            kernel, self.grid, self.args, self.kwargs, seed=seed, schedule=schedule, **given
        )


def shared_layout(bits: int, swizzle: int = 128, **cluster: Any) -> Any:
    return gl.NVMMASharedLayout(
        swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2, **cluster
    )


def descriptor(tensor: torch.Tensor, block: list[int], layout: Any = None) -> Any:
    layout = layout or shared_layout(8 * tensor.element_size())
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def unwritten(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan")).to(dtype)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal, bottom-right aligned, float64; a row that sees nothing gives 0 and -inf."""
    scores = (q.double() @ k.double().T) * scale
    rows = torch.arange(len(q))[:, None] + len(k) - len(q)
    scores = scores.masked_fill(torch.arange(len(k))[None] > rows, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v.double(), lse


def hopper_dense(
    q_lens: list[int], k_lens: list[int], heads: int, seed: int = 0, grid: int = 2
) -> Launch:
    def cumulative(lens: list[int]) -> torch.Tensor:
        return torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)

    total_q, total_k = sum(q_lens), sum(k_lens)
    q, k = randn(total_q, heads * 192, seed=seed), randn(total_k, heads * 192, seed=seed + 1)
    v = randn(total_k, heads * 128, seed=seed + 2)
    o, lse = unwritten(total_q, heads * 128, dtype=torch.bfloat16), unwritten(heads, total_q)
    cu_q, cu_k = cumulative(q_lens), cumulative(k_lens)
    row_tiles = -(-max(q_lens) // 128)
    tiles, scale = row_tiles * heads * len(q_lens), 192**-0.5

    def check() -> None:
        for b, h in itertools.product(range(len(q_lens)), range(heads)):
            rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
            wide, narrow = slice(192 * h, 192 * h + 192), slice(128 * h, 128 * h + 128)
            out, sums = attention(q[rows, wide], k[keys, wide], v[keys, narrow], scale)
            torch.testing.assert_close(o[rows, narrow].double(), out, atol=2e-2, rtol=2e-2)
            torch.testing.assert_close(lse[h, rows].double(), sums, atol=1e-4, rtol=1e-5)

    descs = (descriptor(q, [64, 128]), descriptor(q, [64, 64]))
    descs += (descriptor(k, [64, 128]), descriptor(k, [64, 64]), descriptor(v, [64, 128]))
    sizes = (heads, row_tiles, tiles, total_q, scale * 1.4426950408889634)
    return Launch(
        hopper_dense_kernels,
        "dense",
        (grid,),
        (*descs, o, lse, cu_q, cu_k, *sizes),
        check,
        {"BN": 64, "ST": 2},
        ("o_ptr", "lse_ptr"),
    )
