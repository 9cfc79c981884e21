"""What the portable kernels of an indexer's loss are compiled for without a GPU."""

from dataclasses import replace

from openmla.indexer.loss_problem import LossProblem
from openmla.kernels.jobs import Jobs
from openmla.kernels.portable.backward.jobs import CHIPS
from openmla.kernels.portable.jobs import predicted
from openmla.problem import Problem

_V32 = Problem(
    form="dense", heads=128, d_nope=128, d_rope=64, d_v=128, total_q=64, total_k=64, wants_lse=True
)
_MASKED = replace(_V32, has_key_mask=True, has_sink=True)
PROBLEMS = {
    "indexer": LossProblem.of(_MASKED, index_heads=64, index_dim=128),
    "indexer, gradients": LossProblem.of(_V32, index_heads=64, index_dim=128, wants_gradients=True),
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
