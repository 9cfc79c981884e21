"""Gradient cases on Hopper's backward kernels by way of the simulator, and those with key masks."""

from __future__ import annotations

from dataclasses import replace

from kernels.gradients import EDGES, NARROW, V3, Passes
from openmla.kernels.hopper.backward import launch
from openmla.lab.testing.gradients import GradientCase

SMALL_CHIP = 2  # SMs: blocks do several work items
HOPPER = Passes(launch, "h200", "hopper", {"sm_count": SMALL_CHIP})

_WIDE = replace(V3, d_nope=192, d_v=256)
WIDE = {
    "192+64→256": GradientCase(_WIDE),
    "192+64→256, full, sink": GradientCase(
        replace(_WIDE, causal=False, sink="mixed", q_lens=(70, 20), k_lens=(200, 40))
    ),
    "192+64→256, rope per head, gradient of lse": GradientCase(
        replace(_WIDE, rope="per_head", heads=1), d_lse=True
    ),
    "192+64→256, edges": GradientCase(replace(EDGES, d_nope=192, d_rope=64, d_v=256)),
    "192+64→256, rings": GradientCase(
        replace(_WIDE, heads=1, q_lens=(260, 130), k_lens=(300, 400), causal=False)
    ),
    "192+64→256, more queries than keys": GradientCase(
        replace(_WIDE, heads=1, q_lens=(200, 0, 3, 64), k_lens=(50, 10, 0, 64))
    ),
    "192+64→256, key mask, rings": GradientCase(
        replace(_WIDE, heads=1, key_mask="half", q_lens=(200, 130), k_lens=(300, 100))
    ),
    "192+64→256, negative scale, strided": GradientCase(
        replace(_WIDE, heads=1, scale=-0.1, layout="aligned")
    ),
}
"""Widths of GLM-5, whose key pass runs twice; no other family has them."""
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
