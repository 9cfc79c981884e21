"""What Hopper's backward kernels are compiled for without a GPU."""

from __future__ import annotations

from dataclasses import replace

from openmla.backward.problem import BackwardProblem
from openmla.kernels.call import Call
from openmla.kernels.jobs import Jobs, Predicted
from openmla.planning import Plan
from openmla.problem import Problem

_V3 = BackwardProblem.of(
    Problem(form="dense", heads=128, d_nope=128, d_rope=64, d_v=128, total_q=4096, total_k=4096)
)
PROBLEMS = {
    "128+64→128": _V3,
    "128+64→128 full, sink": replace(_V3, causal=False, has_sink=True),
    "128+64→128 rope per head, d_lse": replace(_V3, rope="per_head", has_d_lse=True),
    "128+64→128 key mask": replace(_V3, has_key_mask=True),
    "192+64→256": replace(_V3, d_nope=192, d_v=256),
    "192+64→256 full, key mask": replace(_V3, d_nope=192, d_v=256, causal=False, has_key_mask=True),
    "128+0→128": replace(_V3, d_rope=0, rope="none"),
    "64+32→64": replace(_V3, d_nope=64, d_rope=32, d_v=64),
}


# Bytes that ptxas stores before the loops, mostly of the work item: with Triton 3.6.0 4 in the key
# pass, 20 in the query pass with a sink. The kernels were measured so.
SPILLS = 24


def predicted(plan: Plan, call: Call) -> Predicted:
    """Every pass has a map of its own; a sum takes no shared memory."""
    maps = {
        "query_pass_kernel": plan.config.query_pass_map,
        "key_pass_kernel": plan.config.key_pass_map,
    }
    found = maps.get(call.kernel.__name__)
    if found is None:
        return Predicted(shared=0)
    return Predicted(shared=found.used, registers=plan.config.registers.at_launch, spills=SPILLS)


JOBS = Jobs(chip="h200", problems=PROBLEMS, predicted=predicted)
