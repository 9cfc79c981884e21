"""The toys compiled and executed: what the simulator runs as Python, run as machine code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from cases import CASES

from gluon_sim.compiled import SCHEDULES, execute
from launches import Launch
from openmla.aot.jobs import build, compile_job

pytestmark = pytest.mark.compile


def arguments(launch: Launch) -> Mapping[str, Any]:
    kernel = getattr(launch.module, launch.kernel)
    names = [name for name in kernel.arg_names if name not in launch.kwargs]
    return dict(zip(names, launch.args, strict=True))


def compiled(name: str, launch: Launch) -> Any:
    if not launch.compiles or compile_job(launch.job(name)).error:
        pytest.skip("this Triton does not compile it")
    return build(launch.job(name))


@pytest.mark.parametrize("name", CASES)
def test_every_toy_computes_what_its_text_says(name):
    launch = CASES[name]()
    kernel = compiled(name, launch)
    for schedule in SCHEDULES[:2]:
        given = arguments(launch)
        execute(kernel, math.prod(launch.grid), given, schedule=schedule).raise_if_bad()
        launch.check()
