"""The scheduler warp of a pass: work items (gluon/gradients/work_items.py) in shared memory.

The next number is fetched when the producer has two blocks left to load. The counter is 0 between
launches: the CTA that fetches the last number resets it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from openmla.kernels.gluon.gradients.records import WorkItem
from openmla.kernels.gluon.gradients.work_items import counts, work_item
from openmla.kernels.gluon.requests import CHUNK, owner, sum_before
from openmla.kernels.hopper.dense.scheduler import draw, get, put

HEAD = gl.constexpr(0)
TOKEN = gl.constexpr(1)
ROWS = gl.constexpr(2)
START = gl.constexpr(3)
LENGTH = gl.constexpr(4)
FIRST = gl.constexpr(5)
BLOCKS = gl.constexpr(6)
MASKED = gl.constexpr(7)
LIMIT = gl.constexpr(8)
PLACE = gl.constexpr(9)
USED = gl.constexpr(10)  # of the FIELDS of a slot


@gluon.jit
def put_work_item(info, slot, item):
    """Describe a WorkItem in a slot; by the one warp of the scheduler."""
    put(info, slot, HEAD, item.head)
    put(info, slot, TOKEN, item.token)
    put(info, slot, ROWS, item.rows)
    put(info, slot, START, item.start)
    put(info, slot, LENGTH, item.length)
    put(info, slot, FIRST, item.first)
    put(info, slot, BLOCKS, item.blocks)
    put(info, slot, MASKED, item.masked)
    put(info, slot, LIMIT, item.limit)
    put(info, slot, PLACE, item.place)


@gluon.jit
def get_work_item(info, slot, NW: gl.constexpr):
    """The WorkItem of a slot, in a partition of NW warps."""
    return WorkItem(
        head=get(info, slot, HEAD, NW),
        token=get(info, slot, TOKEN, NW),
        rows=get(info, slot, ROWS, NW),
        start=get(info, slot, START, NW),
        length=get(info, slot, LENGTH, NW),
        first=get(info, slot, FIRST, NW),
        blocks=get(info, slot, BLOCKS, NW),
        masked=get(info, slot, MASKED, NW),
        limit=get(info, slot, LIMIT, NW),
        place=get(info, slot, PLACE, NW),
    )


@gluon.jit
def scheduler(info, bars, counter, sequences, TILE: gl.constexpr):
    """Announce work items until there are none, then announce the end.

    bars: QueryBarriers or KeyBarriers, sequences: Sequences, TILE: Tiling.
    """
    batch = sequences.batch
    programs = gl.num_programs(0)
    x = gl.program_id(0)
    # The chunk of sequences at hand: its first sequence, its first work item.
    first = x * 0
    base = x * 0
    every = counts(first, sequences, TILE, 1)
    size = gl.sum(every, 0)
    turn = x * 0
    live = x * 0 + 1
    while live > 0:
        while (x >= base + size) & (first + CHUNK <= batch):
            base += size
            first += CHUNK
            every = counts(first, sequences, TILE, 1)
            size = gl.sum(every, 0)
        slot = turn & 1
        mbarrier.wait(bars.t_empty.index(slot), ((turn >> 1) & 1) ^ 1)
        if x < base + size:
            lane = owner(x - base, every, 1)
            number = x - base - sum_before(lane, every, 1)
            put_work_item(info, slot, work_item(first + lane, number, sequences, TILE))
            mbarrier.arrive(bars.t_ready.index(slot), count=1)
            if (batch < CHUNK) & (size <= programs):  # every CTA sees the same: one work item each
                x = size + programs
            else:
                mbarrier.wait(bars.t_request.index(0), turn & 1)
                x = draw(counter) + programs
        else:
            for field in gl.static_range(USED):
                put(info, slot, field, 0)
            mbarrier.arrive(bars.t_ready.index(slot), count=1)
            if x - programs == base + size - 1:
                gl.store(counter, 0)
            live = x * 0
        turn += 1
