"""Conversions between number formats: cvt."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gluon_sim.compiled.core.numbers import FP8, Array, bf16_values, to_bf16, to_f16, to_fp8
from gluon_sim.compiled.ptx.operands import DTYPES, TYPES, Form
from gluon_sim.compiled.ptx.parse import Run


def _half_values(bits: Array) -> Array:
    values: Array = np.ascontiguousarray(bits, np.uint16).view(np.float16).astype(np.float32)
    return values


# Two float32, the first into the high half.
_PACK: dict[str, tuple[str, int, Callable[[Array], Array]]] = {
    "bf16x2": ("u32", 16, to_bf16),
    "f16x2": ("u32", 16, to_f16),
    "e4m3x2": ("u16", 8, to_fp8),
}
_NARROW: dict[str, Callable[[Array], Array]] = {"bf16": to_bf16, "f16": to_f16}
WIDEN: dict[str, Callable[[Array], Array]] = {"bf16": bf16_values, "f16": _half_values}


def cvt(form: Form) -> Run:
    """cvt.rounding.to.from"""
    to, source = form.parts[-2:]
    if form.has("relu", "sat"):
        raise form.unknown()
    if source == "f32" and to in _PACK:
        return _packed(form, *_PACK[to])
    if source == "f32" and to in _NARROW:
        write, read, narrow = form.write(0, "u16"), form.read(1, "f32"), _NARROW[to]
        return lambda w: write(w, narrow(read(w)).astype(np.uint16))
    if to in _NARROW and source in WIDEN:
        write, read, narrow = form.write(0, "u16"), form.read(1, "u16"), _NARROW[to]
        widened = WIDEN[source]
        return lambda w: write(w, narrow(widened(read(w))).astype(np.uint16))
    if to == "f32" and source in WIDEN:
        write, read, widen = form.write(0, "f32"), form.read(1, "u16"), WIDEN[source]
        return lambda w: write(w, widen(read(w)))
    if source == "e4m3x2" and to in ("f16x2", "bf16x2"):
        write, read = form.write(0, "u32"), form.read(1, "u16")
        widen = _NARROW[to.removesuffix("x2")]  # every e4m3 number is one of 16 bits
        return lambda w: write(w, _fp8_pair(read(w), widen))
    if to == "f32" and source[0] in "us":
        write, read = form.write(0, "f32"), form.read(1, TYPES[source])
        return lambda w: write(w, read(w).astype(np.float32))
    if to in _NARROW and source in ("s32", "u32"):
        write, read, narrow = form.write(0, "u16"), form.read(1, source), _NARROW[to]
        return lambda w: write(w, narrow(_odd(read(w))).astype(np.uint16))
    if source == "f32" and to in ("s32", "u32") and form.has("rzi", "rni"):
        return _to_integer(form, to)
    if to == source == "f32" and form.has("rpi"):
        write, read, flushes = form.write(0, "f32"), form.read(1, "f32"), form.has("ftz")
        return lambda w: write(w, np.ceil(_flushed(read(w)) if flushes else read(w)))
    if to[0] in "us" and source[0] in "us":
        dtype = DTYPES[TYPES[to]]
        write, read = form.write(0, TYPES[to]), form.read(1, TYPES[source])
        return lambda w: write(w, read(w).astype(dtype))
    raise form.unknown()


def _flushed(x: Array) -> Array:
    """Zeros for denormals."""
    flushed: Array = np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)
    return flushed


def _odd(x: Array) -> Array:
    """Float32 next to an integer, rounded to odd so that rounding once more is rounding once."""
    near = x.astype(np.float32)
    gap = x.astype(np.float64) - near
    toward = np.nextafter(near, np.where(gap > 0, np.float32(np.inf), np.float32(-np.inf)))
    even = near.view(np.uint32) % 2 == 0
    result: Array = np.where((gap != 0) & even, toward, near).astype(np.float32)
    return result


def _packed(form: Form, kind: str, bits: int, narrow: Callable[[Array], Array]) -> Run:
    if kind == "u16" and not form.has("satfinite"):
        raise form.unknown()
    write, high, low = form.write(0, kind), form.read(1, "f32"), form.read(2, "f32")
    return lambda w: write(w, narrow(high(w)) << np.uint32(bits) | narrow(low(w)))


def _fp8_pair(pair: Array, widen: Callable[[Array], Array]) -> Array:
    low, high = (widen(FP8[(pair >> np.uint16(shift)) & np.uint16(255)]) for shift in (0, 8))
    both: Array = high << np.uint32(16) | low
    return both


def _to_integer(form: Form, to: str) -> Run:
    write, read = form.write(0, to), form.read(1, "f32")
    limits, dtype = np.iinfo(np.dtype(DTYPES[to])), DTYPES[to]
    whole: Callable[[Array], Array] = np.trunc if form.has("rzi") else np.rint

    def convert(x: Array) -> Array:
        number = np.nan_to_num(whole(x.astype(np.float64)))
        result: Array = np.clip(number, limits.min, limits.max).astype(dtype)
        return result

    return lambda w: write(w, convert(read(w)))
