"""How the producer of the latent kernel tells the warp-groups what they work on, work item by work
item.

A work item is a tile and its steps. Two fit into `info`, so the next one is known before a work
item ends.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

WARPS = gl.constexpr(4)
# Fields of a work item: its steps, and its tile (see source.work_item).
FIELDS = gl.constexpr(8)
STEPS = gl.constexpr(0)
TILE = gl.constexpr(1)


@gluon.jit
def put(info, slot, FIELD: gl.constexpr, value):
    """Write one field of a work item."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    info.index(slot * FIELDS + FIELD).store(gl.full([1], 0, gl.int32, ONE) + value)


@gluon.jit
def get(info, slot, FIELD: gl.constexpr):
    """Read one field."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(info.index(slot * FIELDS + FIELD).load(ONE), 0)


@gluon.jit
def announce(info, bars, turn, tile, steps, source):
    """Tell both warp-groups work item number `turn`; 0 steps: there are no more."""
    SIZE: gl.constexpr = 2 if source[5] is None else 6 if source[11] is None else 7
    t_ready, t_empty = bars
    slot = turn & 1
    mbarrier.wait(t_empty.index(slot), ((turn >> 1) & 1) ^ 1)
    put(info, slot, STEPS, steps)
    for i in gl.static_range(SIZE):
        put(info, slot, TILE + i, tile[i])
    mbarrier.arrive(t_ready.index(slot), count=1)


@gluon.jit
def read_work_item(info, t_bars, turn, MASK: gl.constexpr, SPLIT: gl.constexpr):
    """The tile of work item number `turn`, and its steps."""
    t_ready, t_empty = t_bars
    slot = turn & 1
    mbarrier.wait(t_ready.index(slot), (turn >> 1) & 1)
    steps = get(info, slot, STEPS)
    token = get(info, slot, TILE)
    row = get(info, slot, TILE + 1)
    if MASK == 0:
        tile = (token, row)
    else:
        rows = get(info, slot, TILE + 2)
        seen = get(info, slot, TILE + 3)
        whole = get(info, slot, TILE + 4)
        tile = (token, row, rows, seen, whole, get(info, slot, TILE + 5))
        if SPLIT:
            tile += (get(info, slot, TILE + 6),)
    mbarrier.arrive(t_empty.index(slot), count=1)
    return tile, steps
