"""Offsets and lengths as they are found on the device, cut to the tensors that they speak of.

Nobody has looked at them: that would mean waiting for the device. Whatever they hold, no row
outside a tensor is read or written; what is computed of wrong ones, nobody has promised.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def cut(x, most):
    """x, or the nearest number from 0 to `most`."""
    return gl.minimum(gl.maximum(x, 0), most)


@gluon.jit
def span_of(start, stop, total):
    """(start, length) of rows start … stop - 1, as far as there are such among `total`.

    Offsets 3 and 9 of 8 rows: (3, 5). Offsets -2 and 5: (0, 5). Offsets 6 and 4: (6, 0).
    """
    start = cut(start, total)
    # Not the difference of what was given, which 32 bits may not hold.
    return start, gl.maximum(gl.minimum(stop, total), start) - start
