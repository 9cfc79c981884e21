"""Execute what Triton compiled, on a CPU."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from gluon_sim.compiled.core.buffers import Buffers
from gluon_sim.compiled.core.launches import Launches
from gluon_sim.compiled.core.report import Fault, Finding, Log, Report, UnknownInstruction
from gluon_sim.compiled.core.schedule import Schedule
from gluon_sim.compiled.core.trace import Trace

_FIRST = Schedule()
_KERNEL_ARGUMENTS = 4096  # bytes set aside for them on AMD, where they lie in memory


def execute(
    compiled: Any,
    programs: int,
    arguments: Mapping[str, Any],
    *,
    outputs: Collection[str] | None = None,
    schedule: Schedule = _FIRST,
    kernel: Any = None,
    trace: bool = False,
    launches: Launches | None = None,
    dependent: bool = False,
    contended: Collection[str] = (),
) -> Report:
    """Run `programs` programs of a kernel that `triton.compile` made; tensors are written in place.

    `arguments` are the runtime arguments in the kernel's order: tensors on the CPU, tensor
    descriptors, integers, floats. `outputs` names those that may be written (None: all of them).
    `kernel` replaces the parsed kernel, for instance by one without a barrier. With `trace` the
    report has what the run shows about speed (`core.trace`). `launches` has those in front on the
    same stream; a `dependent` launch (`launch_pdl`) may begin before the last of them has ended.
    `contended` are arguments in which programs may overwrite one another's stores.

    Raises `UnknownInstruction` for code that the interpreter does not know.
    """
    log, executed = Log(trace=Trace() if trace else None), Counter[int]()
    buffers = Buffers(arguments, outputs, extra=_KERNEL_ARGUMENTS)
    buffers.let_overwrite(arguments[name] for name in contended)
    launches = launches or Launches()
    name = getattr(compiled.metadata, "name", "the launch in front")
    launch = launches.begin(name, dependent, buffers)
    started, total = time.perf_counter(), 0
    run = _interpreter(compiled)
    with np.errstate(all="ignore"):  # lanes overflow and divide by zero as the machine does
        try:
            total = run(
                compiled, programs, arguments, buffers, schedule, log, executed, kernel, launch
            )
        except Fault as fault:
            log.add(Finding(fault.kind, str(fault), fault.where, fault.who))
    buffers.copy_back()
    launches.end(launch, buffers)
    seconds = time.perf_counter() - started
    hits = tuple(executed[at] for at in range(1 + max(executed, default=-1)))
    return Report(
        tuple(log.findings), dict(log.notes), total, seconds, str(schedule), hits, log.trace
    )


def parse(compiled: Any) -> Any:
    """The kernel that `execute` would run."""
    if "ptx" in compiled.asm:
        from gluon_sim.compiled.ptx.launch import parsed as parsed_ptx

        return parsed_ptx(compiled.asm["ptx"])
    from gluon_sim.compiled.gfx950.launch import parsed

    return parsed(compiled.asm["amdgcn"])


def _interpreter(compiled: Any) -> Any:
    if "ptx" in compiled.asm:
        from gluon_sim.compiled.ptx.launch import run as run_ptx

        return run_ptx
    if "amdgcn" in compiled.asm:
        from gluon_sim.compiled.gfx950.launch import run

        return run
    raise UnknownInstruction(f"compiled code of kinds {', '.join(compiled.asm)}")
