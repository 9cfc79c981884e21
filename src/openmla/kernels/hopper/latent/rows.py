"""The producer of the latent kernel: tells the warp-groups their tiles, loads Q and gathers rows.

Rows are copied 16 bytes at a time (cp.async) into swizzled tiles; where there is no key the copy
fills in zeros, so no garbage is ever multiplied. Where pages hold a multiple of 64 rows, a block of
64 keys that are all there is a box of one page, and comes by TMA: 2 % faster with 128 heads (H200).
A block is three tiles, each loaded as soon as its last reader is done with it:

| order | tile | with it | last reader of the step before |
|---|---|---|---|
| 0 | Q, once per work item | | right, after its last scores |
| 1 | block 0 left | validity 0 | left, after P0 · V0 |
| 2 | block 0 right | rope 0 | right, after P0 · V0 |
| 3 | block 1 left | rope 1, validity 1 | left, after P1 · V1 |
| 4 | block 1 right | | right, after P1 · V1 |

Validity is told of lists only, before the copies: threads that issue these are held up, and the
scores wait for it (2 % of whole lists, H200). The entries that say where rows lie are loaded a step
ahead, also across work items.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from openmla.kernels.gluon.compat import cp_async, reinterpret, tma_load
from openmla.kernels.gluon.scores import MINUS_INF
from openmla.kernels.hopper.latent.pages import box_entry
from openmla.kernels.hopper.latent.source import KEYS, STEP, begin, entries, locate, work_item
from openmla.kernels.hopper.latent.work_items import announce

WARPS = gl.constexpr(4)
THREADS = gl.constexpr(128)
VECTOR = gl.constexpr(8)  # elements of 16 bytes; strides come in this unit


@gluon.jit
def load_box(desc, place, column: gl.constexpr, barrier, tile):
    """64 rows of Q (heads of one token, zeros past the last head; or heads of several tokens), or
    of a page."""
    BOX: gl.constexpr = desc.block_shape
    LAYOUT: gl.constexpr = desc.layout
    box = reinterpret(tile, desc.dtype, BOX, LAYOUT)
    tma_load(desc, [place[0], place[1], column], barrier, box)


@gluon.jit
def load_queries(descs, smem, barrier, place, DIMS: gl.constexpr):
    """Q of a tile: left, right and rope columns."""
    half_desc, rope_desc = descs[0], descs[1]
    left, right, rope = smem
    mbarrier.expect(barrier, 64 * (2 * DIMS[0] + DIMS[1]) * 2)
    load_box(half_desc, place, 0, barrier, left.index(0))
    load_box(half_desc, place, DIMS[0], barrier, right.index(0))
    if DIMS[1] > 0:
        load_box(rope_desc, place, 2 * DIMS[0], barrier, rope.index(0))


@gluon.jit
def start_of(rows, page, place, PAGE: gl.constexpr):
    """Pointers to rows."""
    data_ptr, stride_page, stride_row = rows
    start = place.to(gl.int64) * (stride_row.to(gl.int64) * VECTOR)
    if PAGE > 0:
        start += page.to(gl.int64) * (stride_page.to(gl.int64) * VECTOR)
    return data_ptr + start


@gluon.jit
def copy(tile, start, ok, FIRST: gl.constexpr, LAYOUT: gl.constexpr):
    """Columns FIRST … of 64 rows into a tile."""
    column = gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT)) + FIRST
    cp_async(tile, start[:, None] + column[None, :], mask=ok[:, None])


@gluon.jit
def arrive_copied(barrier):
    """One arrival per thread, when its copies so far are done."""
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def look_up(descs, source, first, count, at, LAYOUT: gl.constexpr):
    """What `find` needs to find the block of keys that begins at place `at` of a work item."""
    if descs[2] is not None:
        return box_entry(source, first, at, count)
    else:
        return entries(source, first, count, at, LAYOUT)


@gluon.jit
def find(descs, source, entry, rows, PAGE: gl.constexpr, LAYOUT: gl.constexpr):
    """Where a block's keys lie: (pointers to their rows, whether there is a row); and of a box its
    page, its first row in it, and whether all 64 keys are there."""
    if descs[2] is not None:
        row, keys = entry
        here = gl.arange(0, KEYS, LAYOUT)
        page, place, ok = locate(source, gl.where(here < keys, row + here, -1), PAGE)
        box = (row // source[9], row % source[9])
        return start_of(rows, page, place, PAGE), ok, box, keys >= KEYS
    else:
        page, place, ok = locate(source, entry, PAGE)
        return start_of(rows, page, place, PAGE), ok


@gluon.jit
def copy_tiles(half, rope, where, barrier, FIRST: gl.constexpr, LAYOUT: gl.constexpr):
    """Half of the latent columns of a block, and its rope columns unless None, row by row."""
    copy(half, where[0], where[1], FIRST, LAYOUT)
    if rope is not None:
        copy(rope, where[0], where[1], 2 * half.shape[1], LAYOUT)
    arrive_copied(barrier)


@gluon.jit
def load_tiles(descs, half, rope, where, barrier, FIRST: gl.constexpr, LAYOUT: gl.constexpr):
    """The same as boxes, if the block has all of its keys."""
    ROPE: gl.constexpr = 0 if rope is None else rope.shape[1]
    if descs[2] is None:
        copy_tiles(half, rope, where, barrier, FIRST, LAYOUT)
    elif where[3]:
        mbarrier.expect(barrier, KEYS * (half.shape[1] + ROPE) * 2)
        load_box(descs[2], where[2], FIRST, barrier, half)
        if rope is not None:
            load_box(descs[3], where[2], 2 * half.shape[1], barrier, rope)
        mbarrier.arrive(barrier, count=THREADS - 1)
    else:
        copy_tiles(half, rope, where, barrier, FIRST, LAYOUT)


@gluon.jit
def put_validity(bias, flags, ok, barrier, LANES: gl.constexpr):
    """0 or -inf per key; and for each warp's keys, whether any is -inf."""
    bias.store(gl.where(ok, 0.0, MINUS_INF))
    # Row r belongs to warp r // GROUP % 4: no warp has to ask another.
    GROUP: gl.constexpr = 32 // LANES
    missing = gl.reshape(gl.where(ok, 0, 1), [KEYS // (WARPS * GROUP), WARPS, GROUP])
    flags.store(gl.max(gl.max(missing, 2), 0))
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def gather(
    at, ahead, source, rows, descs, smem, bars, it, ST: gl.constexpr, DIMS: gl.constexpr,
    PAGE: gl.constexpr, LANES: gl.constexpr,
):  # fmt: skip
    """Load the two blocks of a step; returns the entries of the step that begins at `ahead`: (first
    entry of its work item, place of the step in it, places that count)."""
    k_smem, validity = smem
    left, right, rope = k_smem
    bias, flags = validity
    ready, free, valid = bars
    HALF: gl.constexpr = DIMS[0]
    LISTED: gl.constexpr = source[5] is None
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    RL: gl.constexpr = gl.SliceLayout(1, BL)
    entry0, entry1 = at
    first, place_ahead, count = ahead
    b = it % ST * 2
    phase = ((it // ST) & 1) ^ 1
    where = find(descs, source, entry0, rows, PAGE, RL)
    entry0 = look_up(descs, source, first, count, place_ahead, RL)
    rope0 = rope.index(b) if DIMS[1] > 0 else None
    rope1 = rope.index(b + 1) if DIMS[1] > 0 else None
    mbarrier.wait(free.index(2 * b), phase)
    if LISTED:
        put_validity(bias.index(b), flags.index(b), where[1], valid.index(b), LANES)
    load_tiles(descs, left.index(b), None, where, ready.index(2 * b), 0, BL)
    mbarrier.wait(free.index(2 * b + 1), phase)
    load_tiles(descs, right.index(b), rope0, where, ready.index(2 * b + 1), HALF, BL)
    where = find(descs, source, entry1, rows, PAGE, RL)
    entry1 = look_up(descs, source, first, count, place_ahead + KEYS, RL)
    b += 1
    mbarrier.wait(free.index(2 * b), phase)
    if LISTED:
        put_validity(bias.index(b), flags.index(b), where[1], valid.index(b), LANES)
    load_tiles(descs, left.index(b), rope1, where, ready.index(2 * b), 0, BL)
    mbarrier.wait(free.index(2 * b + 1), phase)
    load_tiles(descs, right.index(b), None, where, ready.index(2 * b + 1), HALF, BL)
    return entry0, entry1


@gluon.jit
def producer(
    info, source, rows, shape, descs, smem, bars, ST: gl.constexpr, DIMS: gl.constexpr,
    PAGE: gl.constexpr, LANES: gl.constexpr,
):  # fmt: skip
    """Every work item of this program. LANES: threads that copy neighboring 16 bytes of a row.

    The next work item is looked for before the last step of one: the warp-groups are busy then.
    """
    q_smem, k_smem, validity = smem
    q_bars, ready, free, valid, t_bars = bars
    q_ready, q_free = q_bars
    step_smem = (k_smem, validity)
    step_bars = (ready, free, valid)
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    RL: gl.constexpr = gl.SliceLayout(1, BL)
    turn = gl.program_id(0) * 0
    it = turn  # steps so far, over all work items
    cursor, tile, box, first, skipped, count, steps = work_item(begin(source), source, shape, False)
    announce(info, t_bars, turn, tile, steps, source)
    at = (
        look_up(descs, source, first, count, skipped, RL),
        look_up(descs, source, first, count, skipped + KEYS, RL),
    )
    while steps > 0:
        mbarrier.wait(q_free, (turn & 1) ^ 1)
        load_queries(descs, q_smem, q_ready, box, DIMS)
        left_over = steps * 0
        for j in range(0, steps):
            place = skipped + (j + 1) * STEP
            if j == steps - 1:
                turn += 1
                cursor, tile, box, first, skipped, count, left_over = work_item(
                    cursor, source, shape, True
                )
                announce(info, t_bars, turn, tile, left_over, source)
                place = skipped
            ahead = (first, place, count)
            at = gather(
                at, ahead, source, rows, descs, step_smem, step_bars, it, ST, DIMS, PAGE, LANES
            )
            it += 1
        steps = left_over
