"""What the indexer's scores on Hopper are compiled for without a GPU."""

from __future__ import annotations

from dataclasses import replace

from openmla.indexer.problem import IndexProblem
from openmla.kernels.call import Call
from openmla.kernels.jobs import Jobs, Predicted, block_memory
from openmla.planning import Plan

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
    }
    | {
        f"{heads} heads pages of 64, FP4 keys": IndexProblem(
            form="scores", heads=heads, page_size=64, total_q=16, width=4096, key_dtype="e2m1"
        )
        for heads in (32, 64, 128)
    }
    | {
        f"{heads} heads pages of {page}, FP4 keys, {queries} per request": IndexProblem(
            form="scores",
            heads=heads,
            page_size=page,
            total_q=16,
            batch=16 // queries,
            width=4096,
            key_dtype="e2m1",
        )
        for heads, page, queries in ((32, 64, 1), (64, 64, 1), (64, 32, 2))
    }
)

FP4_SPILLS = 304
"""Bytes, where scores of wide keys are computed again. In front of a block of keys, which takes a
consumer thousands of instructions, Triton 3.6 reads five registers back."""


def predicted(plan: Plan, call: Call) -> Predicted:
    """What every plan of Hopper predicts, and what consumers of FP4 keys spill."""
    return replace(block_memory(plan, call), spills=FP4_SPILLS if plan.config.fp4 else 0)


JOBS = Jobs(chip="h200", problems=PROBLEMS, predicted=predicted)
