"""Gradient cases on CDNA4's backward kernels by way of the simulator."""

from __future__ import annotations

from kernels.gradients import Passes
from openmla.kernels.cdna4.backward import launch

CDNA4 = Passes(launch, "mi355x", "cdna4", triton=(3, 8))
