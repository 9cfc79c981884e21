"""Compiled Gluon kernels executed on a CPU: Triton's PTX (sm_90, sm_100) and its gfx950 assembly.

>>> compiled = triton.compile(source, target=target)                       # doctest: +SKIP
>>> report = execute(compiled, programs, {"q": q, "o": o}, outputs=["o"])  # doctest: +SKIP
>>> report.raise_if_bad()                                                  # doctest: +SKIP

`gluon_sim.simulate` runs the Python text of a kernel. This runs what the compiler made of it, with
layouts, descriptors, swizzles, barriers and waits as they are in the text that goes to the
assembler. Asynchronous work completes early, late or at random; memory and registers start
poisoned; every access is checked. What every instruction's meaning rests on: `semantics`.
"""

from __future__ import annotations

from gluon_sim.compiled.core.launches import Launches
from gluon_sim.compiled.core.report import (
    Fault,
    Finding,
    Kind,
    Location,
    Report,
    UnknownInstruction,
)
from gluon_sim.compiled.core.schedule import DEFAULT as SCHEDULES
from gluon_sim.compiled.core.schedule import THOROUGH, Schedule
from gluon_sim.compiled.core.trace import EQUAL, LineSlack, Loop, Trace
from gluon_sim.compiled.launch import execute, parse

__all__ = [
    "EQUAL",
    "SCHEDULES",
    "THOROUGH",
    "Fault",
    "Finding",
    "Kind",
    "Launches",
    "LineSlack",
    "Location",
    "Loop",
    "Report",
    "Schedule",
    "Trace",
    "UnknownInstruction",
    "execute",
    "parse",
]
