"""Pages of any size, which a kernel is told when it runs: one kernel serves all sizes.

A division by a number that is not known when a kernel is compiled takes some twenty instructions.
Here it is a product and a shift: n // size is n * m >> (31 + s) for every n from 0 to 2^31 - 1,
where s is the logarithm of size, rounded up, and m is 2^(31 + s) / size, rounded up: m is too large
by less than 1, and n by no more than 2^s / size too little for that to matter.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SHIFT = gl.constexpr(32)  # where the shift stands in `Pages.inverse`


class Pages(NamedTuple):
    """What positions and rows are counted in."""

    size: Any
    """Rows of a page."""
    inverse: Any
    """`inverse_of` its rows, a 64-bit integer."""


def inverse_of(size: int) -> int:
    """What a kernel divides by `size` with: m and the shift in one number, which is never below
    2^31, so that it is always a 64-bit argument.

    >>> n, inverse = 12345, inverse_of(48)
    >>> n * (inverse & 0xFFFFFFFF) >> (inverse >> 32) == n // 48
    True
    """
    bits = 31 + (size - 1).bit_length()
    return (bits << 32) + -(-(1 << bits) // size)


@gluon.jit
def divided(number, pages):
    """(page, row of the page) of positions or rows, from 0 to 2^31 - 1."""
    factor = pages.inverse & 0xFFFFFFFF
    page = ((number.to(gl.int64) * factor) >> (pages.inverse >> SHIFT)).to(gl.int32)
    return page, number - page * pages.size
