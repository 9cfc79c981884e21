"""One number from the device code, for comparison with the plan's."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.hopper.latent.source import keys_of_range


@gluon.jit
def ranges_kernel(out_ptr, rows, keys):
    """Integers that Triton takes for constants have no type of their own."""
    gl.store(out_ptr, keys_of_range(gl.program_id(0) + rows, gl.program_id(0) + keys))
