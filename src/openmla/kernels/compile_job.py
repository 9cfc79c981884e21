"""From a kernel call to a compile job: the types of its arguments, as a launch would find them.

`dense_stand_ins` are operands of a dense problem to make the call with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from openmla.aot.jobs import NO_PLAN, CompileJob, Predicted, tensor_desc
from openmla.cache import DTYPES, LatentCache
from openmla.kernels.call import Call
from openmla.operands import DenseOperands, Results, Weights
from openmla.problem import CACHE_FORMATS, Problem

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}
OPTIONS = ("num_warps", "num_ctas", "maxnreg", "llvm_fn_attrs")


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


def dense_stand_ins(problem: Problem) -> tuple[DenseOperands, Results]:
    """Operands of the problem's shape, all rows of a tensor in one place: nobody reads them."""
    heads, total_q, total_k = problem.heads, problem.total_q, problem.total_k

    def rows(count: int, *shape: int, dtype: str = problem.q_dtype) -> torch.Tensor:
        return torch.zeros(1, *shape, dtype=DTYPES[dtype]).expand(count, *shape)

    cache = table = rope = None
    if problem.rope == "cache":
        cached = problem.rope_dtype if problem.rope_dtype in CACHE_FORMATS else "bf16"
        cache = LatentCache.allocate(
            num_pages=1, page_size=problem.page_size, rope=problem.d_rope, format=cached
        )
        table = torch.zeros(1, 1, dtype=torch.int32)
    elif problem.rope != "none":
        per_head = (heads,) if problem.rope == "per_head" else ()
        rope = rows(total_k, *per_head, problem.d_rope, dtype=problem.rope_dtype)
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (total_q, total_k))
    weights = Weights(
        problem.d_qk**-0.5,
        torch.zeros(heads, dtype=torch.float32) if problem.has_sink else None,
        torch.zeros(total_q, dtype=torch.float32) if problem.has_q_scale else None,
        torch.zeros(total_k, dtype=torch.float32) if problem.has_k_scale else None,
    )
    mask = None
    if problem.has_key_mask:
        mask = torch.zeros(1, -(-total_k // 128) * 4, dtype=torch.int32).expand(total_q, -1)
    operands = DenseOperands(
        rows(total_q, heads, problem.d_qk), rows(total_k, heads, problem.d_nope), rope,
        rows(total_k, heads, problem.d_v, dtype=problem.v_dtype), cu_q, cu_k, problem.causal,
        weights, cache, table, key_mask=mask,
    )  # fmt: skip
    lse = torch.zeros(total_q, heads, dtype=torch.float32) if problem.wants_lse else None
    return operands, Results(rows(total_q, heads, problem.d_v, dtype=problem.out_dtype), lse)
