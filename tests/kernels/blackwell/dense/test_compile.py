"""What the compiler makes of the dense Blackwell kernel keeps what the plan promised."""

from __future__ import annotations

import pytest

from openmla.kernels.blackwell.dense import jobs
from openmla.kernels.blackwell.dense.jobs import PROBLEMS
from openmla.kernels.blackwell.dense.resources import DenseKernel
from openmla.lab.compiling.jobs import compile_job
from openmla.lab.compiling.table import jobs_of
from openmla.planning import plan

# Bytes that the MMA warp spills in spite of registers to spare, by Triton's version and job.
KNOWN = {("3.9.0", "128+64→128 1Q"): 12, ("3.9.0", "128+64→128 1Q window"): 12}
pytestmark = [pytest.mark.compile, pytest.mark.slow]
DENSE = "blackwell dense "
ALL = list(jobs_of(jobs.JOBS))
JOBS = {job.name.removeprefix(DENSE): job for job in ALL if job.name.startswith(DENSE)}
UPCASTS = {job.name: job for job in ALL if not job.name.startswith(DENSE)}


@pytest.mark.parametrize("name", JOBS)
def test_memory_is_what_the_plan_says(name: str) -> None:
    report = compile_job(JOBS[name])
    assert report.differences(JOBS[name].predicted) == []
    kernel = DenseKernel(plan(PROBLEMS[name], "b200", "blackwell").config, PROBLEMS[name])
    assert report.warps is not None and 32 * report.warps == kernel.threads
    assert kernel.first_registers in report.partition_registers


@pytest.mark.parametrize("name", UPCASTS)
def test_values_are_upcast_without_shared_memory(name: str) -> None:
    report = compile_job(UPCASTS[name])
    assert report.differences(UPCASTS[name].predicted) == []
    assert not report.spills


@pytest.mark.parametrize("name", JOBS)
def test_the_mma_and_load_warps_do_not_spill(name: str) -> None:
    report, registers = compile_job(JOBS[name]), JOBS[name].call.arguments["REGISTERS"].single
    assert registers in report.partition_registers
    if registers in report.spilling:
        assert report.spills == KNOWN.get((report.triton, name))
    assert (report.spills or 0) <= (JOBS[name].predicted.spills or 0)
