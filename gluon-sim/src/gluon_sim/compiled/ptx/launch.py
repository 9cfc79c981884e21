"""A launch of compiled PTX: parameters and tensor maps from the arguments, then every cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from gluon_sim.compiled.core.buffers import Buffers
from gluon_sim.compiled.core.numbers import MASK32
from gluon_sim.compiled.core.report import Log, UnknownInstruction
from gluon_sim.compiled.core.schedule import Schedule
from gluon_sim.compiled.ptx.parse import Kernel, Parameter
from gluon_sim.compiled.ptx.state import PARAMETER_BASE, PARAMETER_STEP, Cluster, Launch
from gluon_sim.compiled.ptx.units.tensor_map import TensorMap
from gluon_sim.stream import Launch as StreamLaunch

_TENSOR_MAP_BYTES = 128


@lru_cache(maxsize=64)
def parsed(text: str) -> Kernel:
    """The kernel of a text, read once."""
    return Kernel(text)


def run(
    compiled: Any,
    programs: int,
    arguments: Mapping[str, Any],
    buffers: Buffers,
    schedule: Schedule,
    log: Log,
    executed: Counter[int],
    kernel: Kernel | None = None,
    stream: StreamLaunch | None = None,
) -> int:
    """Run every cluster, one after another; returns the number of instructions."""
    metadata = compiled.metadata
    kernel = kernel or parsed(compiled.asm["ptx"])
    parameters, maps = _parameters(kernel, arguments, buffers, metadata)
    size = int(metadata.num_ctas)
    launch = Launch(
        kernel,
        buffers.memory,
        int(metadata.shared),
        parameters,
        maps,
        programs * size,
        strict_loads=_waits_for_loads(kernel),
        stream=stream or StreamLaunch(0, kernel.name),
    )
    total = 0
    for program in range(programs):
        buffers.memory.program = program
        cluster = Cluster(launch, program * size, size, schedule, log)
        try:
            total += cluster.run()
        finally:
            if log.trace is not None:
                log.trace.program(cluster.warps)
            for warp in cluster.warps:
                executed.update({at: hits for at, hits in enumerate(warp.hits) if hits})
    return total


def _waits_for_loads(kernel: Kernel) -> bool:
    """Whether the text waits for tcgen05.ld before it uses what was loaded, as PTX demands.

    Triton 3.9 puts waits only where the order of memory needs them. The machine code is right all
    the same: every load sets a scoreboard that its first reader waits for.
    """
    loading: set[int] = set()
    for instruction in kernel.code:
        if instruction.op.startswith("tcgen05.wait::ld"):
            loading.clear()
        elif instruction.op.startswith("tcgen05.ld"):
            loading |= instruction.uses
        elif not loading.isdisjoint(instruction.uses):
            return False
    return True


def _parameters(
    kernel: Kernel, arguments: Mapping[str, Any], buffers: Buffers, metadata: Any
) -> tuple[dict[str, bytes], dict[int, TensorMap]]:
    """Parameter values by name, and tensor maps by their generic address."""
    values: dict[str, bytes] = {}
    maps: dict[int, TensorMap] = {}
    left = iter(enumerate(kernel.parameters))
    described = iter(getattr(metadata, "tensordesc_meta", None) or [])
    for value in arguments.values():
        number, parameter = next(left)
        if hasattr(value, "block_shape"):
            at = PARAMETER_BASE + PARAMETER_STEP * number
            maps[at] = _tensor_map(value, next(described), buffers, parameter)
            _shape_and_strides(value, left, values)
        else:
            values[parameter.name] = _packed(value, parameter, buffers)
    for _, parameter in left:  # scratch memory, which none of these kernels uses
        values[parameter.name] = bytes(8)
    return values, maps


def _packed(value: Any, parameter: Parameter, buffers: Buffers) -> bytes:
    if isinstance(value, torch.Tensor):
        return buffers.address(value).to_bytes(8, "little")
    if isinstance(value, float):
        return np.float32(value).tobytes()
    size = 8 if parameter.type in ("u64", "b64", "s64") else 4
    return (int(value) & (1 << 8 * size) - 1).to_bytes(size, "little")


def _tensor_map(value: Any, meta: Any, buffers: Buffers, parameter: Parameter) -> TensorMap:
    if parameter.count != _TENSOR_MAP_BYTES or getattr(value, "padding", "zero") != "zero":
        raise UnknownInstruction(f"tensor map in parameter {parameter}")
    return TensorMap(
        buffers.address(value.base),
        value.shape,
        value.strides,
        meta["block_size"],
        int(meta["elem_size"]),
        int(meta["swizzle"]),
    )


def _shape_and_strides(
    value: Any, left: Iterator[tuple[int, Parameter]], values: dict[str, bytes]
) -> None:
    """What Triton hands over beside a tensor map."""
    for size in value.shape:
        values[next(left)[1].name] = (int(size) & MASK32).to_bytes(4, "little")
    for stride in value.strides:
        values[next(left)[1].name] = int(stride).to_bytes(8, "little")
