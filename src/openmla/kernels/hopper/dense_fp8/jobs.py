"""What the dense FP8 kernel is compiled for without a GPU."""

from __future__ import annotations

from dataclasses import replace

from openmla.kernels.call import Call
from openmla.kernels.jobs import Jobs, Predicted, block_memory
from openmla.planning import Plan
from openmla.problem import Problem

_MIXED = Problem(
    form="dense", heads=128, d_nope=128, d_rope=64, d_v=128, total_q=4096, total_k=4096,
    q_dtype="e4m3", kv_dtype="e4m3", rope_dtype="e4m3", wants_lse=True,
)  # fmt: skip
_FP8 = replace(_MIXED, v_dtype="e4m3")


def _scaled(problem: Problem) -> Problem:
    return replace(problem, has_q_scale=True, has_k_scale=True)


_BOTH: dict[str, Problem] = {"v bf16": _MIXED, "v e4m3": _FP8}
PROBLEMS = {
    **{f"128+64→128 {v}": problem for v, problem in _BOTH.items()},
    **{f"128+64→128 {v} scales": _scaled(problem) for v, problem in _BOTH.items()},
    **{
        f"128+64→128 {v} rope bf16 scales": _scaled(replace(problem, rope_dtype="bf16"))
        for v, problem in _BOTH.items()
    },
    **{
        f"192+64→{d_v} {v} scales": _scaled(replace(_BOTH[v], d_nope=192, d_v=d_v))
        for v, d_v in (("v bf16", 256), ("v e4m3", 128))
    },
    **{
        f"128+64→128 {v} 1Q split": replace(problem, heads=16, total_q=64, total_k=131072)
        for v, problem in _BOTH.items()
    },
    "128+64→128 v fp16 full sink": replace(
        _MIXED, v_dtype="fp16", causal=False, has_sink=True, wants_lse=False
    ),
    "128+64→128 v bf16 pages of 64": replace(_MIXED, rope="cache", rope_dtype="bf16", page_size=64),
    "64+32→64 v e4m3": replace(_FP8, d_nope=64, d_rope=32, d_v=64),
    "256+0→256 v bf16": replace(_MIXED, d_nope=256, d_rope=0, d_v=256, rope="none"),
}


def predicted(plan: Plan, call: Call) -> Predicted:
    """With Triton 3.9 a few registers that live as long as a work item are stored, none inside its
    loops."""
    return replace(block_memory(plan, call), spills=48)


JOBS = Jobs(chip="h200", problems=PROBLEMS, predicted=predicted)
