"""Every kernel configuration compiles for its target, with whichever Triton runs these tests."""

import pytest

from cases import CASES
from openmla.aot import table as aot_table
from openmla.aot.jobs import compile_job

pytestmark = pytest.mark.compile

# Beside the buffers a kernel allocates, the compiler needs a little shared memory of its own:
# layout conversions, reductions, the state of warp specialization, padding.
SCRATCH = 1024


def check(job):
    report = compile_job(job)
    assert not report.error, report.error
    assert report.differences(job.predicted) == []
    return report


@pytest.mark.parametrize("name", CASES)
def test_compiles_as_planned_and_as_simulated(name):
    launch = CASES[name]()
    if not launch.compiles:
        pytest.skip("this Triton does not compile it")
    compiled = check(launch.job(name))
    simulated = launch.run()
    assert simulated.shared_bytes <= compiled.shared <= simulated.shared_bytes + SCRATCH
    if simulated.tmem_columns:
        assert simulated.tmem_columns <= compiled.tmem < 2 * simulated.tmem_columns + 32


def registered():
    """The package's own jobs; a kernel module that cannot be imported fails its test, not all."""
    try:
        return aot_table.discover()
    except Exception as error:
        return [error]


@pytest.mark.slow
@pytest.mark.parametrize("job", registered(), ids=lambda job: getattr(job, "label", "import"))
def test_registered_configuration_compiles_as_planned(job):
    if isinstance(job, Exception):
        raise job
    check(job)
