"""Runs the PTX of inline assembly, instruction by instruction, on all threads at once.

A register is an array of bits with one element per thread (or, where a text treats elements one by
one, per element of the tensor), so what an instruction computes follows from its text alone:

    cvt.rn.bf16x2.f32 p, f1, f0;    f0, f1: uint32 arrays, seen as float32; f1 goes to the high half

Only the instructions in the tables below are known. Another one, another rounding mode included,
raises `Unsupported`: nothing is guessed and nothing is skipped.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gluon_sim.errors import Unsupported
from gluon_sim.machine.context import current
from gluon_sim.report.findings import Kind
from gluon_sim.values import dtypes
from gluon_sim.values.dtypes import Array, DType
from gluon_sim.values.tensors import Pointer

WARP = 32
Operand = str | tuple[str, ...]  # a register or number; several in braces

_LINE = re.compile(r"(?s)(?:@(?P<guard>!?\w+)\s+)?(?P<opcode>[a-z][\w.]*)\s*(?P<operands>.*)")
_OPERAND = re.compile(r"\{[^}]*\}|[^,{}\s][^,{}]*")
_ACROSS_LANES = re.compile(r"%laneid|\b(?:vote|shfl)\.")


@dataclass(frozen=True)
class Instruction:
    """One instruction, or a label alone."""

    opcode: str
    operands: tuple[Operand, ...] = ()
    guard: str = ""  # "p" or "!p"
    label: str = ""


@dataclass(frozen=True)
class Program:
    """A text, parsed. `across_lanes`: it needs to know which threads form a warp."""

    text: str
    instructions: tuple[Instruction, ...]
    across_lanes: bool


@functools.cache
def parse(text: str) -> Program:
    """Instructions of a text without comments.

    >>> parse("{ .reg .b32 t; mov.b32 t, $1; @p mul.f32 $0, t, $2; }").instructions[1]
    Instruction(opcode='mul.f32', operands=('$0', 't', '$2'), guard='p', label='')
    """
    body = text.strip()
    if body.startswith("{") and body.endswith("}"):
        body = body[1:-1]
    found: list[Instruction] = []
    for part in body.split(";"):
        line = part.strip()
        while label := re.match(r"([A-Za-z_]\w*):\s*", line):
            found.append(Instruction("", label=label[1]))
            line = line[label.end() :]
        if not line or line.startswith(".reg "):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise Unsupported(f"the simulator cannot read the inline assembly {line!r}")
        operands = tuple(_operand(o) for o in _OPERAND.findall(match["operands"]))
        found.append(Instruction(match["opcode"], operands, match["guard"] or ""))
    return Program(text, tuple(found), bool(_ACROSS_LANES.search(text)))


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(part.strip() for part in text[1:-1].split(","))
    return text.strip()


# -- instructions that compute a result of their operands
def _float(function: Callable[..., Any]) -> Callable[..., Array]:
    def apply(*bits: Array) -> Array:
        result = np.asarray(function(*[b.view(np.float32) for b in bits]), np.float32)
        current().charge(result.size)
        return result.view(np.uint32)

    return apply


def _two_of_floats(dtype: DType) -> Callable[..., Array]:
    """cvt.rn.<dtype>x2.f32 d, a, b: a becomes the high half."""

    def apply(high: Array, low: Array) -> Array:
        upper, lower = (
            np.asarray(dtype.encode(x.view(np.float32))).view(np.uint16).astype(np.uint32)
            for x in (high, low)
        )
        return upper << np.uint32(16) | lower

    return apply


def _two_to_e4m3(high: Array, low: Array) -> Array:
    """cvt.rn.satfinite.e4m3x2.f32 d, a, b: a becomes the high byte."""
    upper, lower = (
        np.asarray(dtypes.float8e4nv.encode(x.view(np.float32))).astype(np.uint16)
        for x in (high, low)
    )
    return upper << np.uint16(8) | lower


def _two_of_e4m3(pair: Array) -> Array:
    low, high = (
        dtypes.float16.encode(dtypes.float8e4nv.decode((pair >> np.uint16(s)).astype(np.uint8)))
        for s in (0, 8)
    )
    upper, lower = (np.asarray(x).view(np.uint16).astype(np.uint32) for x in (high, low))
    return upper << np.uint32(16) | lower


def _permuted(low: Array, high: Array, places: Array) -> Array:
    """prmt.b32 d, a, b, c: byte i of d is the one of b:a that digit i of c names."""
    eight = np.asarray(high.astype(np.uint64) << np.uint64(32) | low)
    result = np.zeros_like(low)
    for i in range(4):
        digit = places >> np.uint32(4 * i) & np.uint32(15)
        if (digit > 7).any():
            raise Unsupported("prmt.b32 that spreads a sign")
        byte = eight >> (digit.astype(np.uint64) * np.uint64(8)) & np.uint64(255)
        result |= byte.astype(np.uint32) << np.uint32(8 * i)
    return result


def _shifted(a: Array, by: Array, shift: Callable[..., Array]) -> Array:
    """shl.b32, shr.u32: a shift by 32 places or more leaves nothing."""
    return np.where(by < 32, shift(a, np.minimum(by, np.uint32(31))), np.uint32(0))


def _fused(a: Array, b: Array, c: Array) -> Array:
    """a * b + c, the product exact."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _two_products(a: Array, b: Array) -> Array:
    """mul.rn.bf16x2 d, a, b: of both halves; a product of two bf16 values is exact in fp64."""
    halves = []
    for shift in (16, 0):
        values = [(x >> np.uint32(shift) << np.uint32(16)).view(np.float32) for x in (a, b)]
        product = values[0].astype(np.float64) * values[1]
        bits = np.asarray(dtypes.bfloat16.encode(product.astype(np.float32))).view(np.uint16)
        halves.append(bits.astype(np.uint32))
    current().charge(2 * a.size)
    return halves[0] << np.uint32(16) | halves[1]


_RESULTS: dict[str, tuple[tuple[int, ...], Callable[..., Any]]] = {
    # opcode: bits of the operands, what it computes
    "mov.b32": ((32,), lambda a: a),
    "mov.u32": ((32,), lambda a: a),
    "mov.f32": ((32,), lambda a: a),
    "and.b32": ((32, 32), lambda a, b: a & b),
    "or.b32": ((32, 32), lambda a, b: a | b),
    "shl.b32": ((32, 32), lambda a, b: _shifted(a, b, np.left_shift)),
    "shr.u32": ((32, 32), lambda a, b: _shifted(a, b, np.right_shift)),
    "prmt.b32": ((32, 32, 32), _permuted),
    "selp.f32": ((32, 32, 1), lambda a, b, test: np.where(test, a, b)),
    "mul.f32": ((32, 32), _float(lambda a, b: a * b)),
    "add.f32": ((32, 32), _float(lambda a, b: a + b)),
    "max.f32": ((32, 32), _float(np.fmax)),  # the other one, where one is NaN
    "neg.f32": ((32,), _float(lambda a: -a)),
    "mul.rn.bf16x2": ((32, 32), _two_products),
    "ex2.approx.ftz.f32": ((32,), _float(np.exp2)),
    "fma.rn.f32": ((32, 32, 32), _float(_fused)),
    "cvt.f32.f16": ((16,), lambda a: a.view(np.float16).astype(np.float32).view(np.uint32)),
    "cvt.rn.f16x2.e4m3x2": ((16,), _two_of_e4m3),
    "cvt.rn.bf16x2.f32": ((32, 32), _two_of_floats(dtypes.bfloat16)),
    "cvt.rn.f16x2.f32": ((32, 32), _two_of_floats(dtypes.float16)),
    "cvt.rn.satfinite.e4m3x2.f32": ((32, 32), _two_to_e4m3),
}
_COMPARE: dict[str, tuple[type, Callable[..., Any]]] = {
    "neu.f32": (np.float32, np.not_equal),  # also of NaN
    "lt.f32": (np.float32, np.less),
    "gt.f32": (np.float32, np.greater),
    "lt.s32": (np.int32, np.less),
    "ge.s32": (np.int32, np.greater_equal),
    "eq.u32": (np.uint32, np.equal),
    "ne.b32": (np.uint32, np.not_equal),
}
_SETP = re.compile(r"setp\.(?P<test>\w+)(?P<join>\.or)?\.(?P<type>\w+)")


@functools.cache
def _number(operand: str, bits: int) -> Any:
    """The bits of a number as it stands in a text; None where this is none."""
    if re.fullmatch(r"0f[0-9A-Fa-f]{8}", operand):
        return np.uint32(int(operand[2:], 16))
    if re.fullmatch(r"-?\d+|0x[0-9A-Fa-f]+", operand):
        return np.dtype(f"u{bits // 8}").type(int(operand, 0) % 2**bits)
    return None


class Threads:
    """The threads that run a text: their registers, and which of them are not jumping over it.

    `shape` is that of a register; with `lanes` its last axis is a warp.
    """

    def __init__(self, shape: tuple[int, ...], lanes: bool, inputs: Mapping[str, Any]) -> None:
        self.shape = shape
        self.lanes = lanes
        self.registers: dict[str, Any] = dict(inputs)
        self.active = self._everybody = np.ones(shape, bool)
        self._some = True
        """Whether any thread is active; all are where `active` is `_everybody`."""
        self._jumping: dict[str, Array] = {}

    def run(self, program: Program) -> None:
        """Every instruction in turn."""
        for step in program.instructions:
            if step.label:
                self.active = self.active | self._jumping.pop(step.label, False)
                if self.active.all():
                    self.active = self._everybody
                self._some = bool(self.active.any())
                continue
            if not self._some:
                continue  # all threads jump over it
            on = self.active
            if step.guard:
                test = self.registers[step.guard.lstrip("!")]
                on = on & (~test if step.guard.startswith("!") else test)
            self._execute(step, on)
        if self._jumping:
            raise Unsupported(f"inline assembly that jumps back to {', '.join(self._jumping)}")

    def _execute(self, step: Instruction, on: Array) -> None:
        opcode, operands = step.opcode, step.operands
        if opcode in _RESULTS:
            widths, compute = _RESULTS[opcode]
            if len(operands) != 1 + len(widths):
                raise ValueError(f"{opcode} takes {1 + len(widths)} operands: {operands}")
            sources = [self._read(o, n) for o, n in zip(operands[1:], widths, strict=True)]
            self._write(operands[0], compute(*sources), on)
        elif match := _SETP.fullmatch(opcode):
            self._compare(match, operands, on)
        elif opcode == "bra.uni":
            self._jump(str(operands[0]), on)
        elif opcode in _EFFECTS:
            _EFFECTS[opcode](self, operands, on)
        else:
            raise Unsupported(f"the simulator does not know the instruction {opcode!r}")

    def _compare(self, match: re.Match[str], operands: tuple[Operand, ...], on: Array) -> None:
        name = f"{match['test']}.{match['type']}"
        if name not in _COMPARE:
            raise Unsupported(f"the simulator does not know the comparison {name!r}")
        kind, test = _COMPARE[name]
        result = test(*(self._read(o, 32).view(kind) for o in operands[1:3]))
        if match["join"]:
            result = result | self._read(operands[3], 1)
        self._write(operands[0], result, on)

    def _jump(self, label: str, on: Array) -> None:
        split = on.any(-1) != on.all(-1) if self.lanes else np.asarray(on.any() != on.all())
        if split.any():
            current().report(Kind.ERROR, "bra.uni: the lanes of a warp do not agree")
        self._jumping[label] = self._jumping.get(label, np.zeros(self.shape, bool)) | on
        self.active = self.active & ~on
        self._some = bool(self.active.any())

    # -- registers
    def _read(self, operand: Operand, bits: int) -> Array:
        """The bits of a source, as unsigned numbers of that width (1: a predicate)."""
        if isinstance(operand, tuple):
            low, high = (self._read(o, bits // 2).astype(f"u{bits // 8}") for o in operand)
            return np.asarray(high << np.asarray(bits // 2, high.dtype) | low)
        if operand == "%laneid":
            return np.broadcast_to(np.arange(WARP, dtype=np.uint32), self.shape)
        value = self.registers.get(operand)
        if value is None:
            if (number := _number(operand, bits)) is None:
                raise ValueError(f"inline assembly reads {operand} before it is written")
            return np.full(self.shape, number)
        if (1 if value.dtype == bool else 8 * value.itemsize) != bits:
            raise ValueError(f"inline assembly takes {operand} for a register of {bits} bits")
        return np.asarray(value)

    def _write(self, operand: Operand, bits: Array, on: Array) -> None:
        if isinstance(operand, tuple):
            half = 4 * bits.itemsize
            for i, name in enumerate(operand):
                shifted = bits >> np.asarray(i * half, bits.dtype)
                self._write(name, np.asarray(shifted).astype(f"u{half // 8}"), on)
            return
        if on is not self._everybody and (on is self.active or not on.all()):
            if operand not in self.registers and operand.startswith("$"):
                raise ValueError(f"only some threads write {operand}, which has no value before")
            unknown = ~np.zeros((), bits.dtype)  # all ones: NaN
            bits = np.where(on, bits, self.registers.get(operand, unknown))
        # Nothing writes into an array, so two registers may be one.
        self.registers[operand] = (
            bits if bits.shape == self.shape else np.array(np.broadcast_to(bits, self.shape))
        )

    def result(self, name: str) -> Array:
        """The bits of an output, which every thread must have written."""
        if name not in self.registers:
            raise ValueError(f"inline assembly does not write its output {name}")
        return np.asarray(self.registers[name])

    # -- instructions with an effect
    def vote_any(self, operands: tuple[Operand, ...], on: Array) -> None:
        """vote.sync.any.pred p, q, -1: whether q holds in some lane of the warp."""
        self._whole_warps(operands[2], on)
        some = self._read(operands[1], 1).any(-1, keepdims=True)
        self._write(operands[0], np.asarray(some), on)

    def shuffle(self, operands: tuple[Operand, ...], on: Array) -> None:
        """shfl.sync.idx.b32 d, a, lane, 31, -1: the value of one lane."""
        self._whole_warps(operands[4], on)
        if operands[3] != "31":
            raise Unsupported(f"shfl.sync with the bounds {operands[3]}")
        value, lane = self._read(operands[1], 32), self._read(operands[2], 32)
        self._write(operands[0], np.take_along_axis(value, lane.astype(np.int64), -1), on)

    def exchange(self, operands: tuple[Operand, ...], on: Array) -> None:
        """shfl.sync.bfly.b32 d, a, bits, 31, -1: the value of the lane whose number differs in
        those bits."""
        bits = self._read(operands[2], 32)
        lane = np.broadcast_to(np.arange(WARP, dtype=np.uint32), self.shape) ^ bits
        self.registers["%other"] = lane
        self.shuffle((operands[0], operands[1], "%other", *operands[3:]), on)

    def _whole_warps(self, mask: Operand, on: Array) -> None:
        if not self.lanes:
            raise Unsupported("inline assembly across the lanes of a warp, one element at a time")
        if mask != "-1" or (on.any(-1) != on.all(-1)).any():
            current().report(Kind.ERROR, "a sync instruction that not all lanes of a warp execute")

    def atomic_add(self, operands: tuple[Operand, ...], on: Array) -> None:
        """atom.global.add.u32 d, [a], n: one after the other, every thread that executes it."""
        address, amount = str(operands[1]).strip("[]"), self._read(operands[2], 32)
        pointer = self.registers[address]
        assert isinstance(pointer, Pointer)
        current().yield_()
        buffer = pointer.buffer
        at = int(buffer.resolve(pointer, None, "atomic")[0])
        buffer.touch_atomically(np.asarray(at), None, hands_on=False)
        old = np.zeros(self.shape, np.uint32)
        for thread in np.argwhere(on):
            place = tuple(thread)
            old[place] = int(buffer.flat[at]) & 0xFFFFFFFF
            buffer.flat[at] = np.uint32(old[place] + amount[place]).view(np.int32)
        self._write(operands[0], old, on)

    def store_shared(self, operands: tuple[Operand, ...], on: Array) -> None:
        """st.shared: kernels have one that never happens."""
        if on.any():
            raise Unsupported("inline assembly that stores to shared memory")

    def named_barrier(self, operands: tuple[Operand, ...], on: Array, wait: bool) -> None:
        """bar.sync and bar.arrive: every thread of the partition, at the same barrier."""
        numbers, threads = (self._read(o, 32) for o in operands)
        if not on.all() or (numbers != numbers.flat[0]).any():
            current().report(Kind.BARRIER, "threads of a partition part at a named barrier")
        meet(int(numbers.flat[0]), int(threads.flat[0]), wait)


def meet(number: int, threads: int, wait: bool) -> None:
    """The running partition arrives at a named barrier; bar.sync waits for the others."""
    agent = current()
    barrier = agent.cta.named_barrier(number, threads)
    clock = agent.clock.copy()
    agent.clock.tick(agent.component)
    generation = barrier.arrive(
        clock, agent.num_warps * WARP, agent.time, agent.report, agent.component
    )
    if not wait:  # its warps go on without one another
        agent.yield_()
        return
    if agent.scheduler.observer is not None:
        agent.scheduler.observer.waited(f"barrier {number}", barrier.generation == generation)
    agent.wait(
        lambda: barrier.generation != generation,
        lambda: f"named barrier {barrier.number}: {barrier.arrived} of {barrier.threads} threads",
        lambda: barrier.completed_at,
    )
    touched = agent.warps.touched  # the compiler does not look into inline assembly
    agent.warps.meet()
    agent.warps.touched = touched
    agent.clock.join(barrier.published)


_EFFECTS: dict[str, Callable[[Threads, tuple[Operand, ...], Array], None]] = {
    "vote.sync.any.pred": Threads.vote_any,
    "shfl.sync.bfly.b32": Threads.exchange,
    "shfl.sync.idx.b32": Threads.shuffle,
    "atom.global.add.u32": Threads.atomic_add,
    "griddepcontrol.wait": lambda _threads, _operands, _on: current().wait_for_launch_in_front(),
    "griddepcontrol.launch_dependents": lambda _threads, _operands, _on: current().let_next_begin(),
    "st.shared.f32": Threads.store_shared,
    "bar.sync": functools.partial(Threads.named_barrier, wait=True),
    "bar.arrive": functools.partial(Threads.named_barrier, wait=False),
}
