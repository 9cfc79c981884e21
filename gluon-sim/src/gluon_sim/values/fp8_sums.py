"""Sums of FP8 products as Hopper's tensor cores make them.

One wgmma adds 32 products to a sum. A product's place is the sum of its factors' exponents, a sum's
place its own exponent. All 33 numbers are aligned to the highest place, and what lies more than
`bits` binary places below it is cut off, of each of them. They are added, and of the result as many
places are kept again. 1 + 2^-14 in one wgmma:

>>> row = np.zeros((1, 32), np.float32)
>>> row[0, :2] = 1.0, 2.0**-7
>>> float(add_products(row, row.T, np.zeros((1, 1), np.float32), bits=13)[0, 0])
1.0
>>> float(add_products(row, row.T, np.zeros((1, 1), np.float32), bits=14)[0, 0] - 1)
6.103515625e-05

Found on an H200, where 13 gives every bit of 70 products of 64 x 64 sums: of one large and many
small terms, of terms that cancel, of random ones of all sizes, over 32 to 128 columns.
"""

from __future__ import annotations

import numpy as np

from gluon_sim.values.dtypes import Array

COLUMNS = 32  # of one wgmma
NOWHERE = -2000  # the place of a zero


def add_products(a: Array, b: Array, sums: Array, bits: int) -> Array:
    """sums + a @ b, of e4m3 values a [rows, n] and b [n, columns]."""
    total = sums.astype(np.float64)
    left, right = a.astype(np.float64), np.ascontiguousarray(b.T, np.float64)
    for first in range(0, a.shape[1], COLUMNS):
        x, y = left[:, None, first : first + COLUMNS], right[None, :, first : first + COLUMNS]
        highest = np.maximum((_place(x) + _place(y)).max(-1), _place(total))
        unit = _unit(highest, bits)
        terms = np.trunc(x * y / unit[..., None]).sum(-1)
        total = unit * (terms + np.trunc(total / unit))
        unit = _unit(_place(total), bits)
        total = unit * np.trunc(total / unit)
    return total.astype(np.float32)


def _place(x: Array) -> Array:
    """The exponent of the leading bit."""
    place: Array = np.where(x == 0, NOWHERE, np.frexp(x)[1] - 1)
    return place


def _unit(place: Array, bits: int) -> Array:
    """What the last binary place kept is worth; of nothing, anything."""
    unit: Array = np.ldexp(1.0, np.maximum(place, NOWHERE // 2) - bits)
    return unit
