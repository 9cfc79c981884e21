"""The toys compiled and executed: what the simulator runs as Python, run as machine code."""

from __future__ import annotations

import doctest
import math
from typing import Any

import pytest

from gluon_sim.compiled import SCHEDULES, UnknownInstruction, execute, parse, semantics
from gluon_sim.compiled.core import numbers, source
from gluon_sim.compiled.gfx950 import operands as gfx950_operands
from gluon_sim.compiled.ptx import operands as ptx_operands
from gluon_sim.compiled.ptx.units import tensor_map
from launches import CASES
from launches.launch import Launch

# Products with scales in tensor memory are not known.
UNKNOWN = {"tcgen05_scaled"}


def compiled(launch: Launch) -> Any:
    if not launch.compiles:
        pytest.skip("this Triton does not compile it")
    return launch.compile()


def run(name: str, kernel: Any, schedule: Any, code: Any = None) -> bool:
    """Whether a fresh launch is right and nothing was found."""
    launch = CASES[name]()
    names = [n for n in getattr(launch.module, launch.kernel).arg_names if n not in launch.kwargs]
    given = dict(zip(names, launch.args, strict=True))
    report = execute(kernel, math.prod(launch.grid), given, schedule=schedule, kernel=code)
    try:
        launch.check()
    except AssertionError:
        return False
    return report.ok


@pytest.mark.compile
@pytest.mark.parametrize("name", sorted(set(CASES) - UNKNOWN))
def test_every_toy_computes_what_its_text_says(name):
    kernel = compiled(CASES[name]())
    assert all(run(name, kernel, schedule) for schedule in SCHEDULES[:2])


@pytest.mark.compile
@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_what_is_not_known_is_named(name):
    with pytest.raises(UnknownInstruction, match="block_scale"):
        parse(compiled(CASES[name]()))


@pytest.mark.parametrize(
    "module",
    [numbers, source, semantics, ptx_operands, gfx950_operands, tensor_map],
    ids=lambda module: module.__name__,
)
def test_examples(module):
    found = doctest.testmod(module)
    assert found.attempted and not found.failed
