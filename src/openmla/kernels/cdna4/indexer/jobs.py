"""What the indexer's scores on CDNA4 are compiled for without a GPU."""

from __future__ import annotations

from openmla.indexer.problem import IndexProblem
from openmla.kernels.call import Call
from openmla.kernels.cdna4.chip import LANE_REGISTERS
from openmla.kernels.jobs import Jobs, Predicted
from openmla.planning import Plan

PROBLEMS = {
    f"{heads} heads{f' pages of {page}' if page else ''}": IndexProblem(
        form="scores", heads=heads, page_size=page, total_q=16, width=4096
    )
    for heads in (32, 64, 128)
    for page in (0, 64)
}


def predicted(_: Plan, __: Call) -> Predicted:
    """No LDS."""
    return Predicted(shared=0, registers=LANE_REGISTERS)


JOBS = Jobs(chip="mi355x", problems=PROBLEMS, predicted=predicted)
