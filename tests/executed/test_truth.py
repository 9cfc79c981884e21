"""Executions of compiled code here, and the same kernels on an H200: the same up to rounding.

h200.npz holds what benchmarks/device/executed_h200.py recorded on 2026-11-16 with Triton 3.6: every
seventh element of `out` and all of `lse` and `max_logits`, case by case. Sums of products have the
chip's bits. Its exponentials and logarithms are some ulps off, so that a weight is rounded to the
other neighbor now and then: of most cases every element of `out` is the same.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from executed.cases import CASES, QUICK
from gluon_sim.compiled import SCHEDULES
from openmla.dispatch import triton_version
from openmla.lab.testing.build import Outcome
from openmla.lab.testing.executed.prepare import prepare

EVERY = 7
RECORDED = dict(np.load(Path(__file__).with_name("h200.npz")).items())


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def compare(name: str, outcome: Outcome) -> dict[str, tuple[float, float]]:
    """The share of equal elements of every result, and the largest difference in units of the
    largest element."""
    found = {}
    for key, ours in outcome.tensors().items():
        flat = ours.contiguous().flatten()
        flat = flat[::EVERY] if key == "out" else flat
        chip = torch.from_numpy(RECORDED[f"{name}/{key}"]).view(flat.dtype)
        same = bits(flat) == bits(chip)
        gaps = (flat.double() - chip.double())[~same].abs()
        largest = flat.double().abs().nan_to_num(0, posinf=0, neginf=0).max()
        gap = float(gaps.max() / largest) if len(gaps) else 0.0
        found[key] = (float(same.double().mean()), gap)
    return found


def check(name: str, outcome: Outcome) -> None:
    """As an H200 has it."""
    found = compare(name, outcome)
    share, gap = found.pop("out")
    assert share == 1.0 if "exact" in name else share > 0.99 and gap < 2**-8, (share, gap)
    assert all(gap < 2**-21 for _, gap in found.values()), found


def run(name: str) -> None:
    outcome, reports = prepare(CASES["h200"][name], "h200").run(SCHEDULES[1])
    assert all(report.ok for report in reports)
    check(name, outcome)


@pytest.mark.compile
@pytest.mark.skipif(triton_version()[:2] != (3, 6), reason="the H200 had Triton 3.6")
@pytest.mark.parametrize("name", QUICK["h200"])
def test_what_an_h200_has_of_every_kind(name: str) -> None:
    run(name)


@pytest.mark.executed
@pytest.mark.parametrize("name", sorted(CASES["h200"].keys() - QUICK["h200"].keys()))
def test_what_an_h200_has(name: str) -> None:
    run(name)
