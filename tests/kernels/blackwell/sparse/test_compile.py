"""The sparse Blackwell kernel compiles for sm_100 as planned, with both versions of Triton."""

from __future__ import annotations

import pytest

from openmla.kernels.blackwell.sparse.jobs import JOBS
from openmla.kernels.blackwell.sparse.kernel import sparse_kernel
from openmla.kernels.blackwell.sparse.plan import WORKERS
from openmla.lab.compiling.jobs import CompileJob, compile_job
from openmla.lab.compiling.table import jobs_of


@pytest.mark.compile
@pytest.mark.parametrize("job", list(jobs_of(JOBS)), ids=lambda job: job.name)
def test_compiles_as_planned(job: CompileJob) -> None:
    report = compile_job(job)
    assert report.differences(job.predicted) == []  # shared and tensor memory, registers, spills
    # Of two sources, producers store once where the second lies.
    two_sources = job.call.arguments.get("second_indices_ptr") is not None
    assert not set(report.spilling) - {0} or two_sources  # none in a partition
    workers = {worker.registers for worker in WORKERS}
    if job.call.kernel is sparse_kernel:
        assert workers <= set(report.partition_registers)
