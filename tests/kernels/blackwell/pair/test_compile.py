"""The kernel of a CTA pair compiles for sm_100 as planned."""

from __future__ import annotations

import pytest

from openmla.kernels.blackwell.pair.jobs import JOBS
from openmla.lab.compiling.jobs import CompileJob, compile_job
from openmla.lab.compiling.table import jobs_of


@pytest.mark.compile
@pytest.mark.parametrize("job", list(jobs_of(JOBS)), ids=lambda job: job.name)
def test_compiles_as_planned(job: CompileJob) -> None:
    report = compile_job(job)
    assert report.differences(job.predicted) == []  # shared and tensor memory, registers, spills
    workers = set(job.call.arguments.get("REGISTERS", ()))  # passes before and after have none
    assert workers <= set(report.partition_registers)
    two_sources = job.call.arguments.get("second_indices_ptr") is not None
    assert not workers & set(report.spilling) or two_sources
