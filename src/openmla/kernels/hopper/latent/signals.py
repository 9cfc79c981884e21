"""What the two math warp-groups of the latent kernel signal each other, through named barriers.

| barrier | left | right | says |
|---|---|---|---|
| 8 | `signal_reference` | `wait_reference` | the reference after block 0 is in `row_maxes` |
| 9 | `wait_p1` | `signal_p1` | P1 and the reference after block 1 are written |
| 10, 11 in turn | `signal_p0` | `wait_p0` | P0 is written |
| 12 | `signal_sums(0)` | `wait_sums(1)` | the left sums of a work item are written |
| 13 | `wait_sums(0)` | `signal_sums(1)` | the right sums of a work item are written |

A warp-group that signals does not wait: its 128 threads count as `bar.arrive`, the other 128 as
`bar.sync`. A barrier may be signaled again only after the other warp-group has passed it. Left
waits for P1 of a step before it signals for the next, and right has passed the reference by then,
but P0 perhaps not yet: so P0 has two barriers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def signal(asm: gl.constexpr):
    """One instruction that every thread executes, and that memory accesses do not pass."""
    gl.inline_asm_elementwise(asm, "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def signal_at(asm: gl.constexpr, number):
    """One instruction, as `signal` has it, with the number of a barrier in a register."""
    gl.inline_asm_elementwise(
        asm, "=r,r,~{memory}", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def signal_reference():
    """Left signals as soon as it knows the maximum of block 0."""
    signal("bar.arrive 8, 256; mov.b32 $0, 0;")


@gluon.jit
def wait_reference():
    """Right waits before it weighs block 1."""
    signal("bar.sync 8, 256; mov.b32 $0, 0;")


@gluon.jit
def signal_p1():
    """Right signals after it has written and fenced P1."""
    signal("bar.arrive 9, 256; mov.b32 $0, 0;")


@gluon.jit
def wait_p1():
    """Left waits before P1 · V1."""
    signal("bar.sync 9, 256; mov.b32 $0, 0;")


@gluon.jit
def signal_p0(it):
    """Left signals in step number `it` after it has written and fenced P0."""
    signal_at("bar.arrive $1, 256; mov.b32 $0, 0;", 10 + (it & 1))


@gluon.jit
def wait_p0(it):
    """Right waits in step number `it` before P0 · V0."""
    signal_at("bar.sync $1, 256; mov.b32 $0, 0;", 10 + (it & 1))


@gluon.jit
def signal_sums(SIDE: gl.constexpr):
    """Left (SIDE 0) or right (1) signals at the end of a work item."""
    if SIDE == 0:
        signal("bar.arrive 12, 256; mov.b32 $0, 0;")
    else:
        signal("bar.arrive 13, 256; mov.b32 $0, 0;")


@gluon.jit
def wait_sums(SIDE: gl.constexpr):
    """Left (SIDE 0) or right (1) waits before it divides by the sums of both."""
    if SIDE == 0:
        signal("bar.sync 13, 256; mov.b32 $0, 0;")
    else:
        signal("bar.sync 12, 256; mov.b32 $0, 0;")


@gluon.jit
def trust_arrived_copies():
    """Tell the simulator, which knows only the letter of PTX, that no fence follows on purpose."""
    signal("mov.b32 $0, 0; // copies that have arrived are seen by wgmma")
