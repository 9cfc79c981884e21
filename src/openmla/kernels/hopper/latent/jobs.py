"""Compile jobs of the latent Hopper kernel, for compilation without a GPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from openmla.aot.jobs import CompileJob, Predicted
from openmla.cache import DTYPES, LatentCache
from openmla.kernels.compile_job import compile_job_of
from openmla.kernels.hopper.latent.kernel import VECTORS
from openmla.kernels.hopper.latent.launch import Operands, calls
from openmla.operands import LatentOperands, Results, SparseOperands, Weights
from openmla.planning import plan
from openmla.problem import Problem

_V32 = Problem(
    form="sparse", heads=128, d_nope=512, d_rope=64, d_v=512, total_q=4096, total_k=8192, topk=2048,
    wants_lse=True,
)  # fmt: skip
PROBLEMS = {
    "512+64": _V32,
    "512+64 fp16 sink lengths": replace(
        _V32, q_dtype="fp16", kv_dtype="fp16", v_dtype="fp16", has_sink=True, has_topk_lengths=True
    ),
    "512+64 pages with gaps, max logits": replace(_V32, page_size=64),
    "512+0": replace(_V32, d_rope=0, rope="none"),
    "256+64": replace(_V32, d_nope=256, d_v=256),
    "256+32": replace(_V32, d_nope=256, d_v=256, d_rope=32),
    "128+32": replace(_V32, d_nope=128, d_v=128, d_rope=32),
    "512+64 sequences": replace(
        _V32, form="latent", topk=0, page_size=64, batch=1, causal=True, has_sink=True
    ),
}


def COMPILE_JOBS() -> list[CompileJob]:
    """One job per problem."""
    return [_job(name, problem) for name, problem in PROBLEMS.items()]


def _job(name: str, problem: Problem) -> CompileJob:
    chosen = plan(problem, "h200", "hopper")
    call = next(calls(chosen, *_stand_ins(problem)))
    config = chosen.config
    predicted = Predicted(shared=config.smem_used, registers=config.registers.at_launch)
    return compile_job_of(f"hopper sparse {name}", call, VECTORS, "sm90", predicted)


def _stand_ins(problem: Problem) -> tuple[Operands, Results]:
    """Small operands: nobody reads them. Pages have gaps, and lists over them want max_logits."""
    heads, dtype, paged = problem.heads, DTYPES[problem.q_dtype], problem.page_size > 0
    q = torch.zeros(2, heads, problem.d_qk, dtype=dtype)
    out, lse = (
        torch.zeros(2, heads, problem.d_v, dtype=dtype),
        torch.zeros(2, heads, dtype=torch.float32),
    )
    weights = Weights(0.1, torch.zeros(heads, dtype=torch.float32) if problem.has_sink else None)
    pages = torch.zeros(2, 80, problem.d_qk, dtype=torch.bfloat16)[:, :64]
    cache = LatentCache(pages, None, problem.d_nope, problem.d_rope, "bf16") if paged else None
    listed = torch.zeros(2, 128, dtype=torch.int32)
    if cache is not None and problem.form == "latent":
        lengths = listed[0, :2]
        operands: Operands = LatentOperands(
            q, cache, listed[:1], lengths[:1], lengths, problem.causal, problem.d_v, weights
        )
        return operands, Results(out, lse)
    rows = torch.zeros(64, problem.d_qk, dtype=dtype) if cache is None else cache
    some = listed[:, 0].contiguous() if problem.has_topk_lengths else None
    operands = SparseOperands(q, rows, listed, some, problem.d_v, weights)
    return operands, Results(
        out, lse, torch.zeros(2, heads, dtype=torch.float32) if paged else None
    )
