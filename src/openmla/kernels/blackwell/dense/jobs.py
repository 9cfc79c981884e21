"""The problems that the dense Blackwell kernel is compiled for without a GPU."""

from dataclasses import replace

from openmla.kernels.blackwell.chip import Partitioned
from openmla.kernels.blackwell.dense.plan import FIRST_DENSE_PAIR
from openmla.kernels.blackwell.dense.resources import DenseKernel
from openmla.kernels.call import Call
from openmla.kernels.gluon.upcast.kernel import upcast_kernel
from openmla.kernels.jobs import Jobs, Predicted, typed
from openmla.kernels.triton_version import TRITON
from openmla.planning import Plan
from openmla.problem import Problem

# Bytes that the softmax and correction groups spill, as `CompileReport.spilling` shows: most with a
# mask and scales for queries and keys together, others up to 20. With scales Triton 3.9 spills
# more.
SPILLS, SPILLS_OF_SCALES = 36, 332
_V3 = Problem(
    form="dense",
    heads=128,
    d_nope=128,
    d_rope=64,
    d_v=128,
    total_q=1024,
    total_k=1024,
    wants_lse=True,
)
_FP8 = replace(_V3, q_dtype="e4m3", kv_dtype="e4m3", v_dtype="e4m3")
_GLM = replace(_V3, heads=64, d_nope=192, d_v=256)
_NO_ROPE = replace(_V3, d_rope=0)
_LONG = replace(_V3, total_q=8192, total_k=8192)


def _short(problem: Problem) -> Problem:
    return replace(problem, heads=16, total_q=64, total_k=64)


def _scaled(problem: Problem) -> Problem:
    return replace(problem, has_q_scale=True, has_k_scale=True)


def _cached(problem: Problem, page_size: int, rope_dtype: str = "bf16") -> Problem:
    return replace(problem, rope="cache", page_size=page_size, rope_dtype=rope_dtype)


# DeepSeek and Kimi: 128 + 64 -> 128 with 16 to 128 heads, GLM: 192 + 64 -> 256, Mistral: 64 + 64.
PROBLEMS = {
    "128+64→128 2Q": _V3,
    "128+64→128 2Q full sink": replace(_V3, causal=False, has_sink=True, wants_lse=False),
    "128+64→128 1Q": _short(_V3),
    "128+64→128 2Q fp16": typed(_V3, "fp16"),
    "128+64→128 2Q rope per head": replace(_V3, rope="per_head"),
    "128+64→128 2Q pages of 16": _cached(_V3, 16),
    "128+64→128 2Q pages of 64": _cached(_V3, 64),
    "128+64→128 2Q pages of 256": _cached(_V3, 256),
    "128+64→128 2Q fp8_block64 rope": _cached(_V3, 64, "fp8_block64"),
    "128+64→128 2Q fp8_block32 rope": _cached(_V3, 16, "fp8_block32"),
    "128+64→128 2Q fp8": replace(_FP8, rope_dtype="e4m3"),
    "128+64→128 1Q fp8": _short(replace(_FP8, rope_dtype="e4m3")),
    "128+64→128 2Q fp8 bf16 rope": _cached(_FP8, 64),
    "128+64→128 1Q fp8 bf16 rope": _short(_FP8),
    "128+64→128 2Q fp8 bf16 rope scales": _scaled(_FP8),
    "128+64→128 1Q fp8 bf16 rope scales": _scaled(_short(_cached(_FP8, 128))),
    "128+64→128 2Q key mask": replace(_V3, has_key_mask=True),
    "128+64→128 2Q full key mask": replace(_V3, has_key_mask=True, causal=False),
    "128+64→128 1Q key mask": _short(replace(_V3, has_key_mask=True)),
    "128+64→128 2Q fp8 key mask scales": _scaled(replace(_FP8, has_key_mask=True)),
    "128+64→128 2Q shared keys": replace(_V3, has_k_start=True),
    "128+64→128 2Q window": replace(_V3, window=128),
    "128+64→128 1Q window": _short(replace(_V3, window=128)),
    "128+64→128 2Q fp8 window scales": _scaled(replace(_FP8, window=128)),
    "192+64→256 window": replace(_GLM, window=128),
    "128+64→128 2Q groups of 8": replace(_V3, group=8),
    "128+64→128 2Q fp32 out": replace(_V3, fp32_out=True),
    "192+64→256 fp32 out": replace(_GLM, fp32_out=True),
    "192+64→256 key mask": replace(_GLM, has_key_mask=True),
    "192+64→256": _GLM,
    "192+64→256 pages of 64": _cached(_GLM, 64),
    "128+64→128 2Q fp8 v bf16": replace(_FP8, v_dtype="bf16", rope_dtype="e4m3"),
    "192+64→256 fp8": replace(_FP8, d_nope=192, d_v=256, rope_dtype="e4m3"),
    "192+64→256 fp8_block64 rope": _cached(_GLM, 64, "fp8_block64"),
    "64+64→128 2Q": replace(_V3, d_nope=64),
    "128+64→64 2Q": replace(_V3, d_v=64),
    "64+32→64 2Q": replace(_V3, heads=40, d_nope=64, d_rope=32, d_v=64),
    "128+0→128 2Q": _NO_ROPE,
    "128+0→128 1Q": _short(_NO_ROPE),
    "128+0→128 2Q fp8 scales": _scaled(replace(_FP8, d_rope=0)),
    "64+0→64 2Q": replace(_NO_ROPE, d_nope=64, d_v=64),
    "192+0→128": replace(_NO_ROPE, d_nope=192),
    "256+0→256": replace(_NO_ROPE, d_nope=256, d_v=256),
}
if TRITON >= FIRST_DENSE_PAIR:
    PROBLEMS |= {
        "128+64→128 pair": _LONG,
        "128+64→128 pair full sink": replace(_LONG, causal=False, has_sink=True, wants_lse=False),
        "128+64→128 pair window": replace(_LONG, window=4096),
        "128+64→128 pair groups of 8 fp32 out": replace(_LONG, group=8, fp32_out=True),
        "128+64→128 pair fp16 rope per head": typed(replace(_LONG, rope="per_head"), "fp16"),
    }


def predicted(plan: Plan, call: Call) -> Predicted:
    """Memory and registers that the plan predicts."""
    if call.kernel is upcast_kernel:
        return Predicted(shared=0, tmem=0)
    scaled = plan.problem.has_q_scale or plan.problem.has_k_scale
    return predicted_by(
        DenseKernel(plan.config, plan.problem), SPILLS_OF_SCALES if scaled else SPILLS
    )


def predicted_by(kernel: Partitioned, spills: int) -> Predicted:
    """Memory and registers of a warp-specialized kernel."""
    return Predicted(
        shared=kernel.block.memory.used,
        tmem=kernel.tmem_columns,
        registers=kernel.registers_at_launch,
        spills=spills,
    )


JOBS = Jobs(chip="b200", problems=PROBLEMS, predicted=predicted)
