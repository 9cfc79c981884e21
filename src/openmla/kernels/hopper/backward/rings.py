"""Two rings that turn side by side: of K with V, of Q with d_out.

They have as many slots unless shared memory is scarce: then V and d_out, which are needed for a
shorter time, have fewer.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def slot_of(it, other, SLOTS: gl.constexpr, OTHERS: gl.constexpr):
    """The slot of block `it` in a ring of SLOTS; `other`: its slot in one of OTHERS."""
    if SLOTS == OTHERS:
        return other
    else:
        return it % SLOTS


@gluon.jit
def free_phase_of(it, other, SLOTS: gl.constexpr, OTHERS: gl.constexpr):
    """The phase in which that slot is free for block `it`; `other`: in the other ring."""
    if SLOTS == OTHERS:
        return other
    else:
        return ((it // SLOTS) & 1) ^ 1
