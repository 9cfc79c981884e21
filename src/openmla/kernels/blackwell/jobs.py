"""Compile jobs: every configuration of the dense Blackwell kernel, compiled without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from openmla.aot import CompileJob, Predicted, tensor_desc
from openmla.cache import LatentCache
from openmla.kernels.blackwell.dense import VECTORS
from openmla.kernels.blackwell.launch import calls
from openmla.kernels.call import Call
from openmla.operands import DenseOperands, Results, Weights
from openmla.plan import plan
from openmla.problem import Problem

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.float8_e4m3fn: "fp8e4nv",
}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
REGISTERS = 168  # at launch, of 12 warps; 128 of 16
# Bytes. In the softmax and correction groups, as `CompileReport.spilling` shows.
SPILLS = 96
_V3 = Problem(
    form="dense", heads=128, d_nope=128, d_rope=64, d_v=128, total_q=8192, total_k=8192,
    wants_lse=True,
)  # fmt: skip
_FP8 = replace(_V3, q_dtype="e4m3", kv_dtype="e4m3", v_dtype="e4m3")
_GLM = replace(_V3, heads=64, d_nope=192, d_v=256)


def _short(problem: Problem) -> Problem:
    return replace(problem, heads=16, total_q=64, total_k=64)


def _scaled(problem: Problem) -> Problem:
    return replace(problem, has_q_scale=True, has_k_scale=True)


def _cached(problem: Problem, page_size: int, rope_dtype: str = "bf16") -> Problem:
    return replace(problem, rope="cache", page_size=page_size, rope_dtype=rope_dtype)


# DeepSeek and Kimi: 128 + 64 -> 128 with 16 to 128 heads, GLM: 192 + 64 -> 256, Mistral: 64 + 64.
PROBLEMS = {
    "128+64→128 2Q": _V3,
    "128+64→128 2Q full sink": replace(_V3, causal=False, has_sink=True, wants_lse=False),
    "128+64→128 1Q": _short(_V3),
    "128+64→128 2Q fp16": replace(
        _V3, q_dtype="fp16", kv_dtype="fp16", v_dtype="fp16", rope_dtype="fp16"
    ),
    "128+64→128 2Q rope per head": replace(_V3, rope="per_head"),
    "128+64→128 2Q pages of 16": _cached(_V3, 16),
    "128+64→128 2Q pages of 64": _cached(_V3, 64),
    "128+64→128 2Q pages of 256": _cached(_V3, 256),
    "128+64→128 2Q fp8_block64 rope": _cached(_V3, 64, "fp8_block64"),
    "128+64→128 2Q fp8_block32 rope": _cached(_V3, 16, "fp8_block32"),
    "128+64→128 2Q fp8": replace(_FP8, rope_dtype="e4m3"),
    "128+64→128 1Q fp8": _short(replace(_FP8, rope_dtype="e4m3")),
    "128+64→128 2Q fp8 bf16 rope": _cached(_FP8, 64),
    "128+64→128 1Q fp8 bf16 rope": _short(_FP8),
    "128+64→128 2Q fp8 bf16 rope scales": _scaled(_FP8),
    "128+64→128 1Q fp8 bf16 rope scales": _scaled(_short(_cached(_FP8, 128))),
    "192+64→256": _GLM,
    "192+64→256 pages of 64": _cached(_GLM, 64),
    "192+64→256 fp8": replace(_FP8, d_nope=192, d_v=256, rope_dtype="e4m3"),
    "192+64→256 fp8_block64 rope": _cached(_GLM, 64, "fp8_block64"),
    "64+64→128 2Q": replace(_V3, d_nope=64),
    "128+64→64 2Q": replace(_V3, d_v=64),
}


def COMPILE_JOBS() -> list[CompileJob]:
    """One job per problem."""
    jobs: list[CompileJob] = []
    for name, problem in PROBLEMS.items():
        chosen = plan(problem, "b200", "blackwell")
        jobs += [_job(name, call) for call in calls(chosen, *_stand_ins(problem))]
    return jobs


def _stand_ins(problem: Problem) -> tuple[DenseOperands, Results]:
    """Operands of the problem's shape, all rows of a tensor in one place: nobody reads them."""
    heads, dtype = problem.heads, _DTYPES[problem.q_dtype]
    total_q, total_k = problem.total_q, problem.total_k

    def rows(count: int, *shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(1, *shape, dtype=of).expand(count, *shape)

    cache = table = rope = None
    if problem.rope == "cache":
        cache = LatentCache.allocate(
            num_pages=1, page_size=problem.page_size, format=problem.rope_dtype
        )
        table = torch.zeros(1, 1, dtype=torch.int32)
    else:
        per_head = (heads,) if problem.rope == "per_head" else ()
        rope = rows(total_k, *per_head, problem.d_rope, of=_DTYPES[problem.rope_dtype])
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (total_q, total_k))
    weights = Weights(
        problem.d_qk**-0.5,
        torch.zeros(heads) if problem.has_sink else None,
        torch.zeros(total_q) if problem.has_q_scale else None,
        torch.zeros(total_k) if problem.has_k_scale else None,
    )
    operands = DenseOperands(
        rows(total_q, heads, problem.d_qk), rows(total_k, heads, problem.d_nope), rope,
        rows(total_k, heads, problem.d_v), cu_q, cu_k, problem.causal, weights, cache, table,
    )  # fmt: skip
    lse = torch.zeros(total_q, heads) if problem.wants_lse else None
    out = rows(total_q, heads, problem.d_v, of=_DTYPES[problem.out_dtype])
    return operands, Results(out, lse)


def _job(name: str, call: Call) -> CompileJob:
    given = dict(call.arguments)
    options = {"num_warps": given.pop("num_warps")}
    tensors = {n: v for n, v in given.items() if n.islower() and v is not None}
    signature = {n: _type_of(v, n in VECTORS) for n, v in tensors.items()}
    constexprs = {n: v for n, v in given.items() if n not in signature}
    predicted = Predicted(tmem=given["TMEM_COLUMNS"], registers=REGISTERS, spills=SPILLS)
    return CompileJob(
        f"blackwell dense {name}", call.kernel, signature, constexprs, "sm100", options, predicted
    )


def _type_of(value: Any, any_alignment: bool) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}" + ("" if any_alignment else ":16")
    if hasattr(value, "block_shape"):
        return tensor_desc(_TYPES[value.base.dtype], value.block_shape, value.layout)
    return "fp32" if isinstance(value, float) else "i32"
