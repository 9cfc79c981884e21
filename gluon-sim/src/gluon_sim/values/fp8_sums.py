"""Sums of products as Hopper's tensor cores make them.

One wgmma adds 32 products of FP8 numbers to a sum, or 16 products of 16-bit ones. A product's place
is the sum of its factors' exponents, a sum's place its own exponent. All these numbers are aligned
to the highest place, and what lies more than `bits` binary places below it is cut off, of each of
them. They are added, and of the result as many places are kept again, or `kept`. With FP8 there are
13; 1 + 2^-14 in one wgmma:

>>> row = np.zeros((1, 32), np.float32)
>>> row[0, :2] = 1.0, 2.0**-7
>>> float(add_products(row, row.T, np.zeros((1, 1), np.float32), bits=13)[0, 0])
1.0
>>> float(add_products(row, row.T, np.zeros((1, 1), np.float32), bits=14)[0, 0] - 1)
6.103515625e-05

Found on an H200, where 13 gives every bit of 70 products of 64 x 64 sums: of one large and many
small terms, of terms that cancel, of random ones of all sizes, over 32 to 128 columns. With bf16
and fp16, 25 places and 23 of the result give every bit of 64 x 64 sums over 64 columns, of terms of
one size and of terms that differ by up to 2^12.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gluon_sim.values.dtypes import Array

COLUMNS = 32  # of one wgmma
FP8_BITS = 14  # at most, of FP8 products that are added
LARGEST = {np.float32: 2.0**100, np.float64: 2.0**1000}  # powers of two that terms are scaled by
NOWHERE = -2000  # the place of a zero
HALF_COLUMNS, HALF_BITS, HALF_KEPT = 16, 25, 23
"""16-bit formats: columns of one wgmma, places that are added, places of the result."""


def add_products(
    a: Array, b: Array, sums: Array, bits: int, columns: int = COLUMNS, kept: int = 0
) -> Array:
    """sums + a @ b, of values a [rows, n] and b [n, columns]; `kept` is `bits` unless given.

    With FP8's `bits` a and b hold FP8 numbers: products have 8 places and aligned terms are whole
    numbers below 2^16, so that float32 holds 32 of them and their sum exactly.
    """
    total = sums.astype(np.float64)
    exact: Any = np.float32 if bits <= FP8_BITS else np.float64
    # By [n, rows, columns]: NumPy reduces the first axis quickest.
    left: Array = np.ascontiguousarray(a.T, exact)[:, :, None]
    right: Array = np.ascontiguousarray(b, exact)[:, None, :]
    left_places, right_places = _place(left), _place(right)
    for first in range(0, a.shape[1], columns):
        here = slice(first, first + columns)
        places = left_places[here] + right_places[here]
        unit = _unit(np.maximum(places.max(0), _place(total)), bits)
        terms: Array = np.multiply(left[here], right[here])
        # A power of two: exact, and quicker than a division. Beside larger ones all terms are 0.
        scale = np.minimum(1.0 / unit, LARGEST[exact]).astype(exact)
        np.multiply(terms, scale, out=terms)
        total = unit * (np.trunc(terms, out=terms).sum(0) + np.trunc(total / unit))
        unit = _unit(_place(total), kept or bits)
        total = unit * np.trunc(total / unit)
    return total.astype(np.float32)


def _place(x: Array) -> Array:
    """The exponent of the leading bit."""
    place: Array = np.where(x == 0, NOWHERE, np.frexp(x)[1] - 1).astype(np.int16)
    return place


def _unit(place: Array, bits: int) -> Array:
    """What the last binary place kept is worth; of nothing, anything whose inverse is finite."""
    unit: Array = np.ldexp(1.0, np.maximum(place, NOWHERE // 4).astype(np.int32) - bits)
    return unit
