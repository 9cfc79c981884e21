"""What the portable kernels of the indexer are compiled for without a GPU."""

from openmla.indexer.problem import IndexProblem
from openmla.kernels.jobs import Jobs
from openmla.kernels.portable.jobs import CHIPS, predicted

PROBLEMS = {
    "64 heads": IndexProblem(form="scores", heads=64, page_size=64, total_q=4, width=128),
    "64 heads, FP4 keys": IndexProblem(
        form="scores", heads=64, page_size=64, total_q=4, width=128, key_dtype="e2m1"
    ),
    "top-64": IndexProblem(
        form="select",
        topk=64,
        page_size=64,
        wants_counts=True,
        wants_mask=True,
        total_q=4,
        width=128,
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
