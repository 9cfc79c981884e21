"""Operands of an instruction as functions of a wave, and the registers they name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from gluon_sim.compiled.core.numbers import MASK32, MASK64, Array
from gluon_sim.compiled.core.report import UnknownInstruction
from gluon_sim.compiled.gfx950.state import ACCUMULATORS, EXEC, M0, VCC, Wave

Read = Callable[[Wave], Array]
Scalar = Callable[[Wave], int]
Run = Callable[[Wave], object]
"""What an instruction does to a wave; it returns True where the wave must wait and try again."""

_NAMED = {
    "vcc": (VCC, 2),
    "vcc_lo": (VCC, 1),
    "vcc_hi": (VCC + 1, 1),
    "exec": (EXEC, 2),
    "exec_lo": (EXEC, 1),
    "exec_hi": (EXEC + 1, 1),
    "m0": (M0, 1),
}
_REGISTER = re.compile(r"([vsa])(?:(\d+)|\[(\d+):(\d+)\])")


@dataclass(frozen=True)
class Registers:
    """`count` registers from `first` on; `vector` says of which kind."""

    vector: bool
    first: int
    count: int

    @property
    def all(self) -> range:
        """Their numbers."""
        return range(self.first, self.first + self.count)


def registers(token: str) -> Registers | None:
    """The registers that a token names, or None for a constant.

    >>> registers("v[4:7]")
    Registers(vector=True, first=4, count=4)
    """
    if token in _NAMED:
        return Registers(False, *_NAMED[token])
    found = _REGISTER.fullmatch(token)
    if found is None:
        return None
    first = int(found[2] or found[3])
    count = int(found[4] or first) - first + 1
    return Registers(found[1] != "s", first + (ACCUMULATORS if found[1] == "a" else 0), count)


def _constant(token: str) -> int:
    if "." in token:
        return int(np.float32(float(token)).view(np.uint32))
    try:
        return int(token, 0)
    except ValueError:
        raise UnknownInstruction(f"operand {token}") from None


def split(text: str) -> tuple[list[str], dict[str, str]]:
    """Operands and modifiers.

    >>> split("v1, v[2:3], off offset:16 lds")
    (['v1', 'v[2:3]', 'off'], {'offset': '16', 'lds': ''})
    """
    operands, depth, word = [], 0, ""
    for char in text:
        depth += (char in "[(") - (char in "])")
        if char == "," and not depth:
            operands.append(word.strip())
            word = ""
        else:
            word += char
    last, *rest = word.split() or [""]
    if last:
        operands.append(last)
    named = (item.partition(":") for item in rest)
    modifiers = {name: value for name, _, value in named}
    return operands, modifiers


@dataclass
class Form:
    """One instruction while it is built. Reading an operand notes its registers."""

    text: str
    op: str
    operands: list[str]
    modifiers: dict[str, str]
    reads: list[int] = field(default_factory=list)
    scalar_reads: list[int] = field(default_factory=list)

    @property
    def base(self) -> str:
        """The name without its encoding."""
        return re.sub(r"_(e32|e64|sdwa|dpp)$", "", self.op)

    def unknown(self) -> UnknownInstruction:
        """The error for an instruction, or a form of one, that is not known."""
        return UnknownInstruction(self.text)

    def allow(self, *modifiers: str) -> None:
        """Refuse any other modifier."""
        if set(self.modifiers) - set(modifiers):
            raise self.unknown()

    def number(self, name: str, default: int = 0) -> int:
        """The value of a modifier."""
        return int(self.modifiers.get(name) or default)

    def list(self, name: str, default: list[int]) -> list[int]:
        """The values of a modifier such as op_sel:[0,1]."""
        if name not in self.modifiers:
            return default
        return [int(x) for x in self.modifiers[name].strip("[]").split(",")]

    def use(self, named: Registers) -> None:
        """Note registers that the instruction reads."""
        (self.reads if named.vector else self.scalar_reads).extend(named.all)

    def named(self, number: int, vector: bool, count: int = 0) -> int:
        """The first register of an operand that must be of this kind, read or written."""
        found = registers(self.operands[number])
        if found is None or found.vector != vector or (count and found.count != count):
            raise self.unknown()
        return found.first

    def vector(self, number: int, count: int = 1) -> int:
        """The first of the vector registers that an operand reads."""
        first = self.named(number, True, count)
        self.use(Registers(True, first, count))
        return first

    def scalars(self, number: int, count: int) -> int:
        """The first of the scalar registers that an operand reads."""
        first = self.named(number, False, count)
        self.use(Registers(False, first, count))
        return first

    def u32(self, number: int) -> Read:
        """A reader of 32 bits in every lane."""
        found = registers(self.operands[number])
        if found is None:
            fixed = np.full(64, _constant(self.operands[number]) & MASK32, np.uint32)
            return lambda w: fixed
        self.use(found)
        first = found.first
        if found.vector:
            return lambda w: w.v[first]
        return lambda w: np.full(64, w.s[first], np.uint32)

    def f32(self, number: int) -> Read:
        """A reader of float32, with the signs that the operand asks for."""
        token = self.operands[number]
        negative = token.startswith("-") and not token[1:2].isdigit()
        token = token[1:] if negative else token
        absolute = token.startswith("|")
        plain = Form(self.text, self.op, [token.strip("|")], {}, self.reads, self.scalar_reads)
        bits = plain.u32(0)

        def read(w: Wave) -> Array:
            values = bits(w).view(np.float32)
            values = np.abs(values) if absolute else values
            return -values if negative else values

        return read if negative or absolute else lambda w: bits(w).view(np.float32)

    def u64(self, number: int) -> Read:
        """A reader of 64 bits in every lane."""
        found = registers(self.operands[number])
        if found is None:
            fixed = np.full(64, _constant(self.operands[number]) & MASK64, np.uint64)
            return lambda w: fixed
        self.use(found)
        first = found.first
        if found.vector:
            return lambda w: pair(w, first)
        return lambda w: np.full(64, w.get64(first), np.uint64)

    def s32(self, number: int) -> Scalar:
        """A reader of a scalar."""
        found = registers(self.operands[number])
        if found is None:
            fixed = _constant(self.operands[number]) & MASK32
            return lambda w: fixed
        if found.vector:
            raise self.unknown()
        self.use(found)
        first = found.first
        return lambda w: w.s[first]

    def s64(self, number: int) -> Scalar:
        """A reader of a scalar of 64 bits."""
        found = registers(self.operands[number])
        if found is None:
            fixed = _constant(self.operands[number]) & MASK64
            return lambda w: fixed
        if found.vector:
            raise self.unknown()
        self.use(found)
        first = found.first
        return lambda w: w.get64(first)


def pair(w: Wave, first: int) -> Array:
    """Two vector registers as 64 bits."""
    result: Array = w.v[first].astype(np.uint64) | w.v[first + 1].astype(np.uint64) << np.uint64(32)
    return result


def set_pair(w: Wave, first: int, values: Array) -> None:
    """Write 64 bits into two vector registers."""
    w.set(first, (values & np.uint64(MASK32)).astype(np.uint32))
    w.set(first + 1, (values >> np.uint64(32)).astype(np.uint32))
