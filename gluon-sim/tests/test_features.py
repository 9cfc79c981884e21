"""Every feature kernel matches PyTorch and is clean under every schedule."""

import pytest
import torch

from gluon_sim import Kind, simulate
from launches import CASES
from launches.launch import descriptor, shared_layout
from toys import hopper_features


@pytest.mark.parametrize("schedule", ["early", "late", "random", "unfair", "timed"])
@pytest.mark.parametrize("name", CASES)
def test_result_and_no_findings(name, schedule):
    launch = CASES[name]()
    launch.run(seed=5, schedule=schedule).raise_if_bad()
    launch.check()


def test_a_descriptor_has_strides_that_hardware_takes():
    """A tensor of one row: nothing is read by its stride, and yet a GPU refuses it."""
    row = torch.zeros(1, 64, dtype=torch.bfloat16)

    def copied(stride):
        source = descriptor(row.as_strided((1, 64), (stride, 1)), [64, 64])
        target = descriptor(torch.zeros(64, 64, dtype=torch.bfloat16), [64, 64])
        return simulate(hopper_features.tma_copy, 1, (source, target, 0, 0))

    copied(2**39 - 8).raise_if_bad()
    with pytest.raises(ValueError, match="below 2\\^40, got 1099511627776"):
        copied(2**39)


def test_a_copy_is_swizzled_as_its_view():
    tile, out = torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(64, 64, dtype=torch.bfloat16)
    source, target = descriptor(tile, [64, 64]), descriptor(out, [64, 64], shared_layout(16, 64))
    report = simulate(hopper_features.tma_copy, 1, (source, target, 0, 0))
    assert report.kinds() == {Kind.ERROR}
    assert "the descriptor has NVMMASharedLayout(swizzle_byte_width=64" in str(report)
