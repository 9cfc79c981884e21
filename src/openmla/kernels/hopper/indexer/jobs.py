"""What the indexer's scores on Hopper are compiled for without a GPU."""

from __future__ import annotations

from openmla.indexer.problem import IndexProblem
from openmla.kernels.jobs import Jobs, block_memory

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
)


JOBS = Jobs(chip="h200", problems=PROBLEMS, predicted=block_memory)
