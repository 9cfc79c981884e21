"""Records that several Blackwell kernels share.

Fields of type Any hold values of the running kernel; all others are known when it is compiled.
"""

from typing import Any, NamedTuple


class HeadRows(NamedTuple):
    """A result that has a row, or one number, per token and head."""

    base: Any
    """Pointer to token 0 and head 0; None where the caller does not want the result."""
    token_stride: Any
    head_stride: Any


class WeightRange(NamedTuple):
    """Which powers of two the weights of a row may reach, in log2 units."""

    threshold: float
    """How far the maximum of a row may grow before its accumulator is rescaled."""
    bias: float
    """Exponent added to every weight, so that small ones survive rounding to 8 bits."""
