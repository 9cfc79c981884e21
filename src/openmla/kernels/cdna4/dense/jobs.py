"""What the dense CDNA4 kernel is compiled for without a GPU."""

from dataclasses import replace
from typing import Any

from openmla.kernels.call import Call
from openmla.kernels.jobs import Jobs, Predicted, typed
from openmla.planning import Plan
from openmla.planning.cdna4 import LANE_REGISTERS
from openmla.problem import Problem

_V3 = Problem(
    form="dense", heads=128, d_nope=128, d_rope=64, d_v=128, total_q=4096, total_k=4096,
    wants_lse=True,
)  # fmt: skip
_FP8 = typed(_V3, "e4m3")
PROBLEMS = {
    "fp8 128+64→128": _FP8,
    "fp8 128+64→128 full sink": replace(_FP8, causal=False, has_sink=True, wants_lse=False),
    "fp8 128+64→128 P fp8": _FP8,
    "fp8 128+64→128 P fp8, default V": _FP8,
    "fp8 64+64→64": replace(_FP8, d_nope=64, d_v=64),
    "bf16 128+64→128": _V3,
    "bf16 128+64→128 full sink": replace(_V3, causal=False, has_sink=True, wants_lse=False),
    "bf16 128+64→128 pages of 64": replace(_V3, rope="cache", page_size=64),
    "fp16 128+64→128 rope per head": replace(typed(_V3, "fp16"), rope="per_head"),
    "bf16 64+64→64": replace(_V3, d_nope=64, d_v=64),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8 128+64→128 P fp8": {"p_dtype": "float8_e4m3fn"},
    "fp8 128+64→128 P fp8, default V": {"p_dtype": "float8_e4m3fn", "v_full_v227": False},
}


def predicted(plan: Plan, call: Call) -> Predicted:
    """All LDS of the plan, and no more registers than two waves can have."""
    return Predicted(shared=plan.config.launch_smem_used, registers=LANE_REGISTERS)


JOBS = Jobs(chip="mi355x", problems=PROBLEMS, predicted=predicted, configs=CONFIGS)
