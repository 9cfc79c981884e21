"""Gradient cases on Hopper's backward kernels by way of the simulator."""

from __future__ import annotations

from kernels.gradients import Passes
from openmla.kernels.hopper.backward import launch

SMALL_CHIP = 2  # SMs: blocks do several work items
HOPPER = Passes(launch, "h200", "hopper", {"sm_count": SMALL_CHIP})
