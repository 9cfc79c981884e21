"""The dense Hopper tile loop on the simulator: right numbers, no findings, fast enough."""

import time

import pytest

import gluon_sim as sim
from launches.hopper import hopper_dense
from toys.hopper_dense import dense


@pytest.mark.parametrize("schedule", ["early", "late", "random", "timed"])
def test_ragged_batch_is_right_and_clean(schedule):
    launch = hopper_dense([70, 33, 5], [70, 130, 2], heads=1)
    launch.run(seed=3, schedule=schedule).raise_if_bad()
    launch.check()


@pytest.mark.slow
def test_two_seconds_of_one_core_per_seed():
    launch = hopper_dense([300, 77, 513], [300, 77, 513], heads=2)
    before = time.process_time()
    launch.run(seed=1).raise_if_bad()
    assert time.process_time() - before < 2.0
    launch.check()


def test_host_code_can_be_intercepted():
    launch = hopper_dense([70], [70], heads=1)
    out, lse = launch.args[5:7]
    with sim.intercept(seed=4, outputs={"out": out, "lse": lse}) as reports:
        dense[lambda meta: (1 + 0 * meta["BN"],)](*launch.args, num_warps=4, **launch.kwargs)
    assert [r.ok for r in reports] == [True]
    launch.check()


def test_one_seed_is_one_run():
    first, second = (hopper_dense([70, 33], [70, 130], 1).run(seed=9) for _ in range(2))
    assert (first.steps, first.reason) == (second.steps, second.reason)
    assert isinstance(first, sim.Report)
