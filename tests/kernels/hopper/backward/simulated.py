"""Gradient cases on Hopper's backward kernels by way of the simulator, and those with key masks."""

from __future__ import annotations

from dataclasses import replace

from kernels.gradients import EDGES, NARROW, V3, Passes
from openmla.kernels.hopper.backward import launch
from openmla.lab.testing.gradients import GradientCase

SMALL_CHIP = 2  # SMs: blocks do several work items
HOPPER = Passes(launch, "h200", "hopper", {"sm_count": SMALL_CHIP})

MASKED = {
    "key mask": GradientCase(replace(V3, key_mask="half")),
    "few bits, full, gradient of lse": GradientCase(
        replace(NARROW, key_mask="few", causal=False), d_lse=True
    ),
    "key mask, edges, sink": GradientCase(replace(EDGES, key_mask="half", sink="mixed")),
    "key mask, more queries than keys": GradientCase(
        replace(NARROW, key_mask="half", q_lens=(200, 0, 3, 64), k_lens=(50, 10, 0, 64))
    ),
    "key mask, rings": GradientCase(
        replace(
            NARROW, key_mask="half", heads=1, q_lens=(260, 130), k_lens=(300, 400), causal=False
        )
    ),
    "key mask, 40 sequences": GradientCase(
        replace(NARROW, key_mask="half", heads=1, q_lens=(3,) * 40, k_lens=(3,) * 40)
    ),
    "key mask, strided": GradientCase(
        replace(NARROW, key_mask="half", layout="aligned", rope="per_head")
    ),
    "key mask, no sequences": GradientCase(
        replace(NARROW, key_mask="half", q_lens=(), k_lens=(), spare=4)
    ),
}
"""No other family's kernels have key masks."""
