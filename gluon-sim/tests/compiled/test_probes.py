"""Probes: what an H200 made of small programs, and what the interpreter makes of them.

probes_h200.npz was recorded on 2026-11-16 by benchmarks/device/executed_h200.py, twice, with the
same bits. What the chip calls an illegal instruction is not in it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compiled.probes import PROBES, Faulty
from gluon_sim.compiled import SCHEDULES, Kind

RECORDED = dict(np.load(Path(__file__).with_name("probes_h200.npz")).items())
APPROXIMATE = {"lanes ex2": 2, "lanes lg2": 2, "lanes rcp": 1}
"""Ulps by which the chip is off; of logarithms, those outside of -1 to 1."""


def ulps(ours: np.ndarray, chip: np.ndarray) -> np.ndarray:
    """Distances of float32 numbers; NaN is NaN, whatever its bits (the chip's are 0x7fffffff)."""
    x, y = ours.view(np.float32), chip.view(np.float32)
    steps = np.abs(ours.view(np.int32).astype(np.int64) - chip.view(np.int32))
    return np.where(np.isnan(x) & np.isnan(y), 0, steps)


@pytest.mark.parametrize("name", sorted(PROBES.keys() - APPROXIMATE.keys() & RECORDED.keys()))
def test_the_bits_of_an_h200(name: str):
    if name not in RECORDED:
        with pytest.raises(Faulty) as faulty:
            PROBES[name].run()
        assert faulty.value.args[0].kinds() == {Kind.ALIGNMENT}
        return
    for schedule in SCHEDULES[:2]:
        found = PROBES[name].run(schedule)
        same = found == RECORDED[name]
        if name.startswith("lanes"):
            same |= ulps(found, RECORDED[name]) == 0
        assert same.all(), np.flatnonzero(~same)[:5]


@pytest.mark.parametrize("name", APPROXIMATE)
def test_approximations_are_near(name: str):
    ours, chip = PROBES[name].run(), RECORDED[name]
    off = ulps(ours, chip)
    if name == "lanes lg2":
        off = np.where(np.abs(chip.view(np.float32)) < 1, 0, off)
    assert off.max() == APPROXIMATE[name]


def test_what_the_chip_refuses_is_refused():
    """A box whose columns do not begin at 16 bytes; and nothing else of these probes."""
    refused = {name for name in PROBES if name not in RECORDED}
    assert refused == {name for name in PROBES if name.endswith((" odd", " corner"))}
