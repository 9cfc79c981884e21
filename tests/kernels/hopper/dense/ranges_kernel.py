"""One number from the device code, for comparison with the plan's."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.hopper.dense.tiles import head_group, keys_of_range


@gluon.jit
def ranges_kernel(out_ptr, q_len, k_len, heads, SM_COUNT: gl.constexpr, MIN_KEYS: gl.constexpr):
    gl.store(out_ptr, keys_of_range(q_len, k_len, heads, SM_COUNT, MIN_KEYS))


@gluon.jit
def groups_kernel(out_ptr, k_len, heads, GROUP_KEYS: gl.constexpr):
    gl.store(out_ptr, head_group(k_len, heads, GROUP_KEYS))
