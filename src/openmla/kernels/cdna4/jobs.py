"""Compile jobs: every configuration of the CDNA4 kernels, for compilation without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from openmla.aot import CompileJob, Predicted
from openmla.cache import LatentCache
from openmla.kernels.call import Call
from openmla.kernels.cdna4.dense import VECTORS
from openmla.kernels.cdna4.launch import calls
from openmla.kernels.compat_gluon import RENAMED
from openmla.kernels.compile_job import compile_job_of
from openmla.operands import DenseOperands, Results, Weights
from openmla.plan import Plan, plan
from openmla.problem import Problem

#: 512 threads of a workgroup share the 512 registers of each SIMD's lanes two by two.
MOST_REGISTERS = 256
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
_V3 = Problem(
    form="dense", heads=128, d_nope=128, d_rope=64, d_v=128, total_q=4096, total_k=4096,
    wants_lse=True,
)  # fmt: skip
_FP8 = replace(_V3, q_dtype="e4m3", kv_dtype="e4m3", v_dtype="e4m3", rope_dtype="e4m3")
PROBLEMS: dict[str, tuple[Problem, dict[str, Any]]] = {
    "fp8 128+64→128": (_FP8, {}),
    "fp8 128+64→128 full sink": (replace(_FP8, causal=False, has_sink=True, wants_lse=False), {}),
    "fp8 128+64→128 P fp8": (_FP8, {"p_dtype": "float8_e4m3fn"}),
    "fp8 128+64→128 P fp8, default V": (
        _FP8,
        {"p_dtype": "float8_e4m3fn", "v_full_v227": False},
    ),
    "fp8 64+64→64": (replace(_FP8, d_nope=64, d_v=64), {}),
    "bf16 128+64→128": (_V3, {}),
    "bf16 128+64→128 full sink": (replace(_V3, causal=False, has_sink=True, wants_lse=False), {}),
    "bf16 128+64→128 pages of 64": (replace(_V3, rope="cache", page_size=64), {}),
    "fp16 128+64→128 rope per head": (
        replace(
            _V3, q_dtype="fp16", kv_dtype="fp16", v_dtype="fp16", rope_dtype="fp16", rope="per_head"
        ),
        {},
    ),
    "bf16 64+64→64": (replace(_V3, d_nope=64, d_v=64), {}),
}


def COMPILE_JOBS() -> list[CompileJob]:
    """One job per problem and kernel; none for a Triton that is too old (see openmla.dispatch)."""
    jobs: list[CompileJob] = []
    if not RENAMED:
        return jobs
    for name, (problem, config) in PROBLEMS.items():
        chosen = plan(problem, "mi355x", "cdna4")
        chosen = replace(chosen, config=replace(chosen.config, **config))
        jobs += [_job(name, chosen, call) for call in calls(chosen, *_stand_ins(problem))]
    return jobs


def _stand_ins(problem: Problem) -> tuple[DenseOperands, Results]:
    """Operands of the problem's shape, all rows of a tensor in one place: nobody reads them."""
    heads, total_q, total_k = problem.heads, problem.total_q, problem.total_k

    def rows(count: int, *shape: int, dtype: str = problem.q_dtype) -> torch.Tensor:
        return torch.zeros(1, *shape, dtype=_DTYPES[dtype]).expand(count, *shape)

    cache = table = rope = None
    if problem.rope == "cache":
        cache = LatentCache.allocate(num_pages=1, page_size=problem.page_size, rope=problem.d_rope)
        table = torch.zeros(1, 1, dtype=torch.int32)
    else:
        per_head = (heads,) if problem.rope == "per_head" else ()
        rope = rows(total_k, *per_head, problem.d_rope)
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (total_q, total_k))
    sink = torch.zeros(heads) if problem.has_sink else None
    operands = DenseOperands(
        rows(total_q, heads, problem.d_qk), rows(total_k, heads, problem.d_nope), rope,
        rows(total_k, heads, problem.d_v), cu_q, cu_k, problem.causal,
        Weights(problem.d_qk**-0.5, sink), cache, table,
    )  # fmt: skip
    lse = torch.zeros(total_q, heads) if problem.wants_lse else None
    return operands, Results(rows(total_q, heads, problem.d_v, dtype=problem.out_dtype), lse)


def _job(name: str, chosen: Plan, call: Call) -> CompileJob:
    predicted = Predicted(
        shared=chosen.config.launch_smem_used,
        registers=MOST_REGISTERS,
    )
    label = f"cdna4 {chosen.problem.form} {name}"
    return compile_job_of(label, call, VECTORS, "gfx950", predicted)
