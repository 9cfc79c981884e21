"""One line of assembly that every thread executes, for barriers and notes to the simulator."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def signal(asm: gl.constexpr):
    """Memory accesses do not pass it."""
    gl.inline_asm_elementwise(asm, "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def signal_at(asm: gl.constexpr, number):
    """The same with the number of a barrier in a register."""
    gl.inline_asm_elementwise(
        asm, "=r,r,~{memory}", [number], dtype=gl.int32, is_pure=False, pack=1
    )
