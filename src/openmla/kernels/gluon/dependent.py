"""Programmatic dependent launch: a kernel begins before the one in front of it has ended.

The launch has the option `launch_pdl`. What a kernel does before `wait_for_kernel_before` overlaps
with the kernel in front of it, and must not depend on that kernel's results.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
