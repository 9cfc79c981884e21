"""Compile jobs of the latent Hopper kernel, for compilation without a GPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from openmla.aot import CompileJob, Predicted
from openmla.kernels.hopper.jobs import job_of
from openmla.kernels.hopper.sparse import VECTORS
from openmla.kernels.hopper.sparse_launch import calls
from openmla.operands import Results, SparseOperands, Weights
from openmla.plan import plan
from openmla.problem import Problem

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_V32 = Problem(
    form="sparse", heads=128, d_nope=512, d_rope=64, d_v=512, total_q=4096, total_k=8192, topk=2048,
    wants_lse=True,
)  # fmt: skip
PROBLEMS = {
    "512+64": _V32,
    "512+64 sink lengths": replace(_V32, has_sink=True, has_topk_lengths=True),
    "512+64 fp16": replace(_V32, q_dtype="fp16", kv_dtype="fp16", v_dtype="fp16"),
    "512+0": replace(_V32, d_rope=0, rope="none"),
    "256+64": replace(_V32, d_nope=256, d_v=256),
    "256+32": replace(_V32, d_nope=256, d_v=256, d_rope=32),
    "128+32": replace(_V32, d_nope=128, d_v=128, d_rope=32),
}
PAGED = {"512+64 max logits, pages with gaps": _V32}


def COMPILE_JOBS() -> list[CompileJob]:
    """One job per problem."""
    return [
        *(_job(name, problem, gaps=False) for name, problem in PROBLEMS.items()),
        *(_job(name, problem, gaps=True) for name, problem in PAGED.items()),
    ]


def _job(name: str, problem: Problem, gaps: bool) -> CompileJob:
    chosen = plan(problem, "h200", "hopper")
    call = next(calls(chosen, *_stand_ins(problem, gaps)))
    config = chosen.config
    predicted = Predicted(shared=config.smem_used, registers=config.registers.at_launch)
    return job_of(f"hopper sparse {name}", call, VECTORS, predicted)


def _stand_ins(problem: Problem, gaps: bool) -> tuple[SparseOperands, Results]:
    """Small operands: nobody reads them. `gaps`: between pages; with the largest scores."""
    heads, dtype = problem.heads, _DTYPES[problem.q_dtype]
    q = torch.zeros(2, heads, problem.d_qk, dtype=dtype)
    rows: torch.Tensor = torch.zeros(64, problem.d_qk, dtype=dtype)
    if gaps:
        rows = torch.zeros(2, 80, problem.d_qk, dtype=dtype)[:, :64]
    indices = torch.zeros(2, 128, dtype=torch.int32)
    lengths = torch.zeros(2, dtype=torch.int32) if problem.has_topk_lengths else None
    weights = Weights(0.1, torch.zeros(heads) if problem.has_sink else None)
    logits = torch.zeros(2, heads) if gaps else None
    operands = SparseOperands(q, rows, indices, lengths, problem.d_v, weights)
    out = torch.zeros(2, heads, problem.d_v, dtype=dtype)
    return operands, Results(out, torch.zeros(2, heads), logits)
