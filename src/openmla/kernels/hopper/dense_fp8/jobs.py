"""What the dense FP8 kernel is compiled for without a GPU."""

from __future__ import annotations

from dataclasses import replace

from openmla.kernels.call import Call
from openmla.kernels.hopper.dense_fp8.plan import HopperDenseFp8Config
from openmla.kernels.jobs import Jobs, Predicted, block_memory
from openmla.planning import Plan
from openmla.problem import Problem

_MIXED = Problem(
    form="dense",
    heads=128,
    d_nope=128,
    d_rope=64,
    d_v=128,
    total_q=4096,
    total_k=4096,
    q_dtype="e4m3",
    kv_dtype="e4m3",
    rope_dtype="e4m3",
    wants_lse=True,
)
_SCALED = replace(_MIXED, has_q_scale=True, has_k_scale=True)
PROBLEMS = {
    "128+64→128 v bf16": _MIXED,
    "128+64→128 v e4m3": replace(_MIXED, v_dtype="e4m3"),
    "128+64→128 v bf16 scales": _SCALED,
    "128+64→128 v bf16 rope bf16 scales": replace(_SCALED, rope_dtype="bf16"),
    "192+64→256 v bf16 scales": replace(_SCALED, d_nope=192, d_v=256),
    "128+64→128 v bf16 1Q split": replace(_MIXED, heads=16, total_q=64, total_k=131072),
    "128+64→128 v fp16 full sink": replace(
        _MIXED, v_dtype="fp16", causal=False, has_sink=True, wants_lse=False
    ),
    "128+64→128 v bf16 pages of 64": replace(_MIXED, rope="cache", rope_dtype="bf16", page_size=64),
    "64+32→64 v e4m3": replace(_MIXED, v_dtype="e4m3", d_nope=64, d_rope=32, d_v=64),
    "256+0→256 v bf16": replace(_MIXED, d_nope=256, d_rope=0, d_v=256, rope="none"),
}

ITEM_SPILLS = 48  # bytes


def predicted(plan: Plan, call: Call) -> Predicted:
    """The prediction for bf16; with scales of keys or a 16-bit rope, numbers of a work item are
    stored when it begins and loaded when it ends: 16 bytes of both with Triton 3.6, 44 with 3.9."""
    found, config = block_memory(plan, call), plan.config
    tight = isinstance(config, HopperDenseFp8Config) and (config.k_scaled or config.wide_rope)
    return replace(found, spills=ITEM_SPILLS) if tight else found


JOBS = Jobs(chip="h200", problems=PROBLEMS, predicted=predicted)
