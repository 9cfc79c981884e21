"""Launches of the test kernels, by name."""

from launches import blackwell, cdna4, hopper

CASES = {**hopper.CASES, **blackwell.CASES, **cdna4.CASES}
