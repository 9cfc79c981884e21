"""Compile jobs: every configuration of the sparse Blackwell kernel, compiled without a GPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from openmla.aot.jobs import CompileJob
from openmla.cache import DTYPES, LatentCache
from openmla.formats import V32
from openmla.kernels.blackwell.dense.jobs import predicted_by
from openmla.kernels.blackwell.sparse.kernel import VECTORS
from openmla.kernels.blackwell.sparse.launch import calls
from openmla.kernels.compile_job import compile_job_of
from openmla.kernels.gluon.compat import TRITON
from openmla.operands import Results, SparseOperands, Weights
from openmla.planning import TARGETS, cached_plan
from openmla.planning.blackwell.sparse.kernel import SparseKernel
from openmla.problem import Problem

_V32 = Problem(
    form="sparse", heads=128, d_nope=512, d_rope=64, d_v=512, topk=2048, total_q=4096,
    total_k=65536, has_topk_lengths=True, wants_lse=True,
)  # fmt: skip


def _cache(heads: int, kv_dtype: str) -> Problem:
    return replace(_V32, heads=heads, kv_dtype=kv_dtype)


# DeepSeek-V3.2: 128 heads, or 64, 16 and 8 of them per GPU; GLM-5: 64 heads.
PROBLEMS = {
    "128 heads": _V32,
    "64 heads sink": replace(_V32, heads=64, has_sink=True),
    "16 heads no lse": replace(_V32, heads=16, wants_lse=False, has_topk_lengths=False),
    "128 heads fp16": replace(
        _V32, q_dtype="fp16", kv_dtype="fp16", v_dtype="fp16", rope_dtype="fp16"
    ),
    "8 heads": replace(_V32, heads=8),
    "64 heads fp16": replace(
        _V32, heads=64, q_dtype="fp16", kv_dtype="fp16", v_dtype="fp16", rope_dtype="fp16"
    ),
    "64 heads uneven pages": replace(_V32, heads=64, page_size=64),
    f"128 heads {V32.name}": _cache(128, V32.name),
    "64 heads fp8_block32": _cache(64, "fp8_block32"),
    "64 heads fp8_block64": _cache(64, "fp8_block64"),
    "64 heads fp8_block128": _cache(64, "fp8_block128"),
    "16 heads fp8_token": _cache(16, "fp8_token"),
    "64 heads e4m3": _cache(64, "e4m3"),
}


# Addresses that every partition of a pair needs, stored once before the partitions part.
PAIR_SPILLS = 16


def COMPILE_JOBS() -> list[CompileJob]:
    """One job per problem."""
    jobs: list[CompileJob] = []
    for label, problem in PROBLEMS.items():
        chosen = cached_plan(problem, TARGETS["b200"], "blackwell", TRITON)
        for call in calls(chosen, *_stand_ins(problem)):
            spills = PAIR_SPILLS if "num_ctas" in call.arguments else 0
            predicted = predicted_by(SparseKernel(chosen.config, problem), spills)
            name = f"blackwell sparse {label}"
            jobs.append(compile_job_of(name, call, VECTORS, "sm100", predicted))
    return jobs


def _stand_ins(problem: Problem) -> tuple[SparseOperands, Results]:
    """Operands of the problem's shape, all rows of a tensor in one place: nobody reads them."""
    heads, dtype, tokens = problem.heads, DTYPES[problem.q_dtype], problem.total_q

    def rows(*shape: int) -> torch.Tensor:
        return torch.zeros(1, *shape[1:], dtype=dtype).expand(*shape)

    cache: LatentCache | torch.Tensor = torch.zeros(1, problem.d_qk, dtype=dtype)
    if problem.kv_dtype == "e4m3":
        cache = torch.zeros(1, problem.d_qk, dtype=torch.float32).to(torch.float8_e4m3fn)
    elif problem.page_size:
        pages = torch.zeros(1 << 17, dtype=dtype).as_strided((2, 64, 576), (1 << 16, 576, 1))
        cache = LatentCache(pages, None, problem.d_nope, problem.d_rope, problem.kv_dtype)
    elif problem.kv_dtype not in DTYPES:
        cache = LatentCache.allocate(num_pages=2, page_size=64, format=problem.kv_dtype)
    operands = SparseOperands(
        rows(tokens, heads, problem.d_qk),
        cache,
        torch.zeros(1, problem.topk, dtype=torch.int32).expand(tokens, -1),
        torch.zeros(tokens, dtype=torch.int32) if problem.has_topk_lengths else None,
        problem.d_v,
        Weights(0.1, torch.zeros(heads, dtype=torch.float32) if problem.has_sink else None),
    )
    lse = torch.zeros(tokens, heads, dtype=torch.float32) if problem.wants_lse else None
    return operands, Results(rows(tokens, heads, problem.d_v), lse)
