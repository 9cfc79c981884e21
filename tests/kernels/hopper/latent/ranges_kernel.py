"""The rule of ranges as device code has it, for comparison with the plan's."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.ranges.rule import ranges_of


@gluon.jit
def ranges_kernel(out_ptr, rows, keys):
    """Integers that Triton takes for constants have no type of their own."""
    parts, bits = ranges_of(gl.program_id(0) + rows, gl.program_id(0) + keys, None, True)
    gl.store(out_ptr, parts)
    gl.store(out_ptr + 1, bits)
