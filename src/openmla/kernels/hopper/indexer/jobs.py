"""Compile jobs: every configuration of the indexer on Hopper, for compilation without a GPU."""

from __future__ import annotations

import torch

from openmla.aot import CompileJob, Predicted
from openmla.indexer.cache import IndexCache
from openmla.indexer.operands import ScoresOperands, Windows
from openmla.indexer.problem import IndexProblem
from openmla.kernels.compile_job import compile_job_of
from openmla.kernels.hopper.indexer.launch import calls
from openmla.kernels.hopper.indexer.scores import VECTORS
from openmla.planning.indexer import index_plan

SCORES = {
    f"{heads} heads{f' pages of {page}' if page else ''}": IndexProblem(
        form="scores", heads=heads, page_size=page, total_q=16, width=4096
    )
    for heads in (32, 64, 128)
    for page in (0, 64)
}


def COMPILE_JOBS() -> list[CompileJob]:
    """One job per problem."""
    jobs = []
    for name, problem in SCORES.items():
        plan = index_plan(problem, "h200", "hopper")
        (call,) = calls(plan, *_stand_ins(problem))
        shared, registers = plan.config.smem_used, plan.config.registers.at_launch
        predicted = Predicted(shared=shared, registers=registers)
        jobs.append(
            compile_job_of(f"hopper indexer scores {name}", call, VECTORS, "sm90", predicted)
        )
    return jobs


def _stand_ins(problem: IndexProblem) -> tuple[ScoresOperands, torch.Tensor]:
    """Operands of the problem's kind: nobody reads them."""
    e4m3 = torch.float8_e4m3fn
    q = torch.zeros(problem.total_q, problem.heads, 128, dtype=e4m3)
    row = torch.zeros(problem.total_q, dtype=torch.int32)
    weights = torch.zeros(problem.total_q, problem.heads, dtype=torch.float32)
    out = torch.zeros(problem.total_q, problem.width, dtype=torch.float32)
    if not problem.page_size:
        keys = torch.zeros(problem.width, 128, dtype=e4m3), out[0]
        return ScoresOperands(q, weights, keys, Windows(row, row)), out
    cache = IndexCache.allocate(num_pages=1, page_size=problem.page_size)
    table = torch.zeros(1, problem.width // problem.page_size, dtype=torch.int32)
    windows = Windows(row, row, row, row[:1])
    return ScoresOperands(q, weights, cache, windows, table), out
