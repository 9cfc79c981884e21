"""What Blackwell's backward kernels are compiled for without a GPU."""

from __future__ import annotations

from dataclasses import replace

from openmla.backward.problem import BackwardProblem
from openmla.kernels.blackwell.backward.plan import KeyPass, QueryPass
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
    "128+0→128": replace(_V3, d_rope=0, rope="none"),
    "64+32→64": replace(_V3, d_nope=64, d_rope=32, d_v=64),
}


def predicted(plan: Plan, call: Call) -> Predicted:
    """Each pass has a map of its own; a sum takes no shared memory."""
    passes: dict[str, type[QueryPass] | type[KeyPass]] = {
        "query_pass_kernel": QueryPass,
        "key_pass_kernel": KeyPass,
    }
    if call.kernel.__name__ not in passes:
        return Predicted(shared=0, tmem=0)
    found = passes[call.kernel.__name__](plan.config, plan.problem)
    return Predicted(
        shared=found.block.memory.used,
        tmem=found.tmem_columns,
        registers=found.registers_at_launch,
    )


JOBS = Jobs(chip="b200", problems=PROBLEMS, predicted=predicted)
