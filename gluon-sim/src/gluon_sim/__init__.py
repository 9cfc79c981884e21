"""A CPU simulator for Gluon kernels: values, synchronization, races, deadlocks.

>>> import gluon_sim as sim                                                # doctest: +SKIP
>>> report = sim.simulate(kernel, grid, args, kwargs, seed=1)              # doctest: +SKIP
>>> report.raise_if_bad()                                                  # doctest: +SKIP

`intercept` does the same for host code that launches kernels itself.

The kernel file is not changed and not copied: the code object that Triton would compile is executed
on NumPy arrays. Partitions are scheduled one at a time by a seeded generator; TMA, cp.async, wgmma,
tcgen05 and LDS copies finish as early or as late as the rules allow. `Kind` lists what is checked;
the README says what is not modeled.

| here | what |
|---|---|
| launch.py, intercept.py | `simulate`, and the same around host code |
| language/ | Gluon's functions, and how a kernel's names lead to them |
| values/ | what registers hold |
| memory/ | shared, tensor and global memory |
| machine/ | partitions, barriers, operations in flight, the scheduler |
| report/ | findings, outputs, the timeline, what runs exercised |
| stream.py | launches that may run at the same time |
"""

from __future__ import annotations

from gluon_sim.errors import InvalidArgument, Unsupported
from gluon_sim.intercept import intercept
from gluon_sim.language.asm import register as register_asm
from gluon_sim.launch import Limits, simulate
from gluon_sim.memory.unreserved import unreserved
from gluon_sim.report.exercise import Exercise, Record, recording
from gluon_sim.report.findings import Finding, Kind, Report
from gluon_sim.report.gaps import Gap, gaps
from gluon_sim.report.timeline import Rates, Timeline
from gluon_sim.stream import contended_by

__all__ = [
    "Exercise",
    "Finding",
    "Gap",
    "InvalidArgument",
    "Kind",
    "Limits",
    "Rates",
    "Record",
    "Report",
    "Timeline",
    "Unsupported",
    "contended_by",
    "gaps",
    "intercept",
    "recording",
    "register_asm",
    "simulate",
    "unreserved",
]
