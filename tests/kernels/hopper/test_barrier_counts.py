"""Barriers in the compiled Hopper kernels are those that the simulator takes for granted.

Where warps of one partition share memory, the compiler adds barriers by its own rules; the
simulator cannot see that one is missing. So their number is written down, per Triton and job, in
barrier_counts.json. A change of a kernel may change it: then read the PTX around `mbarrier.arrive`
and the shared memory accesses that changed, and write down the new number.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import triton

from openmla.aot import CompileJob, compile_job, count_barriers
from openmla.kernels.hopper import fp8_jobs, jobs, sparse_jobs

COUNTS: dict[str, dict[str, int]] = json.loads(
    Path(__file__).with_name("barrier_counts.json").read_text()
)
JOBS = [job for module in (jobs, sparse_jobs, fp8_jobs) for job in module.COMPILE_JOBS()]


@pytest.mark.compile
@pytest.mark.skipif(triton.__version__ not in COUNTS, reason="not counted with this Triton")
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_the_compiler_adds_as_many_barriers_as_it_did(job: CompileJob) -> None:
    assert compile_job(job).barriers == COUNTS[triton.__version__][job.name]


@pytest.mark.parametrize("version", COUNTS)
def test_every_job_is_counted(version: str) -> None:
    assert sorted(COUNTS[version]) == sorted(job.name for job in JOBS)


def test_barriers_of_inline_assembly_do_not_count() -> None:
    own = "\t// begin inline asm\n\tbar.sync 8, 256;\n\t// end inline asm\n"
    warp = "\tbar.warp.sync \t-1;\n"
    assert count_barriers(f"\tbar.sync \t0, 128;\n{own}\tbarrier.sync \t1;\n{warp}") == 2
    assert count_barriers("\tbar.sync \t%r1, 128;\n") == 1
    assert count_barriers("\ts_barrier\n\t;;#ASMSTART\n\ts_barrier\n\t;;#ASMEND\n") == 1
