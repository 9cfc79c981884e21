"""How partitions and launches wait for one another: mbarriers, and programmatic dependent launch.

A launch with the option `launch_pdl` begins before the one in front of it has ended. What a kernel
does before `wait_for_kernel_before` overlaps with the kernel in front, and must not depend on that
kernel's results.
"""

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


@gluon.jit
def let_next_begin():
    """Let the next kernel of the stream be launched; it waits for this one where it needs it."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_for_kernel_before():
    """Wait until the kernel in front has ended and everything that it wrote is visible."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;",
        "=r,~{memory}",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
