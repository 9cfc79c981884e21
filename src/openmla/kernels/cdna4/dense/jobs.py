"""Compile jobs: every configuration of the CDNA4 kernels, for compilation without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from openmla.aot.jobs import CompileJob, Predicted
from openmla.kernels.call import Call
from openmla.kernels.cdna4.dense.kernel import VECTORS
from openmla.kernels.cdna4.dense.launch import calls
from openmla.kernels.compile_job import compile_job_of, dense_stand_ins
from openmla.kernels.gluon.compat import RENAMED
from openmla.planning import Plan, plan
from openmla.planning.cdna4 import LANE_REGISTERS
from openmla.problem import Problem

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
        jobs += [_job(name, chosen, call) for call in calls(chosen, *dense_stand_ins(problem))]
    return jobs


def _job(name: str, chosen: Plan, call: Call) -> CompileJob:
    predicted = Predicted(
        shared=chosen.config.launch_smem_used,
        registers=LANE_REGISTERS,
    )
    label = f"cdna4 {chosen.problem.form} {name}"
    return compile_job_of(label, call, VECTORS, "gfx950", predicted)
