"""`simulate`: one call runs a kernel over its grid and returns a report."""

from __future__ import annotations

import contextlib
import inspect
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gluon_sim.errors import InvalidArgument, Unsupported
from gluon_sim.language.loader import Loader, same_kind
from gluon_sim.machine import context
from gluon_sim.machine.clusters import Machine
from gluon_sim.machine.context import Location
from gluon_sim.machine.scheduler import Scheduler
from gluon_sim.memory.global_memory import Descriptor, GlobalBuffer
from gluon_sim.memory.history import History
from gluon_sim.report.exercise import observer_of
from gluon_sim.report.findings import Finding, Kind, Log, Report
from gluon_sim.report.outputs import output_faults
from gluon_sim.report.timeline import NOMINAL, Rates
from gluon_sim.stream import contended_by
from gluon_sim.values.dtypes import Array
from gluon_sim.values.tensors import Pointer, scalar

Outputs = Sequence[str] | Mapping[str, torch.Tensor]
# Options of a launch that change how code is generated, not what it does.
_LAUNCH_OPTIONS = (
    "num_stages",
    "llvm_fn_attrs",
    "maxnreg",
    "waves_per_eu",
    "matrix_instr_nonkdim",
    "launch_cooperative_grid",
    "enable_fp_fusion",
)


@dataclass(frozen=True)
class Limits:
    """When a run ends at the latest (steps of the scheduler, seconds, distinct findings), and what
    the chip demands."""

    steps: int = 2_000_000
    seconds: float = 600.0
    findings: int = 20
    load_alignment: int = 1
    """Bytes of which the first column of a TMA load must be a multiple. On an H200 16: a load of
    1 x 256 fp32 from a column between is an illegal instruction. Other chips were not tried."""
    fp8_bits: int = 0
    """Binary places that wgmma keeps of sums of FP8 products (values/fp8_sums.py): 13 on an H200.
    0: such sums are as any others."""


DEFAULT_LIMITS = Limits()


class _Arguments:
    """Kernel arguments as the simulator sees them, and the memory behind them."""

    def __init__(self, kernel: Any, loader: Loader, history: History) -> None:
        plain = kernel.fn
        self.signature = inspect.signature(plain)
        self.constexprs = {
            name
            for name, p in self.signature.parameters.items()
            if "constexpr" in getattr(p.annotation, "__name__", str(p.annotation))
        }
        self.tensors: dict[str, torch.Tensor] = {}
        self.counts: dict[tuple[int, int], Array] = {}
        self._loader = loader
        self._history = history
        self._contended = contended_by(kernel)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Names to simulated values."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return {
            name: self._loader.value(v) if name in self.constexprs else self._runtime(name, v)
            for name, v in bound.arguments.items()
        }

    def _buffer(self, name: str, tensor: torch.Tensor) -> GlobalBuffer:
        self.tensors[name] = tensor
        cells = self._history.cells(tensor)
        return GlobalBuffer(tensor, name, self.counts, cells, name in self._contended)

    def _runtime(self, name: str, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return Pointer(self._buffer(name, x))
        if isinstance(x, bool | int | float | np.generic):
            return scalar(x)
        if hasattr(x, "block_shape") and hasattr(x, "base"):
            return Descriptor(x, self._buffer(name, x.base))
        if isinstance(x, tuple):
            return same_kind(x, (self._runtime(f"{name}[{i}]", v) for i, v in enumerate(x)))
        if x is None:
            return None
        raise InvalidArgument(name, "a CPU tensor, a number or a tensor descriptor", type(x))


def _check_outputs(arguments: _Arguments, outputs: Outputs, log: Log) -> None:
    """Every element of an output is written exactly once (or, off its mask, never)."""
    masks = outputs if isinstance(outputs, Mapping) else dict.fromkeys(outputs)
    for name, mask in masks.items():
        if name not in arguments.tensors:
            raise InvalidArgument("outputs", f"names of {sorted(arguments.tensors)}", name)
        for finding in output_faults(name, arguments.tensors[name], arguments.counts, mask):
            log.add(finding)


def _grid(grid: int | Sequence[int]) -> tuple[int, int, int]:
    sizes = [grid] if isinstance(grid, int) else [int(n) for n in grid]
    x, y, z = (*sizes, 1, 1, 1)[:3]
    return x, y, z


def _refill(
    machine: Machine, body: Any, resident: int, programs: Sequence[tuple[int, int, int]]
) -> Any:
    """A callback that starts clusters until `resident` of them run."""
    waiting = [*reversed(programs)]

    def start() -> bool:
        scheduler = machine.scheduler
        scheduler.agents[:] = [a for a in scheduler.agents if not a.done]
        running = len({a.cta.cluster.program for a in scheduler.agents})
        if not waiting or running >= resident:
            scheduler.changed = False
            return False
        machine.launch(waiting.pop(), body)
        return True

    return start


def simulate(  # noqa: PLR0913
    kernel: Any,
    grid: int | Sequence[int],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    schedule: str = "random",
    outputs: Outputs = (),
    ignore: Iterable[Kind] = (),
    resident: int = 2,
    only: Sequence[int] | None = None,
    limits: Limits = DEFAULT_LIMITS,
    picture: str | Path | None = None,
    rates: Rates = NOMINAL,
    history: History | None = None,
) -> Report:
    """Run `kernel` over `grid` on the CPU and report what went wrong.

    `args` and `kwargs` are those of a launch: CPU tensors (results are written to them), numbers,
    tensor descriptors, constexprs, and the options `num_warps` (4) and `num_ctas` (1).
    `schedule`: "random" (by `seed`), "early", "late", "unfair" (by `seed`, partitions far ahead of
    one another), or "timed" (records a timeline).
    `outputs`: names of arguments every element of which must be written exactly once; a mapping
    gives a mask of the elements that must be (all others must not).
    `resident` clusters run side by side. `only` these programs of the grid's first axis run: a grid
    may be far longer than what can be simulated. `limits` end every run. `picture` writes the
    timeline of a "timed" run (.svg or .html), whose units work at `rates`. `history` has the
    launches in front on the same stream: with the option `launch_pdl` the last may still run.
    """
    options = dict(kwargs or {})
    history = history or History()
    launched = history.stream.begin(kernel.fn.__name__, bool(options.pop("launch_pdl", False)))
    num_warps, num_ctas = options.pop("num_warps", 4), options.pop("num_ctas", 1)
    for name in _LAUNCH_OPTIONS:
        options.pop(name, None)
    if num_ctas not in (1, 2):
        raise Unsupported(f"clusters of {num_ctas} CTAs: 1 or 2 are modeled")
    started = time.perf_counter()
    observer = observer_of(kernel)
    loader = Loader(None if observer is None else observer.branch)
    arguments = _Arguments(kernel, loader, history)
    bound = arguments.bind(args, options)
    entry = loader.function(kernel)
    log = Log(limits.findings, ignore)
    scheduler = Scheduler(schedule, seed, limits.steps, log, record=schedule == "timed")
    scheduler.load_alignment = limits.load_alignment
    scheduler.fp8_bits = limits.fp8_bits
    scheduler.rates = rates
    scheduler.observer = observer
    machine = Machine(
        scheduler, _grid(grid), num_warps, num_ctas, _pair_barriers(), history, launched
    )

    def body() -> None:
        agent = context.current()
        entry(**bound)
        agent.cta.check_exit(agent.clock)
        if observer is not None:
            observer.ended(agent.cta.cluster)

    programs = machine.programs() if only is None else [(x, 0, 0) for x in only]
    scheduler.on_idle = _refill(machine, body, resident, programs)
    if programs:
        with _one_thread():
            scheduler.run(limits.seconds)
    _explain(scheduler, log)
    if not log.findings:
        _check_outputs(arguments, outputs, log)
    if picture is not None:
        if scheduler.timeline is None:
            raise InvalidArgument("picture", 'None unless schedule="timed"', schedule)
        scheduler.timeline.write(picture)
    return Report(
        tuple(log.findings),
        scheduler.ended or "finished",
        scheduler.steps,
        time.perf_counter() - started,
        seed,
        schedule,
        machine.shared_bytes,
        machine.tmem_columns,
        scheduler.timeline,
        arguments.counts,
    )


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Tiles are small: splitting their arithmetic over threads costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _pair_barriers() -> bool:
    """Since triton 3.7 a barrier whose layout gives the second CTA no step lives in CTA 0 only."""
    version = getattr(sys.modules.get("triton"), "__version__", "3.6")
    major, minor = (int(n) for n in version.split(".")[:2])
    return (major, minor) >= (3, 7)


def _explain(scheduler: Scheduler, log: Log) -> None:
    """Turn an exception of the kernel into a finding; the simulator's own errors are raised."""
    error = scheduler.error
    if error is None:
        return
    if isinstance(error, Unsupported):
        raise error
    where, frame = Location("", 0), error.__traceback__
    while frame is not None:
        name = frame.tb_frame.f_code.co_filename
        if not name.startswith(context.PACKAGE):
            where = Location(name, frame.tb_lineno)
        frame = frame.tb_next
    if not where.file:
        raise error
    log.add(Finding(Kind.ERROR, f"{type(error).__name__}: {error}", where.file, where.line))
