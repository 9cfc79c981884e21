"""What the latent FP8 kernel is compiled for without a GPU."""

from __future__ import annotations

from dataclasses import replace

from openmla.kernels.call import Call
from openmla.kernels.jobs import Jobs, Predicted
from openmla.planning import Plan
from openmla.problem import Problem

_E4M3 = Problem(
    form="sparse",
    heads=128,
    d_nope=512,
    d_rope=64,
    d_v=512,
    total_q=4096,
    total_k=8192,
    topk=2048,
    q_dtype="e4m3",
    kv_dtype="e4m3",
    wants_lse=True,
)
_CACHE = replace(_E4M3, kv_dtype="fp8_token", page_size=64, has_q_scale=True)
PROBLEMS = {
    "512+64": _E4M3,
    "512+64 scales": replace(_E4M3, has_q_scale=True, has_k_scale=True),
    "512+64 sink lengths max logits": replace(
        _E4M3, has_sink=True, has_topk_lengths=True, wants_max_logits=True
    ),
    "512+0": replace(_E4M3, d_rope=0, rope="none"),
    "fp8_token": _CACHE,
    "fp8_token sequences": replace(_CACHE, form="latent", topk=0, has_sink=True),
}


# Bytes of the plan's room for the arguments of partitions that a call leaves, with either Triton.
UNUSED = dict(zip(PROBLEMS.values(), (112, 80, 64, 160, 80, 16), strict=True))


# Most bytes that Triton 3.8's code stores of the registers of the products' partitions: where the
# largest scores are wanted. The code of the versions before and after it keeps them all.
SPILLED_BY = {"3.8": 36}


def predicted(plan: Plan, call: Call) -> Predicted:
    """What partitions are given when they begin has its place in shared memory; how much depends on
    the arguments, so the plan has room for the most. Over pages, the producer stores nine registers
    or fewer at the ends of work items."""
    return Predicted(
        shared=plan.config.smem_used - UNUSED[plan.problem],
        registers=plan.config.registers.at_launch,
        spills=40 if plan.problem.form == "latent" else SPILLED_BY.get(plan.triton, 0),
    )


JOBS = Jobs(chip="h200", problems=PROBLEMS, predicted=predicted)
