"""Every test kernel also compiles for its target, with whichever Triton runs these tests."""

import pytest

from openmla.aot import compile_job
from sim.cases import CASES


@pytest.mark.parametrize("name", CASES)
def test_compiles_as_planned(name):
    job = CASES[name]().job(name)
    report = compile_job(job)
    assert not report.error, report.error
    assert report.differences(job.predicted) == []
