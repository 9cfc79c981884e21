"""What the kernel of a CTA pair is compiled for without a GPU."""

from dataclasses import replace

from openmla.kernels.blackwell.dense.jobs import predicted_by
from openmla.kernels.blackwell.sparse.jobs import LATENT, V32
from openmla.kernels.call import Call
from openmla.kernels.gluon.compat import TRITON
from openmla.kernels.jobs import Jobs, Predicted, typed
from openmla.planning import Plan
from openmla.planning.blackwell.sparse.pair import PairKernel
from openmla.planning.blackwell.units import FIRST_ROWS_PAIR

# FP8 rows are bf16 when they come here.
PROBLEMS = {
    "128 heads": V32,
    "128 heads sink, no lse": replace(V32, has_sink=True, wants_lse=False, has_topk_lengths=False),
    "128 heads fp16": typed(V32, "fp16"),
    "128 heads latent": LATENT,
    "128 heads e4m3": typed(V32, "e4m3"),
    "16 heads e4m3": typed(replace(V32, heads=16), "e4m3"),
}
# Addresses that every partition of a pair needs, stored once before the partitions part.
SPILLS = 32


def predicted(plan: Plan, call: Call) -> Predicted:
    """What the plan says of its kernel."""
    return predicted_by(PairKernel(plan.config, plan.problem), SPILLS)


# Without pairs none of them is a pair, and the kernel of one CTA has jobs of its own.
JOBS = Jobs(
    chip="b200", problems=PROBLEMS if TRITON >= FIRST_ROWS_PAIR else {}, predicted=predicted
)
