"""A launch of compiled gfx950 code: the argument block, then every workgroup."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from gluon_sim.compiled.core.buffers import Buffers
from gluon_sim.compiled.core.numbers import Array
from gluon_sim.compiled.core.report import Log, UnknownInstruction
from gluon_sim.compiled.core.schedule import Schedule
from gluon_sim.compiled.gfx950.parse import Kernel
from gluon_sim.compiled.gfx950.state import LANES, Wave, Workgroup
from gluon_sim.stream import Launch as StreamLaunch

_UNUSED = 0xA5  # what bytes of the argument block hold that belong to no argument


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
    _stream: StreamLaunch | None = None,
) -> int:
    """Run every workgroup, one after another; returns the number of instructions."""
    kernel = kernel or parsed(compiled.asm["amdgcn"])
    block = _argument_block(kernel, arguments, buffers, programs)
    address = buffers.memory.put(block, "kernel arguments", writable=False)
    waves, total = int(compiled.metadata.num_warps), 0
    for program in range(programs):
        buffers.memory.program = program
        size = int(compiled.metadata.shared)
        group = Workgroup(kernel, buffers.memory, size, program, schedule, log)
        group.waves = [_first_state(group, index, address, block) for index in range(waves)]
        try:
            total += group.run()
        finally:
            if log.trace is not None:
                log.trace.program(group.waves)
            for wave in group.waves:
                executed.update({at: hits for at, hits in enumerate(wave.hits) if hits})
    return total


def _argument_block(
    kernel: Kernel, arguments: Mapping[str, Any], buffers: Buffers, programs: int
) -> Array:
    block = np.full(max(kernel.argument_bytes, 4 * kernel.preloaded), _UNUSED, np.uint8)
    if len(arguments) > len(kernel.arguments):
        raise UnknownInstruction(f"{len(arguments)} arguments, {len(kernel.arguments)} expected")
    for value, place in zip(arguments.values(), kernel.arguments, strict=False):
        raw = _packed(value, place.size, buffers)
        block[place.offset : place.offset + place.size] = np.frombuffer(raw, np.uint8)
    for place in kernel.arguments[len(arguments) :]:  # the grid; scratch memory, which is not used
        value = programs if place.kind == "hidden_block_count_x" else 0
        block[place.offset : place.offset + place.size] = _bytes(value, place.size)
    return block


def _packed(value: Any, size: int, buffers: Buffers) -> bytes:
    if isinstance(value, torch.Tensor):
        return buffers.address(value).to_bytes(8, "little")
    if isinstance(value, float):
        return np.float32(value).tobytes()
    return (int(value) & (1 << 8 * size) - 1).to_bytes(size, "little")


def _bytes(value: int, size: int) -> Array:
    return np.frombuffer(value.to_bytes(size, "little"), np.uint8)


def _first_state(group: Workgroup, index: int, address: int, block: Array) -> Wave:
    """Registers as the command processor sets them: arguments, workgroup, lane numbers."""
    kernel, wave = group.kernel, Wave(group, index)
    at = 0
    for name in kernel.pointers:
        if name == "kernarg_segment_ptr":
            wave.set64(at, address)
        at += 2
    for word in block[: 4 * kernel.preloaded].view(np.uint32):
        wave.set32(at, int(word))
        at += 1
    if at != kernel.user_registers:
        raise UnknownInstruction(f"{at} of {kernel.user_registers} scalar registers are known")
    for number in (group.number, 0, 0):
        wave.set32(at, number)
        at += 1
    wave.pc = kernel.entry if kernel.preloaded else 0
    wave.set(0, (index * 64 + LANES).astype(np.uint32))
    return wave
