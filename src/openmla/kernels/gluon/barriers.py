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


@gluon.jit
def barrier_pair(FIRST: gl.constexpr, SECOND: gl.constexpr):
    """Two mbarriers of different counts, side by side: apart, they would leave gaps of 8 bytes."""
    made = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(made.index(0), count=FIRST)
    mbarrier.init(made.index(1), count=SECOND)
    return made.index(0), made.index(1)
