"""Planted faults: what only compiled code shows, and synchronization taken out of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import compiling
import gluon_sim as sim
from compiled import faulty
from gluon_sim.compiled import SCHEDULES, execute, parse
from gluon_sim.compiled.removal import synchronizations, without

pytestmark = pytest.mark.compile
STEPS = 5


def compiled(kernel: Any, signature: dict[str, str], **constexprs: Any) -> Any:
    return compiling.compiled(kernel, signature, constexprs, "sm90", num_warps=4)


def test_a_loop_variable_that_is_not_handed_on():
    """The text says 0, 0, 1, 2, 3; the front end makes 0, 0, 0, 0, 0 of it."""
    simulated = torch.zeros(STEPS, dtype=torch.int32)
    sim.simulate(faulty.previous_tiles, (1,), (simulated, STEPS)).raise_if_bad()
    assert simulated.tolist() == [0, 0, 1, 2, 3]
    executed = torch.full((STEPS,), -1, dtype=torch.int32)
    kernel = compiled(faulty.previous_tiles, {"out_ptr": "*i32", "n": "i32"})
    execute(kernel, 1, {"out_ptr": executed, "n": STEPS}).raise_if_bad()
    assert executed.tolist() == [0, 0, 0, 0, 0]


def reversed_through_shared(kernel: Any, code: Any, schedule: Any) -> bool:
    """Whether a run is right and nothing was found."""
    x = torch.arange(256, dtype=torch.float32)
    out = torch.full((256,), torch.nan)
    given = {"x_ptr": x, "out_ptr": out}
    report = execute(kernel, 1, given, outputs=["out_ptr"], schedule=schedule, kernel=code)
    return report.ok and torch.equal(out, x.flip(0))


def test_every_barrier_that_is_needed_is_missed_when_it_goes():
    kernel = compiled(faulty.through_shared, {"x_ptr": "*fp32", "out_ptr": "*fp32"}, BLOCK=256)
    code = parse(kernel)
    assert all(reversed_through_shared(kernel, code, schedule) for schedule in SCHEDULES)
    barriers = synchronizations(code)
    assert "barrier" in barriers.values()
    for at in barriers:
        changed = without(code, at)
        assert not all(reversed_through_shared(kernel, changed, s) for s in SCHEDULES), code.code[
            at
        ]
