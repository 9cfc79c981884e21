"""Compile jobs: the indexer's scores on CDNA4, for compilation without a GPU."""

from __future__ import annotations

from openmla.aot.jobs import CompileJob, Predicted
from openmla.kernels.cdna4.indexer.launch import calls
from openmla.kernels.cdna4.indexer.scores import VECTORS
from openmla.kernels.compile_job import INDEX_SCORES, compile_job_of, scores_stand_ins
from openmla.planning.cdna4 import LANE_REGISTERS
from openmla.planning.indexer import index_plan


def COMPILE_JOBS() -> list[CompileJob]:
    """One job per problem."""
    predicted = Predicted(shared=0, registers=LANE_REGISTERS)
    jobs = []
    for name, problem in INDEX_SCORES.items():
        (call,) = calls(index_plan(problem, "mi355x", "cdna4"), *scores_stand_ins(problem))
        label = f"cdna4 indexer scores {name}"
        jobs.append(compile_job_of(label, call, VECTORS, "gfx950", predicted))
    return jobs
