"""Programmatic dependent launch: a kernel begins before the one in front of it has ended.

The launch has the option `launch_pdl`. What it does until `wait_for_kernel_before` overlaps with
that kernel, and must not depend on it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def let_next_begin():
    """The next kernel may be launched; it waits for this one where it needs it."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_for_kernel_before():
    """Everything that it wrote is there."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
