"""Compile jobs: every configuration of the sparse CDNA4 kernel, for compilation without a GPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from openmla.aot.jobs import CompileJob, Predicted
from openmla.cache import DTYPES, LatentCache
from openmla.formats import V32
from openmla.kernels.cdna4.sparse.kernel import VECTORS
from openmla.kernels.cdna4.sparse.launch import calls
from openmla.kernels.compile_job import compile_job_of
from openmla.kernels.gluon.compat import RENAMED
from openmla.operands import Results, SparseOperands, Weights
from openmla.planning import plan
from openmla.planning.cdna4 import LANE_REGISTERS
from openmla.problem import Problem

_V32 = Problem(
    form="sparse", heads=128, d_nope=512, d_rope=64, d_v=512, topk=2048, total_q=4096,
    total_k=65536, wants_lse=True, has_sink=True, has_topk_lengths=True, page_size=64,
)  # fmt: skip
PROBLEMS = {
    "bf16 pages": _V32,
    "fp16 rows": replace(
        _V32, q_dtype="fp16", kv_dtype="fp16", v_dtype="fp16", rope_dtype="fp16", page_size=0
    ),
    "bf16 without rope, lse, sink": replace(
        _V32, d_rope=0, rope="none", page_size=0, wants_lse=False, has_sink=False
    ),
    f"{V32.name} pages": replace(_V32, kv_dtype=V32.name),
    "fp8_block64 pages": replace(_V32, kv_dtype="fp8_block64"),
    "e4m3 rows": replace(
        _V32, q_dtype="e4m3", kv_dtype="e4m3", v_dtype="e4m3", rope_dtype="e4m3", page_size=0
    ),
}


def COMPILE_JOBS() -> list[CompileJob]:
    """One job per problem; none for a Triton that is too old (see openmla.dispatch)."""
    jobs: list[CompileJob] = []
    if not RENAMED:
        return jobs
    for name, problem in PROBLEMS.items():
        chosen = plan(problem, "mi355x", "cdna4")
        predicted = Predicted(shared=chosen.config.launch_smem_used, registers=LANE_REGISTERS)
        for call in calls(chosen, *_stand_ins(problem)):
            label = f"cdna4 sparse {name}"
            jobs.append(compile_job_of(label, call, VECTORS, "gfx950", predicted))
    return jobs


def _stand_ins(problem: Problem) -> tuple[SparseOperands, Results]:
    """Operands of the problem's shape, all rows of a tensor in one place: nobody reads them."""
    heads, total_q = problem.heads, problem.total_q

    def rows(count: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(1, *shape, dtype=dtype).expand(count, *shape)

    cache: LatentCache | torch.Tensor
    if problem.page_size:
        cache = LatentCache.allocate(
            num_pages=2, page_size=problem.page_size, latent=problem.d_nope, rope=problem.d_rope,
            format=problem.kv_dtype,
        )  # fmt: skip
    else:
        cache = rows(problem.total_k, problem.d_qk, dtype=DTYPES[problem.kv_dtype])
    operands = SparseOperands(
        rows(total_q, heads, problem.d_qk, dtype=DTYPES[problem.q_dtype]),
        cache,
        rows(total_q, problem.topk, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        problem.d_v,
        Weights(192**-0.5, torch.zeros(heads, dtype=torch.float32) if problem.has_sink else None),
    )
    out = rows(total_q, heads, problem.d_v, dtype=DTYPES[problem.out_dtype])
    lse = (
        torch.zeros(1, heads, dtype=torch.float32).expand(total_q, heads)
        if problem.wants_lse
        else None
    )
    return operands, Results(out, lse)
