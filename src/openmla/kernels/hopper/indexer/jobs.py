"""Compile jobs: every configuration of the indexer on Hopper, for compilation without a GPU."""

from __future__ import annotations

import torch

from openmla.aot.jobs import CompileJob, Predicted
from openmla.indexer.cache import IndexCache
from openmla.indexer.operands import ScoresOperands, SelectOperands, SelectResults, Windows
from openmla.indexer.problem import IndexProblem
from openmla.kernels.compile_job import compile_job_of
from openmla.kernels.hopper.indexer.launch import calls
from openmla.kernels.hopper.indexer.scores import VECTORS
from openmla.kernels.hopper.indexer.select import VECTORS as SELECT_VECTORS
from openmla.planning.indexer import index_plan

SCORES = {
    f"{heads} heads{f' pages of {page}' if page else ''}": IndexProblem(
        form="scores", heads=heads, page_size=page, total_q=16, width=4096
    )
    for heads in (32, 64, 128)
    for page in (0, 64)
}


SELECT = {
    "short rows": IndexProblem(form="select", topk=2048, total_q=16, width=8192),
    "long rows": IndexProblem(form="select", topk=2048, total_q=16, width=131072),
    "long rows, pages, counts, mask": IndexProblem(
        form="select", topk=2048, page_size=64, wants_counts=True, wants_mask=True, total_q=16,
        width=131072,
    ),
}  # fmt: skip


def COMPILE_JOBS() -> list[CompileJob]:
    """One job per problem."""
    jobs = [_select_job(name, problem) for name, problem in SELECT.items()]
    for name, problem in SCORES.items():
        plan = index_plan(problem, "h200", "hopper")
        (call,) = calls(plan, *_stand_ins(problem))
        shared, registers = plan.config.smem_used, plan.config.registers.at_launch
        predicted = Predicted(shared=shared, registers=registers)
        jobs.append(
            compile_job_of(f"hopper indexer scores {name}", call, VECTORS, "sm90", predicted)
        )
    return jobs


def _select_job(name: str, problem: IndexProblem) -> CompileJob:
    plan = index_plan(problem, "h200", "hopper")
    rows, width = problem.total_q, problem.width
    row = torch.zeros(rows, dtype=torch.int32)
    scores = torch.zeros(1, width, dtype=torch.float32).expand(rows, width)
    out = torch.zeros(rows, problem.topk, dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32) if problem.page_size else None
    windows = Windows(row, row, row)
    operands = SelectOperands(scores, problem.topk, windows, table, problem.page_size)
    counts = row if problem.wants_counts else None
    mask = torch.zeros(rows, width // 32, dtype=torch.int32) if problem.wants_mask else None
    (call,) = calls(plan, operands, SelectResults(out, counts, mask))
    shared, registers = plan.config.smem_used, plan.config.max_registers
    predicted = Predicted(shared=shared, registers=registers, spills=None)
    return compile_job_of(f"hopper indexer select {name}", call, SELECT_VECTORS, "sm90", predicted)


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
