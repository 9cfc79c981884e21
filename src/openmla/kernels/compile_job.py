"""From a kernel call to a compile job: the types of its arguments, as a launch would find them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from openmla.aot import NO_PLAN, CompileJob, Predicted, tensor_desc
from openmla.kernels.call import Call

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}
OPTIONS = ("num_warps", "num_ctas", "llvm_fn_attrs")


def compile_job_of(
    name: str, call: Call, vectors: Sequence[str], target: str, predicted: Predicted = NO_PLAN
) -> CompileJob:
    """The job that compiles a call. `vectors` may begin at any address, other tensors at 16 bytes.

    Arguments in lower case that are not None are the kernel's runtime arguments.
    """
    given = dict(call.arguments)
    options = {option: given.pop(option) for option in OPTIONS if option in given}
    tensors = {n: v for n, v in given.items() if n.islower() and v is not None}
    signature = {n: _type_of(v, n in vectors) for n, v in tensors.items()}
    constexprs = {n: v for n, v in given.items() if n not in signature}
    return CompileJob(name, call.kernel, signature, constexprs, target, options, predicted)


def _type_of(value: Any, any_alignment: bool) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}" + ("" if any_alignment else ":16")
    if hasattr(value, "block_shape"):
        return tensor_desc(_TYPES[value.base.dtype], value.block_shape, value.layout)
    return "fp32" if isinstance(value, float) else "i32"
