"""Compile jobs of the latent Hopper kernel over FP8 caches, for compilation without a GPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from openmla.aot.jobs import CompileJob, Predicted
from openmla.cache import LatentCache
from openmla.formats import V32
from openmla.kernels.call import Call
from openmla.kernels.compile_job import compile_job_of
from openmla.kernels.hopper.latent.kernel import VECTORS, sparse_kernel
from openmla.kernels.hopper.latent.launch import Operands, calls
from openmla.operands import LatentOperands, Results, SparseOperands, Weights
from openmla.planning import Plan, plan
from openmla.problem import Problem

_V32 = Problem(
    form="sparse", heads=128, d_nope=512, d_rope=64, d_v=512, kv_dtype=V32.name,
    page_size=64, topk=2048, total_q=64, total_k=1_000_000, wants_lse=True,
)  # fmt: skip


SUMS_OF_WARPS = 16  # bytes that the four warps of a block count marked rows in
PROBLEMS = {
    V32.name: _V32,
    f"{V32.name} workspace": replace(_V32, total_q=4096),
    "fp8_block32": replace(_V32, kv_dtype="fp8_block32"),
    "fp8_token 512+0": replace(_V32, kv_dtype="fp8_token", d_rope=0, rope="none"),
    "fp8_block64 256+32 workspace": replace(
        _V32, kv_dtype="fp8_block64", d_nope=256, d_v=256, d_rope=32, total_q=4096, total_k=8192
    ),
    f"{V32.name} sequences": replace(_V32, form="latent", topk=0, total_q=1),
    "fp8_block128 128+32": replace(_V32, kv_dtype="fp8_block128", d_nope=128, d_v=128, d_rope=32),
}  # fmt: skip


def COMPILE_JOBS() -> list[CompileJob]:
    """One job per problem and kernel."""
    jobs: list[CompileJob] = []
    for name, problem in PROBLEMS.items():
        chosen = plan(problem, "h200", "hopper")
        for call in calls(chosen, *_stand_ins(problem)):
            jobs.append(_job(name, chosen, call))
    return jobs


def _job(name: str, chosen: Plan, call: Call) -> CompileJob:
    what = call.kernel.fn.__name__.removesuffix("_kernel")
    if call.kernel is not sparse_kernel:
        predicted = Predicted(shared=SUMS_OF_WARPS if what in ("count", "place") else 0)
        return compile_job_of(f"hopper {what} {name}", call, VECTORS, "sm90", predicted)
    dequantizes = call.arguments["SCALED"] > 0
    predicted = Predicted(
        shared=chosen.config.smem_used,
        registers=chosen.config.registers.at_launch,
    )
    return compile_job_of(
        f"hopper {what} {name}{', dequantizing' * dequantizes}", call, VECTORS, "sm90", predicted
    )


def _stand_ins(problem: Problem) -> tuple[Operands, Results]:
    """Small operands: nobody reads them."""
    heads, latent, rope = problem.heads, problem.d_nope, problem.d_rope
    cache = LatentCache.allocate(
        num_pages=2, page_size=problem.page_size, latent=latent, rope=rope, format=problem.kv_dtype
    )
    q = torch.zeros(2, heads, problem.d_qk, dtype=torch.bfloat16)
    lists, lengths = (torch.zeros(*shape, dtype=torch.int32) for shape in ((2, 128), (2,)))
    operands: Operands = SparseOperands(q, cache, lists, None, problem.d_v, Weights(0.1))
    if problem.form == "latent":
        operands = LatentOperands(
            q, cache, lists[:1], lengths[:1], lengths, problem.causal, problem.d_v, Weights(0.1)
        )
    out = torch.zeros(2, heads, problem.d_v, dtype=torch.bfloat16)
    return operands, Results(out, torch.zeros(2, heads, dtype=torch.float32))
