"""Inline assembly: the meaning of the strings kernels use.

The simulator does not interpret assembly. Each entry pairs a pattern with a Python function that
does what the assembly does to whole tensors; `register` adds more. A kernel's file may bring its
own: `ASM_MEANINGS = {"RESCALE_DONE": lambda out, factor: out * factor}` maps a pattern found in the
string to a function of the operands. An unknown string raises, so a kernel never runs with an
instruction silently dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from openmla.errors import Unsupported
from openmla.sim import dtypes
from openmla.sim.clocks import Clock
from openmla.sim.context import current
from openmla.sim.values import Pointer, Tensor, scalar

Meaning = Callable[[re.Match[str], Sequence[Any]], Any]

_MEANINGS: list[tuple[re.Pattern[str], Meaning]] = []


def register(pattern: str, meaning: Meaning) -> None:
    """Teach the simulator an assembly string: `meaning(match, args)` returns the outputs.

    The pattern is searched in the string with its whitespace squeezed; the latest entry wins.
    """
    _MEANINGS[:] = [entry for entry in _MEANINGS if entry[0].pattern != pattern]
    _MEANINGS.insert(0, (re.compile(pattern), meaning))


def inline_asm_elementwise(
    asm: str, constraints: str = "", args: Sequence[Any] = (), *_: Any, **__: Any
) -> Any:
    """Look the string up and do what it means."""
    text = " ".join(asm.split())
    for pattern, meaning in _MEANINGS:
        match = pattern.search(text)
        if match:
            return meaning(match, args)
    raise Unsupported(
        f"the simulator does not know the inline assembly {text[:120]!r}",
        "openmla.sim.register_asm(pattern, meaning)",
    )


def _named_barrier(match: re.Match[str], args: Sequence[Any]) -> Tensor:
    """bar.sync waits for its generation; bar.arrive does not."""
    agent = current()
    number = int(args[0]) if match["id"] == "$1" else int(match["id"])
    barrier = agent.cta.named_barrier(number, int(match["threads"]))
    clock = agent.clock.copy()
    agent.clock.tick(agent.component)
    generation = barrier.arrive(
        clock, agent.num_warps * 32, agent.time, agent.report, agent.component
    )
    if match["kind"] == "arrive":
        agent.yield_()
        return scalar(0)
    agent.wait(
        lambda: barrier.generation != generation,
        lambda: f"named barrier {barrier.number}: {barrier.arrived} of {barrier.threads} threads",
        lambda: barrier.completed_at,
    )
    agent.barriers += 1  # not by bar.arrive: its warps go on without one another
    published: Clock = barrier.published
    agent.clock.join(published)
    return scalar(0)


def _trusted(match: re.Match[str], args: Sequence[Any]) -> Tensor:
    """A kernel says that wgmma sees the copies it waited for, by the hardware and not a fence."""
    current().clock.trust_copies()
    return scalar(0)


def _atomic_add(match: re.Match[str], args: Sequence[Any]) -> Tensor:
    """One atomic add of 1 per warp, broadcast to its lanes. One warp is assumed."""
    pointer: Pointer = args[0]
    current().yield_()
    buffer = pointer.buffer
    position, _ = buffer.resolve(pointer, None, "atomic")
    at = int(position)
    old = int(buffer.flat[at])
    buffer.flat[at] = old + int(match["amount"])
    return scalar(old)


def _pack_bf16(match: re.Match[str], args: Sequence[Any]) -> Tensor:
    """cvt.rn.bf16x2.f32 $0, $2, $1: the first operand goes to the low half."""
    low, high = (dtypes.bfloat16.encode(a.value).astype(np.uint32) for a in args)
    return Tensor((low | (high << np.uint32(16))).view(np.int32), dtypes.int32)


def _unpack_bf16(match: re.Match[str], args: Sequence[Any]) -> tuple[Tensor, Tensor]:
    word = np.ascontiguousarray(args[0].value).view(np.uint32)
    low = dtypes.bfloat16.decode((word & np.uint32(0xFFFF)).astype(np.uint16))
    high = dtypes.bfloat16.decode((word >> np.uint32(16)).astype(np.uint16))
    return Tensor(low, dtypes.bfloat16), Tensor(high, dtypes.bfloat16)


def _pack_fp16(match: re.Match[str], args: Sequence[Any]) -> Tensor:
    low, high = (dtypes.float16.encode(a.value).view(np.uint16).astype(np.uint32) for a in args)
    return Tensor((low | (high << np.uint32(16))).view(np.int32), dtypes.int32)


def _unpack_fp16(match: re.Match[str], args: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """The same string as for bf16; a comment at its end tells them apart."""
    word = np.ascontiguousarray(args[0].value).view(np.uint32)
    halves = [(word >> np.uint32(shift)).astype(np.uint16).view(np.float16) for shift in (0, 16)]
    low, high = (Tensor(dtypes.float16.decode(half), dtypes.float16) for half in halves)
    return low, high


def _widen_e4m3(match: re.Match[str], args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Four e4m3 values of a word, lowest byte first, times an fp32 each, rounded to bf16."""
    word = np.ascontiguousarray(args[0].value).view(np.uint32)
    shifts = (np.uint32(8 * i) for i in range(4))
    values = [dtypes.float8e4nv.decode((word >> shift).astype(np.uint8)) for shift in shifts]
    scale = np.asarray(args[1].value, np.float32)
    return tuple(Tensor(dtypes.bfloat16.round(v * scale), dtypes.bfloat16) for v in values)


def _unary(function: Callable[[Any], Any], unit: str) -> Meaning:
    def apply(match: re.Match[str], args: Sequence[Any]) -> Tensor:
        x: Tensor = args[0]
        current().charge(np.size(x.data), unit)
        return Tensor(x.dtype.round(function(x.value)), x.dtype, x.split, x.layout)

    return apply


def _builtin() -> None:
    flags = r"(\.(approx|ftz|rn))*"
    register(r"^mov\.(b32|u32|s32) \$0, (?P<n>-?\d+);$", lambda m, _: scalar(int(m["n"])))
    register(r"^mov\.u32 \$0, %ctaid\.x;$", lambda m, _: scalar(current().cta.cluster.program[0]))
    register(
        r"^mov\.u32 \$0, %nctaid\.x;$", lambda m, _: scalar(current().cta.cluster.machine.grid[0])
    )
    register(
        r"^bar(rier)?\.(?P<kind>sync|arrive) (?P<id>\d+|\$1), (?P<threads>\d+);", _named_barrier
    )
    register(r"// copies that have arrived are seen by wgmma$", _trusted)
    register(r"atom\.global\.add\.u32 \w+, \[\$1\], (?P<amount>\d+);", _atomic_add)
    register(r"^(prefetch|griddepcontrol)\.", lambda m, _: scalar(0))
    register(r"^cvt\.rn\.bf16x2\.f32 \$0, \$2, \$1;$", _pack_bf16)
    register(r"^mov\.b32 \{\$0, \$1\}, \$2;$", _unpack_bf16)
    register(r"^cvt\.rn\.f16x2\.f32 \$0, \$2, \$1;$", _pack_fp16)
    register(r"^mov\.b32 \{\$0, \$1\}, \$2; // f16$", _unpack_fp16)
    register(r"cvt\.rn\.f16x2\.e4m3x2 .* mul\.f32 .* cvt\.rn\.bf16x2\.f32 ", _widen_e4m3)
    register(rf"^ex2{flags}\.f32 \$0, \$1;$", _unary(np.exp2, "exp"))
    register(rf"^lg2{flags}\.f32 \$0, \$1;$", _unary(np.log2, "exp"))
    register(rf"^rcp{flags}\.f32 \$0, \$1;$", _unary(lambda v: np.float32(1) / v, "exp"))
    register(r"^s_mov_b32 \$0, (?P<n>-?\d+)$", lambda m, _: scalar(int(m["n"])))
    register(r"^(s_setprio|s_sched_barrier|s_barrier|s_nop|s_waitcnt)\b", lambda m, _: scalar(0))


_builtin()
