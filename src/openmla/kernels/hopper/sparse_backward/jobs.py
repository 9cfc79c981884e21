"""What Hopper's sparse backward is compiled for without a GPU."""

from __future__ import annotations

from dataclasses import replace

from openmla.backward.problem import BackwardProblem
from openmla.kernels.jobs import Jobs, block_memory
from openmla.problem import Problem

_V32 = BackwardProblem.of(
    Problem(
        form="sparse",
        heads=128,
        d_nope=512,
        d_rope=64,
        d_v=512,
        total_q=64,
        total_k=8192,
        topk=2048,
        causal=False,
    )
)
PROBLEMS = {
    "512+64 lists": _V32,
    "512+64 lists, lengths, sink": replace(_V32, heads=16, has_topk_lengths=True, has_sink=True),
    "512+0 lists, d_lse": replace(_V32, heads=64, d_rope=0, rope="none", has_d_lse=True),
}
JOBS = Jobs(chip="h200", problems=PROBLEMS, predicted=block_memory)
