"""What the indexer's kernels on Hopper are compiled for without a GPU."""

from __future__ import annotations

from dataclasses import replace

from openmla.indexer.problem import IndexProblem
from openmla.kernels.call import Call
from openmla.kernels.jobs import Jobs, Predicted, block_memory
from openmla.planning import Plan

_LONG = IndexProblem(form="select", topk=2048, total_q=16, width=131072)
PROBLEMS = (
    {
        f"{heads} heads{f' pages of {page}' if page else ''}": IndexProblem(
            form="scores", heads=heads, page_size=page, total_q=16, width=4096
        )
        for heads in (32, 64, 128)
        for page in (0, 64)
    }
    | {
        f"{heads} heads pages of {page}, {queries} per request": IndexProblem(
            form="scores", heads=heads, page_size=page, total_q=16, batch=16 // queries, width=4096
        )
        for heads, page, queries in (
            (64, 64, 1),
            (64, 64, 2),
            (64, 32, 1),
            (32, 64, 2),
            (128, 64, 1),
        )
    }
    | {
        "64 heads pages of 64, many requests": IndexProblem(
            form="scores", heads=64, page_size=64, total_q=128, batch=128, width=4096
        ),
        "short rows": replace(_LONG, width=8192),
        "long rows": _LONG,
        "long rows, pages, counts, mask": replace(
            _LONG, page_size=64, wants_counts=True, wants_mask=True
        ),
    }
)


# Bytes. The kernel of long rows spills in the cut of a full list, which few rows need; that of
# short rows spills the places of the selected scores, once per row. With more registers both are
# slower, because fewer rows run on an SM at a time.
MOST_SPILLED = 128


def predicted(plan: Plan, call: Call) -> Predicted:
    """Shared memory, and for a selection the limits of registers and of spilled bytes."""
    if plan.problem.form == "scores":
        return block_memory(plan, call)
    config = plan.config
    return Predicted(shared=config.smem_used, registers=config.max_registers, spills=MOST_SPILLED)


JOBS = Jobs(chip="h200", problems=PROBLEMS, predicted=predicted)
