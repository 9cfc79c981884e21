"""The sparse Blackwell kernel compiles for sm_100 within its plan, with both versions of Triton."""

from __future__ import annotations

import pytest

from openmla.aot.jobs import compile_job
from openmla.kernels.blackwell.sparse.jobs import COMPILE_JOBS, PROBLEMS
from openmla.kernels.gluon.compat import RENAMED
from openmla.planning import plan
from openmla.planning.blackwell.sparse.family import fp8_cache_smem
from openmla.planning.blackwell.units import SMEM_CARVEOUT
from openmla.planning.serves import FP8_CACHES


def planned_bytes(name: str) -> int:
    """Shared memory that the plan of a job's problem allows."""
    problem = PROBLEMS[name]
    config = plan(problem, "b200", "blackwell").config
    if problem.kv_dtype in ("e4m3", *FP8_CACHES):
        return fp8_cache_smem(config.one_cta(), problem).size_of
    pair = config.cta_group == 2 and RENAMED
    planned: int = config.smem_with_whole_q if pair else config.one_cta().smem_used
    assert planned <= SMEM_CARVEOUT
    return planned


@pytest.mark.compile
@pytest.mark.parametrize("job", COMPILE_JOBS(), ids=lambda job: job.name)
def test_compiles_within_its_plan(job) -> None:  # type: ignore[no-untyped-def]
    report = compile_job(job)
    assert report.differences(job.predicted) == []  # tensor memory, spills
    assert not set(report.spilling) - {0}  # none in a partition
    assert report.shared is not None
    assert report.shared <= planned_bytes(job.name.removeprefix("blackwell sparse "))
