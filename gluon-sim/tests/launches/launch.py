"""A launch of a test kernel: its arguments and the result that is expected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import gluon_sim as sim
from compiling import compiled


@dataclass
class Launch:
    """One launch. `module` may be replaced by a mutated copy of the kernel file."""

    module: ModuleType
    kernel: str
    target: str
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    check: Callable[[], None]
    kwargs: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    compiles: bool = True  # with the Triton at hand

    def run(self, seed: int = 0, schedule: str = "random", **options: Any) -> sim.Report:
        kernel = getattr(self.module, self.kernel)
        given = {"outputs": self.outputs, **options}
        return sim.simulate(
            kernel, self.grid, self.args, self.kwargs, seed=seed, schedule=schedule, **given
        )

    def compile(self) -> Any:
        """What Triton makes of the kernel with these arguments: their types, and the constexprs."""
        kernel = getattr(self.module, self.kernel)
        options = {k: v for k, v in self.kwargs.items() if k in ("num_warps", "num_ctas")}
        constexprs = {k: v for k, v in self.kwargs.items() if k not in options}
        names = [n for n in kernel.arg_names if n not in constexprs]
        types = {n: _type_of(v) for n, v in zip(names, self.args, strict=True)}
        return compiled(kernel, types, constexprs, self.target, **options)


_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int16: "i16",
    torch.int32: "i32",
}


def _type_of(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return f"*{_NAMES[x.dtype]}"
    if hasattr(x, "block_shape"):
        return f"tensordesc<{_NAMES[x.base.dtype]}{list(x.block_shape)},{x.layout!r}>"
    return "fp32" if isinstance(x, float) else "i32"


def shared_layout(bits: int, swizzle: int = 128, **cluster: Any) -> Any:
    return gl.NVMMASharedLayout(
        swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2, **cluster
    )


def descriptor(tensor: torch.Tensor, block: list[int], layout: Any = None) -> Any:
    layout = layout or shared_layout(8 * tensor.element_size())
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def softmax_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """No mask, float64."""
    return torch.softmax(q.double() @ k.double().T * scale, -1) @ v.double()


def unwritten(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan")).to(dtype)
