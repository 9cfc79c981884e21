"""Vector instructions on float32, and conversions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gluon_sim.compiled.core.numbers import (
    FP8,
    MASK32,
    Array,
    flush,
    fma,
    to_bf16,
    to_f16,
    to_fp8,
)
from gluon_sim.compiled.gfx950.operands import Form, Read, Registers, Run, registers
from gluon_sim.compiled.gfx950.state import VCC, Wave, lanes_of, word_of
from gluon_sim.compiled.gfx950.vector import ints, moved

Function = Callable[..., Array]
_TINY = 2.0**-126


def _wide(function: Function) -> Function:
    """Computed in float64, rounded once."""

    def rounded(*x: Array) -> Array:
        result: Array = function(*(value.astype(np.float64) for value in x)).astype(np.float32)
        return result

    return rounded


def _exponent(x: Array) -> Array:
    bits = np.ascontiguousarray(x).view(np.uint32) >> np.uint32(23)
    result: Array = (bits & np.uint32(255)).astype(np.int32)
    return result


def _div_fixup(quotient: Array, bottom: Array, top: Array) -> Array:
    """v_div_fixup_f32: the cases that the iteration for top / bottom cannot do."""
    negative = np.signbit(bottom) ^ np.signbit(top)
    zero, infinite = np.where(negative, -0.0, 0.0), np.where(negative, -np.inf, np.inf)
    d = np.where(negative, -np.abs(quotient), np.abs(quotient))
    d = np.where(np.isnan(quotient), infinite, d)
    d = np.where(_exponent(top) - _exponent(bottom) < -150, zero, d)
    d = np.where(np.isinf(bottom) | (top == 0), zero, d)
    d = np.where((bottom == 0) | np.isinf(top), infinite, d)
    undefined = ((bottom == 0) & (top == 0)) | (np.isinf(bottom) & np.isinf(top))
    d = np.where(undefined | np.isnan(bottom) | np.isnan(top), np.nan, d)
    result: Array = d.astype(np.float32)
    return result


FLOATS: dict[str, Function] = {
    "v_add_f32": lambda a, b: a + b,
    "v_sub_f32": lambda a, b: a - b,
    "v_subrev_f32": lambda a, b: b - a,
    "v_mul_f32": lambda a, b: a * b,
    "v_max_f32": np.fmax,
    "v_min_f32": np.fmin,
    "v_max3_f32": lambda a, b, c: np.fmax(np.fmax(a, b), c),
    "v_fma_f32": fma,
    "v_rcp_f32": _wide(np.reciprocal),
    "v_sqrt_f32": _wide(np.sqrt),
    "v_exp_f32": lambda a: flush(_wide(np.exp2)(a)),  # the machine may be 1 unit off
    "v_log_f32": lambda a: _wide(np.log2)(flush(a)),
    "v_div_fixup_f32": _div_fixup,
}
_PAIRS: dict[str, Function] = {
    "v_pk_mul_f32": lambda a, b: a * b,
    "v_pk_add_f32": lambda a, b: a + b,
    "v_pk_fma_f32": fma,
}
_FROM_FP8: dict[str, Callable[[Array], Array] | None] = {
    "v_cvt_scalef32_pk_bf16_fp8": to_bf16,
    "v_cvt_scalef32_pk_f16_fp8": to_f16,
    "v_cvt_scalef32_pk_f32_fp8": None,
}


def build(form: Form) -> Run | None:
    """What a float instruction does; None if it is none."""
    base = form.base
    if base in FLOATS:
        return (_moved if form.op.endswith("_dpp") else _plain)(form, FLOATS[base])
    if base in _PAIRS:
        return _pair(form, _PAIRS[base])
    known: dict[str, Callable[[Form], Run]] = {
        "v_fmac_f32": _fmac,
        "v_ldexp_f32": _ldexp,
        "v_cvt_f32_u32": _from_integer,
        "v_cvt_f32_i32": _from_integer,
        "v_cvt_u32_f32": _to_integer,
        "v_cvt_i32_f32": _to_integer,
        "v_cvt_pk_bf16_f32": _narrow,
        "v_cvt_pk_f16_f32": _narrow,
        "v_cvt_scalef32_pk_fp8_f32": _to_fp8,
        "v_div_scale_f32": _div_scale,
        "v_div_fmas_f32": _div_fmas,
        **dict.fromkeys(_FROM_FP8, _from_fp8),
    }
    return known[base](form) if base in known else None


def _plain(form: Form, function: Function) -> Run:
    form.allow()
    into = form.named(0, True, 1)
    reads = [form.f32(i) for i in range(1, len(form.operands))]
    return lambda w: w.setf(into, function(*(read(w) for read in reads)))


def _moved(form: Form, function: Function) -> Run:
    def bits(*words: Array) -> Array:
        result: Array = function(*(x.view(np.float32) for x in words)).view(np.uint32)
        return result

    return moved(form, bits)


def _fmac(form: Form) -> Run:
    form.allow()
    into, a, b = form.vector(0), form.f32(1), form.f32(2)
    return lambda w: w.setf(into, fma(a(w), b(w), w.f[into]))


def _ldexp(form: Form) -> Run:
    into, a, by = form.named(0, True, 1), form.f32(1), form.u32(2)
    return lambda w: w.setf(into, np.ldexp(a(w), ints(by(w))))


def _from_integer(form: Form) -> Run:
    into, a = form.named(0, True, 1), form.u32(1)
    if form.base.endswith("i32"):
        return lambda w: w.setf(into, ints(a(w)).astype(np.float32))
    return lambda w: w.setf(into, a(w).astype(np.float32))


def _to_integer(form: Form) -> Run:
    """Towards zero; what is too large becomes the nearest integer there is, NaN 0."""
    form.allow()
    into, a = form.named(0, True, 1), form.f32(1)
    low, high = (-(2**31), 2**31 - 1) if "i32" in form.base else (0, MASK32)

    def run(w: Wave) -> None:
        values = a(w).astype(np.float64)
        whole = np.clip(np.trunc(np.where(np.isnan(values), 0.0, values)), low, high)
        w.set(into, (whole.astype(np.int64) & MASK32).astype(np.uint32))

    return run


def _pair(form: Form, function: Function) -> Run:
    """Two float32 at once; op_sel chooses which half of every source each of them takes."""
    form.allow("op_sel", "op_sel_hi", "neg_lo", "neg_hi")
    count, into = len(form.operands) - 1, form.named(0, True, 2)
    halves = []
    for select, negate, default in (("op_sel", "neg_lo", 0), ("op_sel_hi", "neg_hi", 1)):
        which, minus = form.list(select, [default] * count), form.list(negate, [0] * count)
        reads = [_half(form, i + 1, which[i], bool(minus[i])) for i in range(count)]
        halves.append(reads)
    low, high = halves

    def run(w: Wave) -> None:
        first = function(*(read(w) for read in low))
        second = function(*(read(w) for read in high))
        w.setf(into, first)
        w.setf(into + 1, second)

    return run


def _half(form: Form, operand: int, which: int, minus: bool) -> Read:
    found = registers(form.operands[operand])
    if found is None:
        read = form.f32(operand)
    else:
        at = found.first + which
        form.use(Registers(found.vector, at, 1))
        if found.vector:
            read = lambda w: w.f[at]  # noqa: E731
        else:
            read = lambda w: np.full(64, w.s[at], np.uint32).view(np.float32)  # noqa: E731
    return (lambda w: -read(w)) if minus else read


def _narrow(form: Form) -> Run:
    form.allow()
    into, a, b = form.named(0, True, 1), form.f32(1), form.f32(2)
    narrow = to_bf16 if "bf16" in form.base else to_f16
    return lambda w: w.set(into, narrow(a(w)) | narrow(b(w)) << np.uint32(16))


def _from_fp8(form: Form) -> Run:
    form.allow("op_sel")
    select = form.list("op_sel", [0, 0, 0])
    if form.operands[2] != "1.0" or any(select[1:]):
        raise form.unknown()
    narrow, shift, a = _FROM_FP8[form.base], np.uint32(16 * select[0]), form.u32(1)
    into = form.named(0, True, 2 if narrow is None else 1)

    def run(w: Wave) -> None:
        word = a(w) >> shift
        low, high = FP8[word & 255], FP8[(word >> np.uint32(8)) & 255]
        if narrow is None:
            w.setf(into, low)
            w.setf(into + 1, high)
        else:
            w.set(into, narrow(low) | narrow(high) << np.uint32(16))

    return run


def _to_fp8(form: Form) -> Run:
    """Into one half of the destination; the other one stays."""
    form.allow("op_sel")
    select = form.list("op_sel", [0, 0, 0, 0])
    if form.operands[3] != "1.0" or any(select[:3]):
        raise form.unknown()
    into, a, b = form.named(0, True, 1), form.f32(1), form.f32(2)
    shift = np.uint32(16 * select[3])
    kept = np.uint32(0xFFFF0000) >> shift

    def run(w: Wave) -> None:
        both = to_fp8(a(w), w.saturate) | to_fp8(b(w), w.saturate) << np.uint32(8)
        w.set(into, (w.v[into] & kept) | both << shift)

    return run


def _div_scale(form: Form) -> Run:
    """Scale numerator or denominator so that the iteration for a quotient does not overflow."""
    into, flag = form.named(0, True, 1), form.named(1, False, 2)
    value, bottom, top = form.f32(2), form.f32(3), form.f32(4)

    def run(w: Wave) -> None:
        scaled, flags = _scaled(value(w), bottom(w), top(w))
        w.setf(into, scaled)
        w.set64(flag, word_of(flags & w.mask))

    return run


def _scaled(value: Array, bottom: Array, top: Array) -> tuple[Array, Array]:
    up, down = np.ldexp(value, 64), np.ldexp(value, -64)
    quotient = np.abs(top.astype(np.float64) / bottom)
    inverse = np.abs(1.0 / bottom.astype(np.float64))
    is_bottom, is_top = value == bottom, value == top
    small = (np.abs(bottom) < _TINY) & (bottom != 0)
    nothing = np.full(64, np.nan, np.float32)
    on, off = np.ones(64, bool), np.zeros(64, bool)
    cases = [
        ((top == 0) | (bottom == 0), nothing, off),
        (_exponent(top) - _exponent(bottom) >= 96, np.where(is_bottom, up, value), on),
        (small, up, off),
        ((inverse < _TINY) & (quotient < _TINY), np.where(is_bottom, up, value), on),
        (inverse < _TINY, down, off),
        (quotient < _TINY, np.where(is_top, up, value), on),
        (_exponent(top) <= 23, up, off),
    ]
    tests = [test for test, _, _ in cases]
    scaled = np.select(tests, [result for _, result, _ in cases], value).astype(np.float32)
    return scaled, np.select(tests, [flag for _, _, flag in cases], off)


def _div_fmas(form: Form) -> Run:
    """A fused multiply-add whose result is scaled back where VCC says so."""
    form.scalar_reads.extend((VCC, VCC + 1))
    into, a, b, c = form.named(0, True, 1), form.f32(1), form.f32(2), form.f32(3)

    def run(w: Wave) -> None:
        exact = a(w).astype(np.float64) * b(w) + c(w)
        factor = np.where(_exponent(c(w)) > 127, 2.0**64, 2.0**-64)
        scaled = np.where(lanes_of(w.get64(VCC)), exact * factor, exact)
        w.setf(into, scaled.astype(np.float32))

    return run
