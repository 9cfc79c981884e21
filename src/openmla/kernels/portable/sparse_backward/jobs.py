"""What the portable sparse backward kernels are compiled for without a GPU."""

from dataclasses import replace

from openmla.backward.problem import BackwardProblem
from openmla.kernels.jobs import Jobs
from openmla.kernels.portable.backward.jobs import CHIPS
from openmla.kernels.portable.jobs import predicted
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
    "lists": _V32,
    "lists, sink, d_lse, lengths": replace(
        _V32, heads=16, has_sink=True, has_d_lse=True, has_topk_lengths=True
    ),
}
JOBS = tuple(
    Jobs(
        chip=chip,
        backend="portable",
        problems={f"{name} on {chip}": problem for name, problem in PROBLEMS.items()},
        predicted=predicted,
    )
    for chip in CHIPS
)
