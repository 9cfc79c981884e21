"""What the compiler makes of the dense Blackwell kernel keeps what the plan promised."""

from __future__ import annotations

import pytest

from openmla.aot.jobs import CompileJob, compile_job
from openmla.kernels.blackwell.dense.jobs import COMPILE_JOBS, PROBLEMS
from openmla.kernels.blackwell.dense.launch import TMEM_ALLOCATIONS
from openmla.planning import plan
from openmla.planning.blackwell import MLAConfig

# Bytes that the MMA warp spills in spite of registers to spare, by Triton's version and job.
KNOWN = {("3.9.0", "128+64→128 1Q"): 12}
pytestmark = [pytest.mark.compile, pytest.mark.slow]
JOBS = {job.name.removeprefix("blackwell dense "): job for job in COMPILE_JOBS()}


def config_of(name: str) -> MLAConfig:
    config: MLAConfig = plan(PROBLEMS[name], "b200", "blackwell").config
    return config


@pytest.mark.parametrize("name", JOBS)
def test_memory_is_what_the_plan_reserved(name: str) -> None:
    job: CompileJob = JOBS[name]
    config, report = config_of(name), compile_job(job)
    assert not report.error, report.error
    assert report.shared is not None and report.shared <= config.launch_smem_used()
    allocation = next(n for n in TMEM_ALLOCATIONS if n >= config.tmem_used)
    assert report.tmem == allocation
    assert report.warps is not None and 32 * report.warps == config.launch_num_threads()


@pytest.mark.parametrize("name", JOBS)
def test_the_mma_and_load_warps_do_not_spill(name: str) -> None:
    report, (_, _, registers) = compile_job(JOBS[name]), JOBS[name].constexprs["REGISTERS"]
    assert registers in report.partition_registers
    if registers in report.spilling:
        assert report.spills == KNOWN.get((report.triton, name))
    assert (report.spills or 0) <= (JOBS[name].predicted.spills or 0)
