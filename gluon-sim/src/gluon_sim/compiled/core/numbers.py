"""Numbers as lanes hold them: NumPy vectors, one element per lane.

>>> import numpy as np
>>> bf16_values(to_bf16(np.float32([1.0, 3.14159]))).tolist()
[1.0, 3.140625]
>>> FP8[to_fp8(np.float32([0.3, 1000.0]))].tolist()
[0.3125, 448.0]
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

MASK32 = 0xFFFFFFFF
MASK64 = (1 << 64) - 1
_SMALLEST_NORMAL = 2.0**-126
_LARGEST_FP8 = 126  # the code of 448
_FP8_OVERFLOW = 464.0  # what rounds past 448 where nothing saturates


def _fp8_values() -> Array:
    """The 256 values of e4m3fn: 4 bits of exponent (bias 7), 3 of mantissa, no infinity."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size = np.where((codes & 0x7F) == 0x7F, np.nan, size)
    values: Array = np.where(codes & 0x80, -size, size).astype(np.float32)
    return values


FP8 = _fp8_values()
_POSITIVE = FP8[: _LARGEST_FP8 + 1].astype(np.float64)


def to_fp8(x: Array, saturate: bool = True) -> Array:
    """Codes of e4m3, rounded to nearest even; too large is 448, or NaN without `saturate`."""
    size = np.abs(x).astype(np.float64)
    above = np.clip(np.searchsorted(_POSITIVE, size), 0, _LARGEST_FP8)
    below = np.clip(above - 1, 0, _LARGEST_FP8)
    down, up = size - _POSITIVE[below], _POSITIVE[above] - size
    even = np.where(below % 2 == 0, below, above)
    code = np.where(down < up, below, np.where(up < down, above, even))
    code = np.where(size >= _POSITIVE[-1], _LARGEST_FP8, code)
    if not saturate:
        code = np.where(size >= _FP8_OVERFLOW, 0x7F, code)
    code = np.where(np.isnan(x), 0x7F, code)
    negative = np.signbit(x) & ~np.isnan(x)
    result: Array = (code | np.where(negative, 0x80, 0)).astype(np.uint32)
    return result


def to_bf16(x: Array) -> Array:
    """Bits of bf16 as uint32, rounded to nearest even; every NaN becomes 0x7FFF."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    result: Array = np.where(np.isnan(x), np.uint64(0x7FFF), rounded).astype(np.uint32)
    return result


def bf16_values(bits: Array) -> Array:
    """The float32 values of bf16 bits."""
    wide: Array = bits.astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32)


def to_f16(x: Array) -> Array:
    """Bits of fp16 as uint32; every NaN is 0x7fff."""
    bits = x.astype(np.float16).view(np.uint16).astype(np.uint32)
    result: Array = np.where(np.isnan(x), np.uint32(0x7FFF), bits)
    return result


def decoded(raw: Array, kind: str) -> Array:
    """The float32 values of bytes [..., n] that hold numbers of one kind."""
    raw = np.ascontiguousarray(raw)
    if kind == "bf16":
        return bf16_values(raw.view(np.uint16))
    if kind == "f16":
        half: Array = raw.view(np.float16).astype(np.float32)
        return half
    if kind == "e4m3":
        table: Array = FP8[raw.view(np.uint8)]
        return table
    raise ValueError(f"no number format {kind!r}")


def flush(x: Array) -> Array:
    """Subnormal numbers become zeros of their sign."""
    tiny = np.abs(x) < _SMALLEST_NORMAL
    result: Array = np.where(tiny, np.copysign(np.float32(0), x), x).astype(np.float32)
    return result


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c with one rounding (but for double rounding in the last bit)."""
    wide = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    result: Array = wide.astype(np.float32)
    return result


def product(a: Array, b: Array) -> Array:
    """a @ b.T in float64: tensor cores round in their own ways, which is not modeled."""
    wide, other = a.astype(np.float64), b.astype(np.float64)
    result: Array = wide @ other.T
    if not np.isfinite(result).all():  # BLAS may spread a NaN further than its row
        result = (wide[:, None, :] * other[None, :, :]).sum(2)
    return result


def signed(value: int, bits: int = 32) -> int:
    """The two's complement number of these bits.

    >>> signed(0xFFFFFFFF), signed(5)
    (-1, 5)
    """
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def table_logic(table: int, a: Array, b: Array, c: Array) -> Array:
    """The bitwise function of three inputs with this truth table (PTX lop3, AMD bitop3)."""
    result = np.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result
