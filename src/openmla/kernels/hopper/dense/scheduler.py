"""The scheduler warp: fetches work items from an atomic counter and tells the other partitions.

The next number is fetched when the producer has two key blocks left to load: late, so that the
longest work items really go to the first CTA that is free, and early enough to hide the atomic and
the lookup. A work item is described in one of two slots in shared memory, one int32 per field:

| field | meaning | producer | consumer |
|---|---|---|---|
| HEAD | head | x | x |
| TOKEN | first row of q and out | x | x |
| ROWS | queries from there to the request's end | | x |
| KEY | first row of k and v | x | |
| KEYS | keys of the range | x | x |
| BLOCKS | key blocks to visit; 0: no more work | x | x |
| WHOLE | blocks that need no mask | | x |
| SEEN | keys that the first row sees, if causal | | x |
| REQUEST, SKIPPED | line of the block table, keys before the range | if paged | |
| SLOT | where a part of a split request goes; -1: it is whole | | if split |
| CUT | blocks, the first ones, in which some row's window begins | | if windowed |
| SINCE | first key of the first row's window; negative: all | | if windowed |

The counter is 0 between launches: the CTA that fetches the last number resets it. Where there are
no more work items than CTAs, none is fetched.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from openmla.kernels.gluon.requests import CHUNK, owner, sum_before
from openmla.kernels.hopper.dense.records import ConsumerItem, OutputTile
from openmla.kernels.hopper.dense.tiles import (
    cut_blocks,
    key_blocks,
    last_slot,
    within_window,
    work_item,
    work_items,
)

FIELDS = gl.constexpr(16)
HEAD = gl.constexpr(0)
TOKEN = gl.constexpr(1)
ROWS = gl.constexpr(2)
KEY = gl.constexpr(3)
KEYS = gl.constexpr(4)
BLOCKS = gl.constexpr(5)
WHOLE = gl.constexpr(6)
SEEN = gl.constexpr(7)
REQUEST = gl.constexpr(8)
SKIPPED = gl.constexpr(9)
SLOT = gl.constexpr(10)
CUT = gl.constexpr(11)
SINCE = gl.constexpr(12)

# One atomic add per warp, its result given to every lane.
DRAW = gl.constexpr(
    "{ .reg .pred p; .reg .b32 t; mov.u32 t, %laneid; setp.eq.u32 p, t, 0; mov.b32 t, 0; "
    "@p atom.global.add.u32 t, [$1], 1; shfl.sync.idx.b32 $0, t, 0, 31, -1; }"
)


@gluon.jit
def allocate_info():
    """Two slots of fields in shared memory."""
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    return gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], LINEAR)


@gluon.jit
def draw(counter):
    """Fetch the next number of the launch."""
    return gl.inline_asm_elementwise(
        DRAW, "=r,l,~{memory}", [counter], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def put(info, slot, FIELD: gl.constexpr, value):
    """Write one field; by the one warp of the scheduler."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    info.index(slot * FIELDS + FIELD).store(gl.full([1], 0, gl.int32, ONE) + value)


@gluon.jit
def get(info, slot, FIELD: gl.constexpr, NW: gl.constexpr):
    """Read one field in a partition of NW warps."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    return gl.max(info.index(slot * FIELDS + FIELD).load(ONE), 0)


@gluon.jit
def get_consumer_item(info, slot, NW: gl.constexpr, SPLIT: gl.constexpr):
    """The ConsumerItem of a slot, in a partition of NW warps."""
    head = get(info, slot, HEAD, NW)
    token = get(info, slot, TOKEN, NW)
    rows = get(info, slot, ROWS, NW)
    workspace_slot = head * 0  # not read unless requests are split
    if SPLIT > 0:
        workspace_slot = get(info, slot, SLOT, NW)
    return ConsumerItem(
        tile=OutputTile(head=head, token=token, rows=rows, slot=workspace_slot),
        blocks=get(info, slot, BLOCKS, NW),
        whole=get(info, slot, WHOLE, NW),
        keys=get(info, slot, KEYS, NW),
        seen=get(info, slot, SEEN, NW),
    )


@gluon.jit
def put_work_item(info, slot, request, x, before, requests, TILE: gl.constexpr):
    """Work out work item x of a request and write all its fields.

    before: workspace slots of the split requests before this one; requests: Requests, TILE: Tiling.
    """
    BM: gl.constexpr = TILE.block_m
    BN: gl.constexpr = TILE.block_n
    SPLIT: gl.constexpr = TILE.min_split
    item = work_item(request, x, requests, BM, TILE.group_keys, SPLIT, TILE.sm_count)
    if requests.window is not None:
        item = within_window(item, requests.window, BN)
        put(info, slot, CUT, cut_blocks(item.rows, item.seen, requests.window, BM, BN))
        put(info, slot, SINCE, item.seen - requests.window)
    blocks, whole = key_blocks(item.rows, item.keys, item.seen, BM, BN, TILE.is_causal)
    put(info, slot, HEAD, item.head)
    put(info, slot, TOKEN, item.token)
    put(info, slot, ROWS, item.rows)
    put(info, slot, KEY, item.key)
    put(info, slot, KEYS, item.keys)
    put(info, slot, BLOCKS, blocks)
    put(info, slot, WHOLE, whole)
    put(info, slot, SEEN, item.seen)
    put(info, slot, REQUEST, request)
    put(info, slot, SKIPPED, item.skipped)
    if SPLIT > 0:
        own = gl.minimum(before + x, last_slot(requests, SPLIT, TILE.sm_count))
        put(info, slot, SLOT, gl.where(item.parts > 1, own, -1))


@gluon.jit
def scheduler(info, bars, counter, requests, TILE: gl.constexpr):
    """Announce work items until there are none, then announce the end.

    bars: Barriers, requests: Requests, TILE: Tiling.
    """
    batch = requests.batch
    BM: gl.constexpr = TILE.block_m
    SPLIT: gl.constexpr = TILE.min_split
    SMS: gl.constexpr = TILE.sm_count
    programs = gl.num_programs(0)
    x = gl.program_id(0)
    # The chunk of requests at hand: its first request, its first work item, its first workspace
    # slot.
    first = x * 0
    base = x * 0
    slots = x * 0
    every, split = work_items(first, requests, BM, SPLIT, SMS, 1)
    size = gl.sum(every, 0)
    turn = x * 0
    live = x * 0 + 1
    while live > 0:
        while (x >= base + size) & (first + CHUNK <= batch):
            base += size
            slots += gl.sum(split, 0)
            first += CHUNK
            every, split = work_items(first, requests, BM, SPLIT, SMS, 1)
            size = gl.sum(every, 0)
        slot = turn & 1
        mbarrier.wait(bars.t_empty.index(slot), ((turn >> 1) & 1) ^ 1)
        if x < base + size:
            lane = owner(x - base, every, 1)
            start = sum_before(lane, every, 1)
            before = slots
            if SPLIT > 0:
                before = slots + sum_before(lane, split, 1)
            put_work_item(info, slot, first + lane, x - base - start, before, requests, TILE)
            mbarrier.arrive(bars.t_ready.index(slot), count=1)
            if (batch < CHUNK) & (size <= programs):  # every CTA sees the same: one work item each
                x = size + programs
            else:
                mbarrier.wait(bars.t_request.index(0), turn & 1)
                x = draw(counter) + programs
        else:
            for field in gl.static_range((SLOT if requests.window is None else SINCE) + 1):
                put(info, slot, field, 0)
            mbarrier.arrive(bars.t_ready.index(slot), count=1)
            if x - programs == base + size - 1:
                gl.store(counter, 0)
            live = x * 0
        turn += 1
