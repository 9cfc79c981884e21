"""What the indexer's scores on Blackwell are compiled for without a GPU."""

from __future__ import annotations

from openmla.indexer.problem import IndexProblem
from openmla.kernels.blackwell.indexer.plan import REGISTERS_AT_LAUNCH
from openmla.kernels.call import Call
from openmla.kernels.jobs import Jobs, Predicted
from openmla.modular.blackwell.units import TMEM_COLS
from openmla.planning import Plan

PROBLEMS = {
    f"{heads} heads{f' pages of {page}' if page else ''}": IndexProblem(
        form="scores", heads=heads, page_size=page, total_q=16, width=4096
    )
    for heads in (32, 64, 128)
    for page in (0, 64)
}
# Bytes: Triton 3.8 stores one register of the 64-head kernel, other versions none.
SPILLED_BY = {"3.8": 4}


def predicted(plan: Plan, _: Call) -> Predicted:
    """All of tensor memory: four products."""
    return Predicted(
        shared=plan.config.smem_used,
        tmem=TMEM_COLS,
        registers=REGISTERS_AT_LAUNCH,
        spills=SPILLED_BY.get(plan.triton, 0),
    )


JOBS = Jobs(chip="b200", problems=PROBLEMS, predicted=predicted)
