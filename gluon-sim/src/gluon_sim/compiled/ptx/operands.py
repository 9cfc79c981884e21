"""Operands of an instruction as functions of a warp: readers, writers, addresses."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gluon_sim.compiled.core.numbers import MASK32, MASK64, Array
from gluon_sim.compiled.core.report import UnknownInstruction
from gluon_sim.compiled.ptx.block import SHARED_BASE
from gluon_sim.compiled.ptx.parse import FILES
from gluon_sim.compiled.ptx.state import LANES, PARAMETER_STEP, RANK_SHIFT, Warp

if TYPE_CHECKING:
    from gluon_sim.compiled.ptx.parse import Kernel

Read = Callable[[Warp], Array]
Write = Callable[[Warp, Array], None]

# How a lane holds a type of PTX.
TYPES = {
    "b8": "u8",
    "u8": "u8",
    "s8": "s8",
    "b16": "u16",
    "u16": "u16",
    "s16": "s16",
    "f16": "u16",
    "bf16": "u16",
    "b32": "u32",
    "u32": "u32",
    "s32": "s32",
    "f32": "f32",
    "b64": "u64",
    "u64": "u64",
    "s64": "s64",
    "f64": "f64",
    "pred": "pred",
    "f16x2": "u32",
    "bf16x2": "u32",
    "s16x2": "u32",
    "u16x2": "u32",
    "f32x2": "u64",
}
DTYPES: dict[str, type[np.generic]] = {
    "u8": np.uint8,
    "s8": np.int8,
    "u16": np.uint16,
    "s16": np.int16,
    "u32": np.uint32,
    "s32": np.int32,
    "f32": np.float32,
    "u64": np.uint64,
    "s64": np.int64,
    "f64": np.float64,
    "pred": np.bool_,
}
SIZES = {name: np.dtype(dtype).itemsize for name, dtype in DTYPES.items()}
_BANK_SIZES = {"b16": 2, "b32": 4, "b64": 8}

_SPECIAL: dict[str, Callable[[Warp], Any]] = {
    "%tid.x": lambda w: w.threads,
    "%laneid": lambda w: LANES,
    "%warpid": lambda w: w.index,
    "%ntid.x": lambda w: w.kernel.threads,
    "%ctaid.x": lambda w: w.block.number,
    "%ctaid.y": lambda w: 0,
    "%ctaid.z": lambda w: 0,
    "%nctaid.x": lambda w: w.cluster.launch.blocks,
    "%cluster_ctarank": lambda w: w.block.rank,
    "%cluster_ctaid.x": lambda w: w.block.rank,
    "%clusterid.x": lambda w: w.block.number // len(w.cluster.blocks),
}


def split(text: str) -> list[str]:
    """Operands between commas that are in no brackets.

    >>> split("{%r1, %r2}, [%rd1+4], 7")
    ['{%r1, %r2}', '[%rd1+4]', '7']
    """
    found, depth, word = [], 0, ""
    for char in text:
        depth += (char in "{[(") - (char in "}])")
        if char == "," and not depth:
            found.append(word.strip())
            word = ""
        else:
            word += char
    return [*found, word.strip()] if word.strip() else found


def elements(operand: str) -> list[str]:
    """The names in a vector operand, or the operand alone."""
    return split(operand[1:-1]) if operand.startswith("{") else [operand]


@dataclass(frozen=True)
class Form:
    """One instruction while it is built."""

    kernel: Kernel
    op: str
    parts: tuple[str, ...]
    operands: tuple[str, ...]

    @property
    def type(self) -> str:
        """The type at the end of the instruction's name, as lanes hold it."""
        if self.parts[-1] not in TYPES:
            raise self.unknown()
        return TYPES[self.parts[-1]]

    def has(self, *words: str) -> bool:
        """Whether the name has any of these parts."""
        return any(word in self.parts for word in words)

    def unknown(self) -> UnknownInstruction:
        """The error for an instruction, or a form of one, that is not known."""
        return UnknownInstruction(f"{self.op} {', '.join(self.operands)}")

    def read(self, number: int, kind: str = "") -> Read:
        """A reader of an operand."""
        return self.reader(self.operands[number], kind or self.type)

    def write(self, number: int = 0, kind: str = "") -> Write:
        """A writer of an operand, of active lanes only."""
        return self.writer(self.operands[number], kind or self.type)

    def register(self, name: str) -> int:
        """The number of a register in its file."""
        found = self.kernel.names.register(name)
        if found is None:
            raise self.unknown()
        return found[1]

    def reader(self, token: str, kind: str) -> Read:
        """A reader of a register, constant, special register or symbol."""
        found = self.kernel.names.register(token)
        if found is not None:
            return self._register_reader(*found, kind)
        if token in _SPECIAL:
            special = _SPECIAL[token]
            return lambda w: np.broadcast_to(np.uint32(special(w)), 32)
        if token.startswith("!"):
            positive = self.reader(token[1:], "pred")
            return lambda w: ~positive(w)
        if token == "global_smem":
            dtype = DTYPES[kind]
            return lambda w: np.full(32, w.block.rank << RANK_SHIFT | SHARED_BASE, dtype)
        value = constant(token, kind)
        if value is None:
            names = [parameter.name for parameter in self.kernel.parameters]
            if token not in names:
                raise self.unknown()
            value = np.full(32, PARAMETER_STEP * names.index(token), DTYPES[kind])
        value.flags.writeable = False
        fixed = value
        return lambda w: fixed

    def _register_reader(self, bank: str, number: int, kind: str) -> Read:
        if FILES.get(kind, kind) == bank:
            return lambda w: w.regs[kind][number]
        if kind in SIZES and SIZES[kind] < _BANK_SIZES.get(bank, 0):  # the low bits
            wide, dtype = f"u{8 * _BANK_SIZES[bank]}", DTYPES[kind]
            return lambda w: w.regs[wide][number].astype(dtype)
        raise self.unknown()

    def writer(self, token: str, kind: str) -> Write:
        """A writer of a register; narrow values are extended to a wider one."""
        if token == "_":
            return lambda w, values: None
        found = self.kernel.names.register(token)
        if found is None:
            raise self.unknown()
        bank, number = found
        if FILES.get(kind, kind) != bank:
            if kind not in SIZES or SIZES[kind] >= _BANK_SIZES.get(bank, 0):
                raise self.unknown()
            kind = f"{kind[0]}{8 * _BANK_SIZES[bank]}"

        def write(w: Warp, values: Array) -> None:
            if w.full:
                w.regs[kind][number][:] = values
            else:
                np.copyto(w.regs[kind][number], values, where=w.mask, casting="unsafe")

        return write

    def address(self, number: int) -> Read:
        """A reader of `[register+offset]`: int64 for shared addresses, uint64 for global ones."""
        inside = self.operands[number].strip()[1:-1].strip()
        found = re.fullmatch(r"(.+?)\s*\+?\s*(-?\d+)", inside)
        token, offset = inside, 0
        if found and self.kernel.names.register(inside) is None and found[1] not in ("", "%"):
            base = found[1].strip()
            if self.kernel.names.register(base) is not None or base == "global_smem":
                token, offset = base, int(found[2])
        register = self.kernel.names.register(token)
        if register is not None and register[0] == "b64":
            step, wide = np.uint64(offset & MASK64), self.reader(token, "u64")
            return lambda w: wide(w) + step
        narrow = self.reader(token, "u32")
        return lambda w: (narrow(w).astype(np.int64) + offset) & MASK32


def constant(token: str, kind: str) -> Array | None:
    """A literal in all lanes, or None if the token is none."""
    bits = re.fullmatch(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", token)
    if bits:
        word = np.uint32(int(bits[1], 16)) if bits[1] else np.uint64(int(bits[2], 16))
        raw: Array = np.full(32, word)
        return raw.view(DTYPES[kind]) if kind in ("f32", "f64") else raw
    try:
        value = int(token.rstrip("U"), 0)
    except ValueError:
        return None
    if kind == "pred":
        return np.full(32, bool(value))
    size = SIZES[kind]
    unsigned = np.full(32, value & ((1 << 8 * size) - 1), np.dtype(f"u{size}"))
    return unsigned.view(DTYPES[kind])
