"""Offsets and lengths that are read on the device, clamped to the tensors that they index.

The host never validates them, since it would have to wait for the device. Whatever they hold, no
row outside a tensor is read or written; results of wrong offsets are unspecified.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def cut(x, most):
    """Clamp x to 0 … `most`."""
    return gl.minimum(gl.maximum(x, 0), most)


@gluon.jit
def span_of(start, stop, total):
    """(start, length) of rows start … stop - 1, clamped to `total` rows.

    Offsets 3 and 9 of 8 rows: (3, 5). Offsets -2 and 5: (0, 5). Offsets 6 and 4: (6, 0).
    """
    start = cut(start, total)
    # Clamped before the subtraction: the difference of arbitrary offsets may overflow 32 bits.
    return start, gl.maximum(gl.minimum(stop, total), start) - start
