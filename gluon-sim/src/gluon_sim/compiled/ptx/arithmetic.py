"""Integer, logic and float32 instructions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gluon_sim.compiled.core.numbers import (
    MASK32,
    Array,
    bf16_values,
    flush,
    fma,
    table_logic,
    to_bf16,
)
from gluon_sim.compiled.ptx.convert import WIDEN
from gluon_sim.compiled.ptx.operands import DTYPES, Form, elements
from gluon_sim.compiled.ptx.parse import Run
from gluon_sim.compiled.ptx.state import LANES, PARAMETER_BASE, Warp

Function = Callable[..., Array]
_WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


def apply(form: Form, function: Function, kinds: tuple[str, ...] = (), into: str = "") -> Run:
    """destination = function(sources), all of the instruction's type unless `kinds` says more."""
    write = form.write(0, into or (kinds[0] if kinds else ""))
    count = len(form.operands) - 1
    reads = [form.read(i + 1, kinds[i] if i < len(kinds) else "") for i in range(count)]
    if count == 1:
        (a,) = reads
        return lambda w: write(w, function(a(w)))
    if count == 2:
        a, b = reads
        return lambda w: write(w, function(a(w), b(w)))
    return lambda w: write(w, function(*(read(w) for read in reads)))


def _flushing(form: Form, function: Function) -> Function:
    """With .ftz, subnormal inputs and results are zeros."""
    if "ftz" not in form.parts:
        return function
    return lambda *x: flush(function(*(flush(value) for value in x)))


# Two values of a type in one register of twice its bits.
_PAIRS: dict[str, tuple[str, type[np.generic]]] = {
    "f32x2": ("u64", np.float32),
    "s16x2": ("u32", np.int16),
    "u16x2": ("u32", np.uint16),
}


def _paired(form: Form, function: Function) -> Run:
    """The operation on each of the two values of a register."""
    register, half = _PAIRS[form.parts[-1]]
    write = form.write(0, register)
    reads = [form.read(i, register) for i in range(1, len(form.operands))]

    def run(w: Warp) -> None:
        values = [np.ascontiguousarray(read(w)).view(half) for read in reads]
        write(w, function(*values).astype(half).view(DTYPES[register]))

    return run


def _mixed(form: Form, function: Function) -> Run:
    """A sum in float32 of values of 16 bits: all sources but the last are of that type."""
    if form.parts[-2] != "f32" or form.op.startswith("mul") or form.has("sat", "rm", "rp", "rz"):
        raise form.unknown()
    widen, last = WIDEN[form.parts[-1]], len(form.operands) - 1
    write, added = form.write(0, "f32"), form.read(last, "f32")
    reads = [form.read(i, "u16") for i in range(1, last)]
    return lambda w: write(w, function(*(widen(read(w)) for read in reads), added(w)))


def _bf16_pair(form: Form, function: Function) -> Run:
    """A sum or product of each of two bf16 values: rounded from float32, it is rounded once."""
    write, reads = form.write(0, "u32"), [form.read(i, "u32") for i in (1, 2)]

    def run(w: Warp) -> None:
        words = [np.ascontiguousarray(read(w)).view(np.uint16) for read in reads]
        found = to_bf16(function(*(bf16_values(halves) for halves in words)))
        write(w, found.astype(np.uint16).view(np.uint32))

    return run


_16_BITS = ("f16x2", "bf16x2")


def _plain(function: Function) -> Callable[[Form], Run]:
    """An operation whose meaning does not depend on its type."""

    def build(form: Form) -> Run:
        if form.parts[-1] in _PAIRS:
            return _paired(form, function)
        if form.parts[-1] in WIDEN:
            return _mixed(form, function)
        if form.parts[-1] == "bf16x2" and function in (np.add, np.subtract, np.multiply):
            return _bf16_pair(form, function)
        if form.parts[-1] in _16_BITS:  # registers hold integers
            raise form.unknown()
        if form.has("sat", "cc", "rm", "rp", "rz"):
            raise form.unknown()
        return apply(form, _flushing(form, function))

    return build


def _mul(form: Form) -> Run:
    if form.has("wide"):
        wide = _WIDE[form.type]
        return apply(form, lambda a, b: a.astype(DTYPES[wide]) * b.astype(DTYPES[wide]), into=wide)
    if form.has("hi"):
        if form.type not in ("u16", "s16", "u32", "s32"):
            raise form.unknown()
        big, bits = DTYPES[_WIDE[form.type]], int(form.type[1:])
        return apply(form, lambda a, b: (a.astype(big) * b.astype(big)) >> big(bits))
    return _plain(np.multiply)(form)


def _mad(form: Form) -> Run:
    if not form.has("wide"):
        if form.has("hi"):
            raise form.unknown()
        return apply(form, lambda a, b, c: a * b + c)
    wide = _WIDE[form.type]
    big, write = DTYPES[wide], form.write(0, wide)
    a, b, c = form.read(1), form.read(2), form.read(3, wide)
    return lambda w: write(w, a(w).astype(big) * b(w).astype(big) + c(w))


def _quotient(a: Array, b: Array) -> Array:
    """Toward zero; a division by zero, which PTX leaves open, gives a itself."""
    top, bottom = a.astype(np.int64), np.where(b == 0, 1, b).astype(np.int64)
    size = np.abs(top) // np.abs(bottom)
    result: Array = np.where((top < 0) != (bottom < 0), -size, size)
    return result


def _div(form: Form) -> Run:
    if form.type == "f32":
        return apply(form, np.divide)
    return apply(form, _quotient)


def _rem(form: Form) -> Run:
    return apply(form, lambda a, b: a.astype(np.int64) - _quotient(a, b) * b.astype(np.int64))


def _extreme(quiet: Function, strict: Function) -> Callable[[Form], Run]:
    def build(form: Form) -> Run:
        if form.has("xorsign") or (form.has("relu") and form.type != "s32"):
            raise form.unknown()
        if form.parts[-1] in _16_BITS:
            raise form.unknown()
        if form.has("relu"):
            return apply(form, lambda a, b: np.maximum(strict(a, b), 0))
        if form.type != "f32":
            return apply(form, strict)
        pick = strict if form.has("NaN") else quiet
        if len(form.operands) == 4:
            return apply(form, _flushing(form, lambda a, b, c: pick(pick(a, b), c)))
        return apply(form, _flushing(form, pick))

    return build


def _shift(left: bool) -> Callable[[Form], Run]:
    """Shifts by the width or more give zeros, or the sign."""

    def build(form: Form) -> Run:
        kind, bits = form.type, 8 * np.dtype(DTYPES[form.type]).itemsize

        def shift(a: Array, by: Array) -> Array:
            result: Array
            if left or kind[0] == "u":
                by64, a64 = np.minimum(by, 63).astype(np.uint64), a.astype(np.uint64)
                result = np.where(by >= bits, np.uint64(0), a64 << by64 if left else a64 >> by64)
                return result.astype(a.dtype)
            result = a >> np.minimum(by, bits - 1).astype(a.dtype)
            return result

        return apply(form, shift, (kind, "u32"))

    return build


def _lop3(form: Form) -> Run:
    table = int(form.operands[4], 0)
    write, (a, b, c) = form.write(), (form.read(i) for i in (1, 2, 3))
    return lambda w: write(w, table_logic(table, a(w), b(w), c(w)))


def _bfe(form: Form) -> Run:
    kind = form.type
    if kind not in ("u32", "s32"):
        raise form.unknown()

    def extract(x: Array, at: Array, size: Array) -> Array:
        wide = x.view(np.uint32).astype(np.uint64) if kind == "u32" else x.astype(np.int64)
        bits: Array = np.minimum(size & 0xFF, 32).astype(wide.dtype)
        low: Array = np.minimum(at & 0xFF, 63).astype(wide.dtype)
        one = wide.dtype.type(1)
        field: Array = (wide >> low) & ((one << bits) - one)
        if kind == "s32":
            sign = (field >> np.maximum(bits - 1, 0)) & 1
            field = np.where(bits > 0, field - (sign << bits), 0)
        return field.astype(DTYPES[kind])

    return apply(form, extract, (kind, "u32", "u32"))


def _bfi(form: Form) -> Run:
    def insert(a: Array, b: Array, at: Array, size: Array) -> Array:
        low, bits = (np.minimum(x & 0xFF, 32).astype(np.uint64) for x in (at, size))
        mask = (((np.uint64(1) << bits) - np.uint64(1)) << low) & np.uint64(MASK32)
        kept = b.astype(np.uint64) & ~mask
        merged: Array = kept | ((a.astype(np.uint64) << low) & mask)
        return merged.astype(np.uint32)

    return apply(form, insert, ("u32",) * 4)


def _popc(form: Form) -> Run:
    """How many bits are set; the result has 32 bits for either width."""
    if form.type not in ("u32", "u64") or len(form.parts) != 2:
        raise form.unknown()
    write, read = form.write(0, "u32"), form.read(1)

    def run(w: Warp) -> None:
        words = np.ascontiguousarray(read(w)).view(np.uint8).reshape(32, -1)
        write(w, np.unpackbits(words, axis=1).sum(1).astype(np.uint32))

    return run


def _prmt(form: Form) -> Run:
    if len(form.parts) != 2:
        raise form.unknown()

    def permute(a: Array, b: Array, selector: Array) -> Array:
        data = np.stack(
            [(x >> np.uint32(8 * i)) & np.uint32(255) for x in (a, b) for i in range(4)]
        )
        result = np.zeros(32, np.uint32)
        for i in range(4):
            choice = (selector >> np.uint32(4 * i)) & np.uint32(15)
            byte = data[choice & 7, LANES]
            signs = np.where(byte & 128, 255, 0)
            chosen = np.where(choice & 8, signs, byte).astype(np.uint32)
            result |= chosen << np.uint32(8 * i)
        return result

    return apply(form, permute, ("u32",) * 3)


def _mov(form: Form) -> Run:
    target, source = form.operands
    if not (target.startswith("{") or source.startswith("{")):
        return apply(form, lambda a: a)
    names = elements(target if target.startswith("{") else source)
    kind = form.type
    part = f"u{8 * np.dtype(DTYPES[kind]).itemsize // len(names)}"
    dtype = DTYPES[part]
    if target.startswith("{"):
        writes, read = [form.writer(name, part) for name in names], form.read(1)

        def unpack(w: Warp) -> None:
            values = np.ascontiguousarray(read(w)).view(dtype).reshape(32, len(names))
            for i, write in enumerate(writes):
                write(w, values[:, i])

        return unpack
    reads, write = [form.reader(name, part) for name in names], form.write()

    def pack(w: Warp) -> None:
        write(w, np.stack([read(w) for read in reads], 1).view(DTYPES[kind]).reshape(32))

    return pack


def _cvta(form: Form) -> Run:
    if form.parts[1] != "param":
        raise form.unknown()
    return apply(form, lambda a: a + np.uint64(PARAMETER_BASE))


def _selp(form: Form) -> Run:
    write, a, b, choice = form.write(), form.read(1), form.read(2), form.read(3, "pred")
    return lambda w: write(w, np.where(choice(w), a(w), b(w)))


_COMPARE: dict[str, Function] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def _unordered(a: Array, b: Array) -> Array:
    result: Array = np.isnan(a) | np.isnan(b)
    return result


def _comparison(form: Form, name: str) -> Function:
    if form.type != "f32":
        return _COMPARE[name]
    if name == "nan":
        return _unordered
    if name == "num":
        return lambda a, b: ~_unordered(a, b)
    if name[:-1] in _COMPARE and name.endswith("u"):
        compare = _COMPARE[name[:-1]]
        return lambda a, b: compare(a, b) | _unordered(a, b)
    compare = _COMPARE[name]
    return lambda a, b: compare(a, b) & ~_unordered(a, b)


def _setp(form: Form) -> Run:
    if "|" in form.operands[0]:
        raise form.unknown()
    compare, write = _comparison(form, form.parts[1]), form.write(0, "pred")
    a, b = form.read(1), form.read(2)
    if len(form.operands) == 3:
        return lambda w: write(w, compare(a(w), b(w)))
    joins: dict[str, Function] = {"or": np.logical_or, "and": np.logical_and, "xor": np.not_equal}
    join, also = joins[form.parts[2]], form.read(3, "pred")
    return lambda w: write(w, join(compare(a(w), b(w)), also(w)))


def _approximate(function: Function) -> Callable[[Form], Run]:
    """ex2, lg2, rcp, sqrt: rounded correctly here, a few units in the last place off on a GPU."""

    def build(form: Form) -> Run:
        if form.type != "f32":
            raise form.unknown()
        return apply(form, lambda a: flush(function(flush(a).astype(np.float64))))

    return build


BUILDERS: dict[str, Callable[[Form], Run]] = {
    "add": _plain(np.add),
    "sub": _plain(np.subtract),
    "mul": _mul,
    "mad": _mad,
    "fma": _plain(fma),
    "div": _div,
    "rem": _rem,
    "min": _extreme(np.fmin, np.minimum),
    "max": _extreme(np.fmax, np.maximum),
    "and": _plain(np.bitwise_and),
    "or": _plain(np.bitwise_or),
    "xor": _plain(np.bitwise_xor),
    "not": _plain(np.invert),
    "neg": _plain(np.negative),
    "abs": _plain(np.abs),
    "shl": _shift(True),
    "shr": _shift(False),
    "lop3": _lop3,
    "bfe": _bfe,
    "bfi": _bfi,
    "popc": _popc,
    "prmt": _prmt,
    "mov": _mov,
    "cvta": _cvta,
    "selp": _selp,
    "setp": _setp,
    "ex2": _approximate(np.exp2),
    "lg2": _approximate(np.log2),
    "rcp": _approximate(np.reciprocal),
    "sqrt": _approximate(np.sqrt),
}
