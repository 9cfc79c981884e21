"""Where K and V of block j lie, and how often their barriers have turned by then.

RING = (FUSED, ST, ROPES): K and V in turn in one ring of ST slots, with ROPES buffers of rope
beside it; or K (with its rope) and V in rings of ST slots each, behind one another.

The order of a fused ring is the order in which the products need the tiles:

| slot item | 0 | 1 | 2 | 3 | 4 | 5 |
|---|---|---|---|---|---|---|
| two query tiles | K0 | V0 | K1 | V1 | K2 | V2 |
| one query tile | K0 | K1 | V0 | K2 | V1 | K3 |

A rope buffer needs no barrier of its own. With ROPES = (ST + 1) / 2, block j + ROPES takes the slot
that V of block j (one query tile: of block j - 1) was in, and that product follows block j's QK.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

from openmla.kernels.blackwell.pair.items import barrier_layout
from openmla.kernels.gluon.barriers import barriers
from openmla.kernels.gluon.compat import reinterpret


@gluon.jit
def signals(NUMBER: gl.constexpr, COUNT: gl.constexpr, CTAS: gl.constexpr, COMMON: gl.constexpr):
    """NUMBER mbarriers, each completed by COUNT arrivals. Of a pair every CTA has its own, or if
    COMMON the first has them, and each CTA arrives COUNT times."""
    if CTAS == 1:
        return barriers(NUMBER, COUNT)
    else:
        EACH: gl.constexpr = 1 if COMMON else 2
        LAYOUT: gl.constexpr = barrier_layout(COMMON)
        made = gl.allocate_shared_memory(gl.int64, [NUMBER, EACH], LAYOUT)
        for i in gl.static_range(NUMBER):
            mbarrier.init(made.index(i), count=COUNT)
        return made


@gluon.jit
def k_place(j, ONE: gl.constexpr, RING: gl.constexpr):
    """(slot, phase, rope buffer) of K of block j."""
    if RING[0]:
        item = 2 * j
        if ONE:
            item = gl.maximum(2 * j - 1, 0)
        return item % RING[1], (item // RING[1]) & 1, j % RING[2]
    else:
        return j % RING[1], (j // RING[1]) & 1, j % RING[1]


@gluon.jit
def v_place(j, ONE: gl.constexpr, RING: gl.constexpr):
    """(slot, phase, number of the slot's barriers) of V of block j."""
    if RING[0]:
        item = 2 * j + 1
        if ONE:
            item = 2 * j + 2
        slot = item % RING[1]
        return slot, (item // RING[1]) & 1, slot
    else:
        slot = j % RING[1]
        return slot, (j // RING[1]) & 1, slot + RING[1]


@gluon.jit
def tile_of(slots, slot, COLUMNS: gl.constexpr):
    """The tile in a slot: all of it, or its first COLUMNS columns where K and V differ in width."""
    whole = slots.index(slot)
    SHAPE: gl.constexpr = (slots.shape[1], COLUMNS)
    LAYOUT: gl.constexpr = slots.type.layout
    return reinterpret(whole, slots.dtype, SHAPE, LAYOUT)
