"""What the dense CDNA4 kernel is compiled for without a GPU."""

from dataclasses import replace
from typing import Any

from openmla.kernels.call import Call
from openmla.kernels.cdna4.chip import LANE_REGISTERS
from openmla.kernels.jobs import Jobs, Predicted, typed
from openmla.kernels.triton_version import TRITON
from openmla.planning import Plan
from openmla.problem import Problem

_V3 = Problem(
    form="dense",
    heads=128,
    d_nope=128,
    d_rope=64,
    d_v=128,
    total_q=4096,
    total_k=4096,
    wants_lse=True,
)
_FP8 = typed(_V3, "e4m3")
_GLM5 = replace(_V3, heads=64, d_nope=192, d_v=256)
PROBLEMS = {
    "fp8 128+64→128": _FP8,
    "fp8 128+64→128 full sink": replace(_FP8, causal=False, has_sink=True, wants_lse=False),
    "fp8 128+64→128 default V": _FP8,
    "fp8 128+64→128 P fp8": _FP8,
    "fp8 64+64→64": replace(_FP8, d_nope=64, d_v=64),
    "bf16 128+64→128": _V3,
    "bf16 128+64→128 full sink": replace(_V3, causal=False, has_sink=True, wants_lse=False),
    "bf16 128+64→128 pages of 64": replace(_V3, rope="cache", page_size=64),
    "fp16 128+64→128 rope per head": replace(typed(_V3, "fp16"), rope="per_head"),
    "bf16 64+64→64": replace(_V3, d_nope=64, d_v=64),
    "bf16 64+64→128": replace(_V3, d_nope=64),
    "bf16 64+32→64": replace(_V3, d_nope=64, d_rope=32, d_v=64),
    "bf16 128+0→128": replace(_V3, d_rope=0, rope="none"),
    "bf16 192+64→256": _GLM5,
    "bf16 192+64→256 pages of 64, full": replace(_GLM5, rope="cache", page_size=64, causal=False),
    "bf16 256+0→256": replace(_GLM5, d_nope=256, d_rope=0, rope="none"),
    "bf16 256+64→256": replace(_GLM5, d_nope=256),
    "fp8 128+0→128": replace(_FP8, d_rope=0, rope="none"),
    "fp8 128+64→128, v bf16": replace(_FP8, v_dtype="bf16"),
    "fp8 128+64→128, v bf16, scales": replace(
        _FP8, v_dtype="bf16", has_q_scale=True, has_k_scale=True
    ),
    "fp8 128+64→128 scales": replace(_FP8, has_q_scale=True, has_k_scale=True),
    "fp8 128+64→128, v bf16, scales, full sink": replace(
        _FP8, v_dtype="bf16", has_q_scale=True, has_k_scale=True, causal=False, has_sink=True
    ),
    "fp8 128+64→128, v bf16, key mask": replace(_FP8, v_dtype="bf16", has_key_mask=True),
    "fp8 128+0→128 scales": replace(
        _FP8, d_rope=0, rope="none", has_q_scale=True, has_k_scale=True
    ),
    "fp8 192+64→256 key mask": replace(typed(_GLM5, "e4m3"), has_key_mask=True),
    "fp8 192+64→256": typed(_GLM5, "e4m3"),
    "fp8 192+64→256 scales": replace(typed(_GLM5, "e4m3"), has_q_scale=True, has_k_scale=True),
    "fp8 256+64→256": replace(typed(_GLM5, "e4m3"), d_nope=256),
    "bf16 128+64→128 key mask": replace(_V3, has_key_mask=True),
    "bf16 128+64→128 grouped heads": replace(_V3, group=8),
    "bf16 128+64→128 shared keys": replace(_V3, has_k_start=True),
    "bf16 192+64→256 key mask, pages of 64": replace(
        _GLM5, has_key_mask=True, rope="cache", page_size=64
    ),
    "fp8 128+64→128 key mask, shared keys": replace(_FP8, has_key_mask=True, has_k_start=True),
    "bf16 128+64→128 window": replace(_V3, window=128),
    "bf16 128+64→128 window, key mask": replace(_V3, window=128, has_key_mask=True),
    "bf16 128+64→128 window, pages of 64": replace(_V3, window=128, rope="cache", page_size=64),
    "bf16 192+64→256 window": replace(_GLM5, window=128),
    "bf16 192+64→256 window, key mask, pages of 64": replace(
        _GLM5, window=128, has_key_mask=True, rope="cache", page_size=64
    ),
    "fp8 128+64→128 window": replace(_FP8, window=128),
    "fp8 128+64→128 window, scales": replace(_FP8, window=128, has_q_scale=True, has_k_scale=True),
    "fp8 192+64→256 window": replace(typed(_GLM5, "e4m3"), window=128),
    "fp8 128+64→128, v bf16, window, scales": replace(
        _FP8, v_dtype="bf16", window=128, has_q_scale=True, has_k_scale=True
    ),
    "bf16 128+64→128 fp32 out": replace(_V3, fp32_out=True),
    "bf16 192+64→256 fp32 out": replace(_GLM5, fp32_out=True),
    "fp8 128+64→128 fp32 out": replace(_FP8, fp32_out=True),
    "fp8 128+64→128, v bf16, scales, fp32 out": replace(
        _FP8, v_dtype="bf16", has_q_scale=True, has_k_scale=True, fp32_out=True
    ),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8 128+64→128 default V": {"v_full_v227": False},
    "fp8 128+64→128 P fp8": {"p_dtype": "float8_e4m3fn"},
}


def predicted(plan: Plan, call: Call) -> Predicted:
    """All LDS of the plan, and no more registers than two waves can have. Triton 3.8 spills some
    beside 64 scales of keys."""
    spilled = 4 * bool(TRITON < (3, 9) and getattr(plan.config, "scaled_keys", False))
    used = plan.config.launch_smem_used
    return Predicted(shared=used, registers=LANE_REGISTERS, spills=spilled)


JOBS = Jobs(chip="mi355x", problems=PROBLEMS, predicted=predicted, configs=CONFIGS)
