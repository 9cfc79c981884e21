"""Where K and V of block j lie, and how often their barriers have turned by then.

RING is a records.Ring. In a fused ring K and V take turns in one ring of `stages` slots, with
`rope_buffers` buffers of rope beside it. Otherwise K (with its rope) and V have rings of `stages`
slots each, and the barriers of V's slots follow those of K's.

The order of a fused ring is the order in which the products need the tiles:

| slot item | 0 | 1 | 2 | 3 | 4 | 5 |
|---|---|---|---|---|---|---|
| two query tiles | K0 | V0 | K1 | V1 | K2 | V2 |
| one query tile | K0 | K1 | V0 | K2 | V1 | K3 |

A rope buffer needs no barrier of its own. With rope_buffers = (stages + 1) / 2, block
j + rope_buffers takes the slot that V of block j (one query tile: of block j - 1) was in, and the
product with this V follows the QK of block j.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

from openmla.kernels.blackwell.pair.items import barrier_layout
from openmla.kernels.gluon.barriers import barriers
from openmla.kernels.gluon.compat import reinterpret


@gluon.jit
def signals(NUMBER: gl.constexpr, COUNT: gl.constexpr, CTAS: gl.constexpr, COMMON: gl.constexpr):
    """NUMBER mbarriers, each completed by COUNT arrivals.

    With a pair of CTAs each has its own barriers; or, if COMMON, the first CTA has them for both,
    and each CTA arrives COUNT times.
    """
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
    if RING.is_fused:
        item = 2 * j
        if ONE:
            item = gl.maximum(2 * j - 1, 0)
        return item % RING.stages, (item // RING.stages) & 1, j % RING.rope_buffers
    else:
        return j % RING.stages, (j // RING.stages) & 1, j % RING.stages


@gluon.jit
def v_place(j, ONE: gl.constexpr, RING: gl.constexpr):
    """(slot, phase, number of the slot's barriers) of V of block j."""
    if RING.is_fused:
        item = 2 * j + 1
        if ONE:
            item = 2 * j + 2
        slot = item % RING.stages
        return slot, (item // RING.stages) & 1, slot
    else:
        slot = j % RING.stages
        return slot, (j // RING.stages) & 1, slot + RING.stages


@gluon.jit
def tile_of(slots, slot, COLUMNS: gl.constexpr):
    """The tile in a slot: all of it, or its first COLUMNS columns where K and V differ in width."""
    whole = slots.index(slot)
    SHAPE: gl.constexpr = (slots.shape[1], COLUMNS)
    LAYOUT: gl.constexpr = slots.type.layout
    return reinterpret(whole, slots.dtype, SHAPE, LAYOUT)
