"""The golden compile reports of tests/compiled are those of today's kernels, all and no more.

Each file is of one family and one Triton, sorted by job: key, registers, spills, shared memory, and
the barriers that warps of one partition meet at, which the compiler adds by its own rules and the
simulator takes for granted. No test writes them: a job without a report, or with one of another
source, fails until `make compile-all` has compiled it with every Triton.
"""

from __future__ import annotations

import pytest
import triton

from openmla.lab.compiling import store as aot_store
from openmla.lab.compiling import table as aot_table
from openmla.lab.compiling.jobs import CompileJob, compile_job, job_key, specialized

pytestmark = pytest.mark.tritons
HERE = aot_store.golden()
FAMILIES = ("hopper", "blackwell", "cdna4", "portable")
TRITONS = ("3.6", "3.7", "3.8", "3.9")
FIRST_OF_CDNA4 = "3.8"


def kept(family: str) -> aot_store.Entries:
    """The golden reports of a family with this Triton."""
    path = aot_store.golden_file_of(family, triton.__version__)
    assert path is not None
    return aot_store.read(path)


KEPT = {name: kept(name) for name in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_job_has_its_report_and_every_report_its_job(family: str) -> None:
    jobs = {j.label: job_key(j) for j in aot_table.discover() if j.name.split()[0] == family}
    assert {label: entry["key"] for label, entry in KEPT[family].items()} == jobs


def registered() -> list[CompileJob | Exception]:
    """All jobs; a kernel module that cannot be imported fails its test, not all."""
    try:
        return [*aot_table.discover()]
    except Exception as error:
        return [error]


@pytest.mark.slow
@pytest.mark.parametrize("job", registered(), ids=lambda job: getattr(job, "label", "import"))
def test_every_job_compiles_as_planned(job: CompileJob | Exception) -> None:
    if isinstance(job, Exception):
        raise job
    hash(tuple(specialized(job).constexprs.items()))  # a launch does, and fails where it cannot
    report = compile_job(job)
    assert not report.error, report.error
    assert report.differences(job.predicted) == []


@pytest.mark.parametrize("family", ["hopper", "blackwell", "cdna4"])
def test_every_plan_knows_the_bytes_that_its_kernel_takes(family: str) -> None:
    jobs = [job for job in aot_table.discover() if job.name.split()[0] == family]
    assert [job.label for job in jobs if job.predicted.shared is None] == []
    kept = KEPT[family]
    planned = {job.label: job.predicted.shared for job in jobs if job.label in kept}
    assert planned == {label: kept[label]["shared"] for label in planned}
    assert len(planned) >= len(jobs) // 2, "most reports are of other jobs"


def test_blackwell_plans_know_tensor_memory_and_registers() -> None:
    jobs = [
        job
        for job in aot_table.discover()
        if job.label in KEPT["blackwell"] and job.predicted.registers is not None
    ]
    assert len(jobs) > 40
    planned = {job.label: (job.predicted.tmem, job.predicted.registers) for job in jobs}
    kept = KEPT["blackwell"]
    assert planned == {label: (kept[label]["tmem"], kept[label]["registers"]) for label in planned}


def test_every_family_has_a_sorted_file_of_every_triton() -> None:
    assert HERE is not None
    files = sorted(HERE.glob("*.json"))
    wanted = {
        f"{family}-triton{version}.json"
        for family in FAMILIES
        for version in TRITONS
        if family != "cdna4" or version >= FIRST_OF_CDNA4
    }
    assert {path.name for path in files} == wanted
    for path in files:
        labels = list(aot_store.read(path))
        assert labels == sorted(labels), path.name
