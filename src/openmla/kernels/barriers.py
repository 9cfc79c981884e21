# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Arrays of mbarriers, for every Gluon kernel."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """NUMBER mbarriers, each completed by COUNT arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(made.index(i), count=COUNT)
    return made
