"""Gradient cases on Blackwell's backward kernels by way of the simulator."""

from __future__ import annotations

from kernels.gradients import Passes
from openmla.kernels.blackwell.backward import launch

BLACKWELL = Passes(launch, "b200", "blackwell")
