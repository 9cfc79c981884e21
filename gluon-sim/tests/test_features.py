"""Every feature kernel matches PyTorch and is clean under every schedule."""

import pytest

from launches import CASES


@pytest.mark.parametrize("schedule", ["early", "late", "random", "unfair", "timed"])
@pytest.mark.parametrize("name", CASES)
def test_result_and_no_findings(name, schedule):
    launch = CASES[name]()
    launch.run(seed=5, schedule=schedule).raise_if_bad()
    launch.check()
