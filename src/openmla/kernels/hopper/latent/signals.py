"""How the partitions of the latent kernel signal each other what is ready.

The two math warp-groups signal each other through named barriers:

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

The producer publishes work items through shared memory. A work item is a tile and its steps. Two
fit into `info`, so the next one is known before a work item ends.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from openmla.kernels.hopper.latent.records import (
    LISTED,
    WINDOW,
    ListedTile,
    RangeTile,
    SequenceTile,
    WindowTile,
)

WARPS = gl.constexpr(4)
FIELDS = gl.constexpr(8)  # of a work item in `info`
STEPS = gl.constexpr(0)
# Fields of a ListedTile.
TOKEN = gl.constexpr(1)
FIRST_HEAD = gl.constexpr(2)
# Fields of a SequenceTile, and of a RangeTile or a WindowTile.
FIRST_TOKEN = gl.constexpr(1)
FIRST_ROW = gl.constexpr(2)
ROWS = gl.constexpr(3)
SEEN = gl.constexpr(4)
WHOLE = gl.constexpr(5)
KEYS = gl.constexpr(6)
SLOT = gl.constexpr(7)
SINCE = gl.constexpr(7)


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
    """Mark for the simulator, which knows only the letter of PTX, that no fence is to follow."""
    signal("mov.b32 $0, 0; // copies that have arrived are seen by wgmma")


@gluon.jit
def wait_tile(barrier, phase, COPIED: gl.constexpr):
    """Wait for a tile. COPIED: by cp.async, whose arrival comes after its bytes are in place.

    PTX asks for a proxy fence between such a copy and wgmma, and here it would delay every score
    (4 to 5 % of the kernel). Like CUTLASS's cp.async main loop for Hopper, this kernel relies on
    the arrival instead. Tiles that ordinary stores wrote are fenced here, not by the producer: a
    fence waits for all loads of its thread, and the producer always has some on their way.
    """
    mbarrier.wait(barrier, phase)
    if COPIED:
        trust_arrived_copies()
    else:
        fence_async_shared()


@gluon.jit
def allocate_info():
    """Shared memory for two work items, one int32 per field."""
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    return gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], LINEAR)


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
        if source.window is not None:
            put(info, number, SINCE, tile.since)
        elif source.part_rows is not None:
            put(info, number, SLOT, tile.slot)
    mbarrier.arrive(bars.item_ready.index(number), count=1)


@gluon.jit
def read_work_item(info, bars, turn, MASK: gl.constexpr, SPLIT: gl.constexpr):
    """(tile, steps) of work item number `turn`, as `publish_work_item` wrote them. The tile is a
    `ListedTile`; of sequences with windows a `WindowTile`, of those that may be split a
    `RangeTile`, of others a `SequenceTile`."""
    number = turn & 1
    mbarrier.wait(bars.item_ready.index(number), (turn >> 1) & 1)
    steps = get(info, number, STEPS)
    if MASK == LISTED:
        tile = ListedTile(token=get(info, number, TOKEN), first_head=get(info, number, FIRST_HEAD))
    else:
        first_token = get(info, number, FIRST_TOKEN)
        first_row = get(info, number, FIRST_ROW)
        rows = get(info, number, ROWS)
        seen = get(info, number, SEEN)
        whole = get(info, number, WHOLE)
        keys = get(info, number, KEYS)
        if MASK == WINDOW:
            since = get(info, number, SINCE)
            tile = WindowTile(first_token, first_row, rows, seen, whole, keys, since)
        elif SPLIT:
            slot = get(info, number, SLOT)
            tile = RangeTile(first_token, first_row, rows, seen, whole, keys, slot)
        else:
            tile = SequenceTile(first_token, first_row, rows, seen, whole, keys)
    mbarrier.arrive(bars.item_empty.index(number), count=1)
    return tile, steps
