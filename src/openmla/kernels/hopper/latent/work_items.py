"""How the producer of the latent kernel tells the warp-groups what they work on, work item by work
item.

A work item is a tile and its steps. Two fit into `info`, so the next one is known before a work
item ends.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from openmla.kernels.hopper.latent.records import LISTED, ListedTile, RangeTile, SequenceTile

WARPS = gl.constexpr(4)
FIELDS = gl.constexpr(8)  # of a work item in `info`
STEPS = gl.constexpr(0)
# Fields of a ListedTile.
TOKEN = gl.constexpr(1)
FIRST_HEAD = gl.constexpr(2)
# Fields of a SequenceTile, and of a RangeTile.
FIRST_TOKEN = gl.constexpr(1)
FIRST_ROW = gl.constexpr(2)
ROWS = gl.constexpr(3)
SEEN = gl.constexpr(4)
WHOLE = gl.constexpr(5)
KEYS = gl.constexpr(6)
SLOT = gl.constexpr(7)


@gluon.jit
def put(info, number, FIELD: gl.constexpr, value):
    """Write one field of the work item that `info` holds as number 0 or 1."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    info.index(number * FIELDS + FIELD).store(gl.full([1], 0, gl.int32, ONE) + value)


@gluon.jit
def get(info, number, FIELD: gl.constexpr):
    """Read one field of the work item that `info` holds as number 0 or 1."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(info.index(number * FIELDS + FIELD).load(ONE), 0)


@gluon.jit
def publish_work_item(info, bars, turn, tile, steps, source):
    """Publish the tile and the steps of work item number `turn`; 0 steps mark the end.

    bars: a kernel's `Barriers`. tile: see `WorkItem`.
    """
    number = turn & 1
    mbarrier.wait(bars.item_empty.index(number), ((turn >> 1) & 1) ^ 1)
    put(info, number, STEPS, steps)
    if source.sequences is None:
        put(info, number, TOKEN, tile.token)
        put(info, number, FIRST_HEAD, tile.first_head)
    else:
        put(info, number, FIRST_TOKEN, tile.first_token)
        put(info, number, FIRST_ROW, tile.first_row)
        put(info, number, ROWS, tile.rows)
        put(info, number, SEEN, tile.seen)
        put(info, number, WHOLE, tile.whole)
        put(info, number, KEYS, tile.keys)
        if source.part_rows is not None:
            put(info, number, SLOT, tile.slot)
    mbarrier.arrive(bars.item_ready.index(number), count=1)


@gluon.jit
def read_work_item(info, bars, turn, MASK: gl.constexpr, SPLIT: gl.constexpr):
    """(tile, steps) of work item number `turn`, as `publish_work_item` wrote them: a `ListedTile`,
    a `RangeTile` where requests may be split, else a `SequenceTile`."""
    number = turn & 1
    mbarrier.wait(bars.item_ready.index(number), (turn >> 1) & 1)
    steps = get(info, number, STEPS)
    if MASK == LISTED:
        tile = ListedTile(token=get(info, number, TOKEN), first_head=get(info, number, FIRST_HEAD))
    elif SPLIT:
        tile = RangeTile(
            first_token=get(info, number, FIRST_TOKEN),
            first_row=get(info, number, FIRST_ROW),
            rows=get(info, number, ROWS),
            seen=get(info, number, SEEN),
            whole=get(info, number, WHOLE),
            keys=get(info, number, KEYS),
            slot=get(info, number, SLOT),
        )
    else:
        tile = SequenceTile(
            first_token=get(info, number, FIRST_TOKEN),
            first_row=get(info, number, FIRST_ROW),
            rows=get(info, number, ROWS),
            seen=get(info, number, SEEN),
            whole=get(info, number, WHOLE),
            keys=get(info, number, KEYS),
        )
    mbarrier.arrive(bars.item_empty.index(number), count=1)
    return tile, steps
