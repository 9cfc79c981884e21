"""The dense Hopper tile loop on the simulator: right numbers, no findings, fast enough."""

import pytest

from openmla import sim
from sim.cases_hopper import hopper_dense


@pytest.mark.parametrize("schedule", ["early", "late", "random", "timed"])
def test_ragged_batch_is_right_and_clean(schedule):
    launch = hopper_dense([70, 33, 5], [70, 130, 2], heads=1)
    launch.run(seed=3, schedule=schedule).raise_if_bad()
    launch.check()


@pytest.mark.slow
def test_two_seconds_per_seed():
    launch = hopper_dense([300, 77, 513], [300, 77, 513], heads=2)
    report = launch.run(seed=1)
    report.raise_if_bad()
    launch.check()
    assert report.seconds < 2.0


def test_one_seed_is_one_run():
    first, second = (hopper_dense([70, 33], [70, 130], 1).run(seed=9) for _ in range(2))
    assert (first.steps, first.reason) == (second.steps, second.reason)
    assert isinstance(first, sim.Report)
