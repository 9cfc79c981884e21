"""One kernel launch as data, shared by all kernel families that Triton compiles."""

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from openmla.errors import Unsupported
from openmla.sources import TurnBack

# Where a pointer may come from, besides arguments of the operator: memory of the launch's own.
WORKSPACE, COUNTER = "workspace", "counter of the stream"
COPY = "copy of an argument"  # apart from the workspace: its bytes follow from token counts
Sources = Mapping[str, str | tuple[str, ...]]
"""For each argument that is a pointer or a descriptor, the operator's argument it points into (or
several, of which a call has one; WORKSPACE last, where it may have none). A workspace is named
where it is written first; later kernels of the launch are found to use it by its memory."""
PLAIN_LAUNCH = {"enable_fp_fusion": True, "num_warps": 4, "num_stages": 3}
"""Options of small plain Triton kernels that no plan tunes: the defaults of Triton 3.6 to 3.8."""
RELIED_ON = {"enable_fp_fusion": True}
"""Options of Triton that every kernel relies on and whose default is Triton's to change. Products
are fused with sums: bits and speeds were measured so, and Triton 3.10 will fuse only if asked."""
_counters: dict[tuple[torch.device, int], Tensor] = {}
GRAPH_LAUNCHES = 1 << 14
"""Counters that are zeroed ahead for the launches of captured graphs, on each device."""
SECTOR = 8
"""Integers from one of these counters to the next: 32 bytes, a sector of L2."""
_counters_of_graphs: dict[torch.device, Iterator[Tensor]] = {}


class Extent(NamedTuple):
    """The size of one dimension of a tensor that a descriptor describes."""

    dimension: int
    size: int


class LaunchNumbers(NamedTuple):
    """What token counts decide of one kernel launch; everything else follows from the variant.

    A launcher's `numbers(plan, problem)` has them for every launch of a plan, by the functions that
    `calls` uses: so a kept launch can be made again for other counts.
    """

    programs: int
    arguments: Mapping[str, int | Extent]
    """Integers that the kernel takes, and dimensions of its descriptors, by name."""
    memory: Mapping[str, int] = {}
    """Bytes of the launch's own memory whose size they decide: COPY."""

    @property
    def integers(self) -> dict[str, int]:
        """The arguments without descriptors."""
        return {name: n for name, n in self.arguments.items() if not isinstance(n, Extent)}


@dataclass(frozen=True, eq=False)
class Call:
    """One kernel launch: `programs` programs on grid axis 0, which has no limit at 65535."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    sources: Sources = field(default_factory=dict)
    """Without them, a launch is never cached."""

    @property
    def keywords(self) -> dict[str, Any]:
        """Arguments of the kernel and options of its launch."""
        return {**RELIED_ON, **self.arguments}

    def run(self) -> Any:
        """Launch it; returns the compiled kernel.

        Where the compiler needs more of the chip than the plan estimated, nothing was launched.
        """
        try:
            return self.kernel[(self.programs,)](**self.keywords)
        except OutOfResources as error:
            raise Unsupported(f"{self.kernel.__name__}: {error}") from error

    def compile(self) -> Any:
        """Compile it for the current GPU, or take it from Triton's cache, without launching."""
        return self.kernel.warmup(grid=(self.programs,), **self.keywords)


def strides(name: str, x: Tensor | None, unit: int = 1) -> dict[str, int]:
    """Token and head strides in units of so many elements, as kernels name them; 0 for none."""
    token, head = (0, 0) if x is None else x.stride()[:2]
    return {f"{name}_stride_t": token // unit, f"{name}_stride_h": head // unit}


def vector(x: Tensor | None) -> Tensor | None:
    """A small operand with contiguous elements."""
    return x if x is None or x.is_contiguous() else x.contiguous()


def angles_of(turn: TurnBack | None) -> dict[str, Any]:
    """Arguments of a kernel whose results are turned back; TURNED: how many of its columns."""
    if turn is None:
        names = ("angles_ptr", "positions_ptr", "angle_lines", "angles_stride")
        return dict.fromkeys(names) | {"TURNED": 0}
    return {
        "angles_ptr": turn.table,
        "positions_ptr": vector(turn.positions),
        "angle_lines": turn.table.shape[0],
        "angles_stride": turn.table.stride(0),
        "TURNED": turn.columns,
    }


def counter_of_stream(device: torch.device, stream: int) -> Tensor:
    """The atomic counter, int32, from which persistent programs fetch their work items: one for
    all launches of the current stream, each of which finds it zero and leaves it so.

    It is kept, so it must not lie in a memory pool that is emptied or counted elsewhere: warm-up
    runs of torch.compile(mode="reduce-overhead") refuse to leave anything behind in theirs. Pools
    are those of a thread, so another thread allocates it, once.
    """
    counter = _counters.get((device, stream))
    if counter is None:
        with ThreadPoolExecutor(max_workers=1) as thread:
            current = torch.cuda.current_stream(device)
            counter = thread.submit(_zeros_of_stream, current, 1).result()
            if device not in _counters_of_graphs:
                zeros = thread.submit(_zeros_of_stream, current, GRAPH_LAUNCHES * SECTOR).result()
                current.synchronize()  # a graph may be replayed on another stream
                _counters_of_graphs[device] = map(partial(_first_of, zeros), range(GRAPH_LAUNCHES))
        _counters[device, stream] = counter
    return counter


def _zeros_of_stream(stream: torch.cuda.Stream, count: int) -> Tensor:
    with torch.cuda.stream(stream):
        return torch.zeros(count, dtype=torch.int32, device=stream.device)


def _first_of(zeros: Tensor, sector: int) -> Tensor:
    return zeros[sector * SECTOR : sector * SECTOR + 1]


def launch_counter(device: torch.device) -> Tensor:
    """The atomic counter of a launch on the current stream: zero, and left zero by the launch.

    A launch of a captured graph gets a counter of its own, since the graph may be replayed on any
    stream, beside anything but itself. It is one of those that were zeroed before the capture;
    where none of them is left, the graph zeroes a new one, which takes it a launch more.
    """
    if device.type != "cuda":
        return torch.zeros(1, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        made = next(_counters_of_graphs.get(device, iter(())), None)
        return torch.zeros(1, dtype=torch.int32, device=device) if made is None else made
    return counter_of_stream(device, driver.active.get_current_stream(device.index))


def scale_arguments(scale: float) -> dict[str, Any]:
    """The kernel multiplies by a positive factor; a scale that vanishes in fp32 makes scores 0.

    A factor of 0, also after rounding to fp32, would turn a masked score into 0 * inf.
    """
    factor = abs(scale) * math.log2(math.e)
    vanishes = factor < 2.0**-149
    return {
        "factor": 1.0 if vanishes else factor,
        "SIGN": 0 if vanishes else 1 if scale > 0 else -1,
    }
