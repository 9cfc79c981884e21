"""Requests of a ragged batch, as a kernel finds them on the device.

Offsets and lengths are clamped to the tensors that they index. The host never validates them, since
it would have to wait for the device. Whatever they hold, no row outside a tensor is read or
written; results of wrong offsets are unspecified.

A persistent kernel that needs work item x counts the work items of 32 requests at a time, one
request per lane, and bisects: no table is built and nothing is read back.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

CHUNK = gl.constexpr(32)  # requests looked at together


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


@gluon.jit
def sum_before(lane, counts, NW: gl.constexpr):
    """Sum of the counts of the lanes before `lane`."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    return gl.sum(gl.where(gl.arange(0, CHUNK, LANES) < lane, counts, 0), 0)


@gluon.jit
def owner(x, counts, NW: gl.constexpr):
    """The lane with work item x of the chunk: the last that begins at or before x."""
    lane = x * 0
    for bit in gl.static_range(5):
        tried = lane + (16 >> bit)
        lane = gl.where(sum_before(tried, counts, NW) <= x, tried, lane)
    return lane
