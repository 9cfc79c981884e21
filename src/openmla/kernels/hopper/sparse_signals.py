# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""What the two math warp-groups of the latent kernel tell each other, through named barriers.

| barrier | left | right | says |
|---|---|---|---|
| 8 | `tell_reference` | `hear_reference` | the reference after block 0 is in `tops` |
| 9 | `hear_p1` | `tell_p1` | P1 and the reference after block 1 are written |
| 10, 11 in turn | `tell_p0` | `hear_p0` | P0 is written |
| 12 | `tell_sums(0)` | `hear_sums(1)` | the left sums of a piece are written |
| 13 | `hear_sums(0)` | `tell_sums(1)` | the right sums of a piece are written |

Who tells does not wait: `bar.arrive` counts 128 threads, `bar.sync` the other 128. Nothing may be
told again before it was heard. The left warp-group hears P1 of a step before it tells of the next,
and the right one has heard the reference by then, but P0 perhaps not yet: so P0 has two barriers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def signal(asm: gl.constexpr):
    """One instruction that every thread executes, and that memory accesses do not pass."""
    gl.inline_asm_elementwise(asm, "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def signal_at(asm: gl.constexpr, number):
    """The same with the number of a barrier in a register."""
    gl.inline_asm_elementwise(
        asm, "=r,r,~{memory}", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def tell_reference():
    """Left, as soon as it knows the maximum of block 0."""
    signal("bar.arrive 8, 256; mov.b32 $0, 0;")


@gluon.jit
def hear_reference():
    """Right, before it weighs block 1."""
    signal("bar.sync 8, 256; mov.b32 $0, 0;")


@gluon.jit
def tell_p1():
    """Right, after a fence."""
    signal("bar.arrive 9, 256; mov.b32 $0, 0;")


@gluon.jit
def hear_p1():
    """Left, before P1 · V1."""
    signal("bar.sync 9, 256; mov.b32 $0, 0;")


@gluon.jit
def tell_p0(it):
    """Left in step number `it`, after a fence."""
    signal_at("bar.arrive $1, 256; mov.b32 $0, 0;", 10 + (it & 1))


@gluon.jit
def hear_p0(it):
    """Right, before P0 · V0."""
    signal_at("bar.sync $1, 256; mov.b32 $0, 0;", 10 + (it & 1))


@gluon.jit
def tell_sums(SIDE: gl.constexpr):
    """Left (SIDE 0) or right (1), at the end of a piece."""
    if SIDE == 0:
        signal("bar.arrive 12, 256; mov.b32 $0, 0;")
    else:
        signal("bar.arrive 13, 256; mov.b32 $0, 0;")


@gluon.jit
def hear_sums(SIDE: gl.constexpr):
    """Left or right, before it divides by the sums of both."""
    if SIDE == 0:
        signal("bar.sync 13, 256; mov.b32 $0, 0;")
    else:
        signal("bar.sync 12, 256; mov.b32 $0, 0;")


@gluon.jit
def trust_arrived_copies():
    """Tell the simulator, which knows only the letter of PTX, that no fence follows on purpose."""
    signal("mov.b32 $0, 0; // copies that have arrived are seen by wgmma")
