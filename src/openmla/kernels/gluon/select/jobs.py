"""What the selection is compiled for without a GPU."""

from __future__ import annotations

from dataclasses import replace

from openmla.indexer.problem import IndexProblem
from openmla.kernels.call import Call
from openmla.kernels.jobs import Jobs, Predicted
from openmla.planning import Plan

_LONG = IndexProblem(form="select", topk=2048, total_q=16, width=131072)
PROBLEMS = {
    "short rows": replace(_LONG, width=8192),
    "long rows": _LONG,
    "long rows, pages, counts, mask": replace(
        _LONG, page_size=64, wants_counts=True, wants_mask=True
    ),
}
# Bytes, on NVIDIA alone. The kernel of long rows spills in the cut of a full list, which few rows
# need; that of short rows spills the places of the selected scores, once per row. With more
# registers both are slower, because fewer rows run on an SM at a time.
MOST_SPILLED = 128
# Short rows store the most, with the ptxas of Triton 3.6.
MOST_SPILLED_ON = {"rtx5090": 160}


def predicted(plan: Plan, _: Call) -> Predicted:
    """Shared memory, limits of registers and of what spills; no tensor memory on any chip."""
    config = plan.config
    return Predicted(
        shared=config.smem_used,
        registers=config.max_registers,
        spills=0 if config.loads_to_lds else MOST_SPILLED_ON.get(plan.target, MOST_SPILLED),
        tmem=0 if plan.target == "b200" else None,
    )


JOBS = (
    *(
        Jobs(chip=chip, problems=PROBLEMS, predicted=predicted)
        for chip in ("h200", "b200", "mi355x")
    ),
    *(
        Jobs(
            chip=chip,
            problems={f"{name} on {chip}": problem for name, problem in PROBLEMS.items()},
            predicted=predicted,
        )
        for chip in ("a100", "l40s", "rtx5090")
    ),
)
