"""What the dense Hopper kernels are compiled for without a GPU."""

from __future__ import annotations

from dataclasses import replace

from openmla.kernels.call import Call
from openmla.kernels.hopper.chip import WGMMA_M
from openmla.kernels.hopper.dense.plan import ELEMENT
from openmla.kernels.jobs import Jobs, Predicted, block_memory, typed
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
_SHORT = replace(_V3, heads=16, total_q=64, total_k=131072)
PROBLEMS = {
    "128+64→128": _V3,
    "128+64→128 full sink": replace(_V3, causal=False, has_sink=True, wants_lse=False),
    "128+64→128 fp16": typed(_V3, "fp16"),
    "128+64→128 rope per head": replace(_V3, rope="per_head"),
    "128+64→128 pages of 64": replace(_V3, rope="cache", page_size=64),
    "128+64→128 pages of 16": replace(_V3, rope="cache", page_size=16),
    "128+64→128 1Q": replace(_V3, heads=16, total_q=64, total_k=256),
    "128+64→128 one block": replace(_V3, total_q=128, total_k=128),
    "192+64→256 one block": replace(_V3, d_nope=192, d_v=256, total_q=64, total_k=64),
    "128+64→128 1Q split": _SHORT,
    "128+64→128 2Q split": replace(_SHORT, total_q=4096),
    "128+64→128 key mask": replace(_V3, has_key_mask=True),
    "128+64→128 1Q split key mask": replace(_SHORT, has_key_mask=True),
    "128+64→128 shared keys": replace(_V3, has_k_start=True),
    "128+64→128 window": replace(_V3, window=128),
    "128+64→128 1Q split window": replace(_SHORT, window=65536),
    "192+64→256": replace(_V3, d_nope=192, d_v=256),
    "192+64→256 window": replace(_V3, d_nope=192, d_v=256, window=128),
    "192+64→256 1Q split": replace(_SHORT, d_nope=192, d_v=256),
    "64+64→128": replace(_V3, d_nope=64),
    "128+0→128": replace(_V3, d_rope=0, rope="none"),
    "256+0→256": replace(_V3, d_nope=256, d_rope=0, d_v=256, rope="none"),
    "64+32→64": replace(_V3, d_nope=64, d_rope=32, d_v=64),
}


def predicted(plan: Plan, call: Call) -> Predicted:
    """Bytes of the one-block kernel are its tiles of Q, K and V, and three barriers."""
    if call.kernel.__name__ != "one_block_kernel":
        return block_memory(plan, call)
    return Predicted(shared=WGMMA_M * plan.config.d_qk * ELEMENT + plan.config.stage_bytes + 3 * 8)


JOBS = Jobs(chip="h200", problems=PROBLEMS, predicted=predicted)
