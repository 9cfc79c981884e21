"""A kernel of which runs exercise more or less.

| partition | warps | does |
|---|---|---|
| write | 4 | numbers of every step into a ring of two stages |
| read | 4 | adds them up |

| barrier | number | completed by (count) | waited for by |
|---|---|---|---|
| bars.ready | STAGES | write (1) | read |
| bars.free | STAGES | read (1) | write |
| done | 1 | read (1) | read, in vain: it has arrived itself |
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

L = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class Bars(NamedTuple):
    """Of a ring."""

    ready: Any
    free: Any


@gluon.jit
def barriers(NUMBER: gl.constexpr):
    """Some mbarriers that one arrival completes."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(made.index(i), count=1)
    return made


@gluon.jit
def await_slot(barrier, phase):
    """A wait that several callers share."""
    mbarrier.wait(barrier, phase)


@gluon.jit
def write(ring, bars, steps, STAGES: gl.constexpr, NEGATIVE: gl.constexpr):
    for i in range(0, steps):
        stage = i % STAGES
        mbarrier.wait(bars.free.index(stage), ((i // STAGES) & 1) ^ 1)
        values = gl.arange(0, 128, L) + i
        if NEGATIVE:
            values = -values
        ring.index(stage).store(values)
        mbarrier.arrive(bars.ready.index(stage), count=1)


@gluon.jit
def read(ring, bars, done, o_ptr, steps, STAGES: gl.constexpr):
    total = gl.zeros([128], gl.int32, L)
    for i in range(0, steps):
        stage = i % STAGES
        await_slot(bars.ready.index(stage), (i // STAGES) & 1)
        total += ring.index(stage).load(L)
        mbarrier.arrive(bars.free.index(stage), count=1)
        if i > 4:
            total += 0
            if i > 100:
                total = total * 2
    mbarrier.arrive(done, count=1)
    await_slot(done, 0)
    gl.store(o_ptr + gl.arange(0, 128, L), total)


@gluon.jit
def never(x):
    """Nobody calls it."""
    return x if x > 0 else -x


@gluon.jit
def added_up(o_ptr, steps, STAGES: gl.constexpr, NEGATIVE: gl.constexpr):
    """The sum of steps * 128 numbers, lane by lane."""
    ring = gl.allocate_shared_memory(gl.int32, [STAGES, 128], FLAT)
    bars = Bars(ready=barriers(STAGES), free=barriers(STAGES))
    done = barriers(1).index(0)
    gl.warp_specialize(
        [
            (read, (ring, bars, done, o_ptr, steps, STAGES)),
            (write, (ring, bars, steps, STAGES, NEGATIVE)),
        ],
        [4],
        [48],
    )
