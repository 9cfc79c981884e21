"""What the portable backward kernels are compiled for without a GPU: one chip per architecture."""

from dataclasses import replace

from openmla.backward.problem import BackwardProblem
from openmla.kernels.jobs import Jobs
from openmla.kernels.portable.jobs import CHIPS as FORWARD_CHIPS
from openmla.kernels.portable.jobs import predicted
from openmla.problem import Problem

CHIPS = (*FORWARD_CHIPS, "b200", "b300")
_DENSE = BackwardProblem.of(
    Problem(form="dense", heads=16, d_nope=128, d_rope=64, d_v=128, total_q=64, total_k=64)
)
PROBLEMS = {
    "": _DENSE,
    "window": replace(_DENSE, window=128),
    "mask, sink, d_lse": replace(_DENSE, has_key_mask=True, has_sink=True, has_d_lse=True),
    "192 + 64 and 256 columns": replace(_DENSE, d_nope=192, d_v=256),
}
JOBS = tuple(
    Jobs(
        chip=chip,
        backend="portable",
        problems={f"{name} on {chip}".strip(): problem for name, problem in PROBLEMS.items()},
        predicted=predicted,
    )
    for chip in CHIPS
)
