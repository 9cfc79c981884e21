"""The producer of the latent kernel: publishes work items, loads Q and gathers rows.

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

Only lists have validity. It is written before the copies are issued: threads that issue copies are
held up, and the scores wait for it (2 % of whole lists, H200). The entries that say where rows lie
are loaded a step ahead, also across work items.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from openmla.kernels.gluon.compat import cp_async, reinterpret, tma_load
from openmla.kernels.gluon.scores import MINUS_INF
from openmla.kernels.hopper.latent.records import (
    BoxStart,
    FoundBox,
    FoundRows,
    StepEntries,
    Validity,
)
from openmla.kernels.hopper.latent.signals import publish_work_item
from openmla.kernels.hopper.latent.source import (
    KEYS,
    STEP,
    box_entry,
    entries,
    find_work,
    first_work,
    locate,
    work_item,
)

WARPS = gl.constexpr(4)
THREADS = gl.constexpr(128)
VECTOR = gl.constexpr(8)  # elements of 16 bytes; strides come in this unit


@gluon.jit
def load_box(desc, start, column: gl.constexpr, barrier, tile):
    """Load a box of 64 rows by TMA: heads of one token (zeros past the last head), heads of several
    tokens, or rows of a page. start: its `BoxStart`."""
    BOX: gl.constexpr = desc.block_shape
    LAYOUT: gl.constexpr = desc.layout
    box = reinterpret(tile, desc.dtype, BOX, LAYOUT)
    tma_load(desc, [start.outer, start.row, column], barrier, box)


@gluon.jit
def load_queries(descs, tiles, barrier, start, DIMS: gl.constexpr):
    """Load Q of a tile into `ColumnTiles`. descs: its `RowDescriptors`."""
    HALF: gl.constexpr = DIMS.latent // 2
    mbarrier.expect(barrier, 64 * (DIMS.latent + DIMS.rope) * 2)
    load_box(descs.latent, start, 0, barrier, tiles.left.index(0))
    load_box(descs.latent, start, HALF, barrier, tiles.right.index(0))
    if DIMS.rope > 0:
        load_box(descs.rope, start, DIMS.latent, barrier, tiles.rope.index(0))


@gluon.jit
def start_of(rows, page, place):
    """Pointers to rows of `CacheRows`."""
    start = place.to(gl.int64) * (rows.row_stride.to(gl.int64) * VECTOR)
    if rows.page_stride is not None:
        start += page.to(gl.int64) * (rows.page_stride.to(gl.int64) * VECTOR)
    return rows.data_ptr + start


@gluon.jit
def copy(tile, start, ok, FIRST: gl.constexpr, LAYOUT: gl.constexpr):
    """Start copying columns FIRST … of 64 rows into a tile; zeros where there is no row."""
    column = gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT)) + FIRST
    cp_async(tile, start[:, None] + column[None, :], mask=ok[:, None])


@gluon.jit
def arrive_copied(barrier):
    """Every thread arrives once, when its copies so far are done."""
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def look_up(k_descs, source, item, place, LAYOUT: gl.constexpr):
    """What `find` needs to find the block of keys that begins at a place of a `WorkItem`."""
    if k_descs.latent is not None:
        return box_entry(source, item.first_entry, place, item.stop)
    else:
        return entries(source, item.first_entry, item.stop, place, LAYOUT)


@gluon.jit
def find(k_descs, source, entry, rows, LAYOUT: gl.constexpr):
    """Where the keys of a block lie, from what `look_up` returned: a `FoundBox` where pages have
    descriptors, else `FoundRows`."""
    if k_descs.latent is not None:
        here = gl.arange(0, KEYS, LAYOUT)
        first = entry.page * source.sequences.pages.size + entry.row
        index = gl.where(here < entry.keys, first + here, -1)
        page, place, ok = locate(source, index, rows)
        box = BoxStart(outer=entry.page, row=entry.row)
        start = start_of(rows, page, place)
        return FoundBox(start=start, is_there=ok, box=box, is_whole=entry.keys >= KEYS)
    else:
        page, place, ok = locate(source, entry, rows)
        return FoundRows(start=start_of(rows, page, place), is_there=ok)


@gluon.jit
def copy_tiles(half, rope, found, barrier, FIRST: gl.constexpr, LAYOUT: gl.constexpr):
    """Copy half of the latent columns of a block, and its rope columns unless None, row by row."""
    copy(half, found.start, found.is_there, FIRST, LAYOUT)
    if rope is not None:
        copy(rope, found.start, found.is_there, 2 * half.shape[1], LAYOUT)
    arrive_copied(barrier)


@gluon.jit
def load_tiles(k_descs, half, rope, found, barrier, FIRST: gl.constexpr, LAYOUT: gl.constexpr):
    """Load half of the latent columns of a block, and its rope columns unless None. found: what
    `find` returned.

    A block that has all of its keys comes by TMA where pages have descriptors, others by cp.async.
    """
    ROPE: gl.constexpr = 0 if rope is None else rope.shape[1]
    if k_descs.latent is None:
        copy_tiles(half, rope, found, barrier, FIRST, LAYOUT)
    elif found.is_whole:
        mbarrier.expect(barrier, KEYS * (half.shape[1] + ROPE) * 2)
        load_box(k_descs.latent, found.box, FIRST, barrier, half)
        if rope is not None:
            load_box(k_descs.rope, found.box, 2 * half.shape[1], barrier, rope)
        mbarrier.arrive(barrier, count=THREADS - 1)
    else:
        copy_tiles(half, rope, found, barrier, FIRST, LAYOUT)


@gluon.jit
def validity_of(validity, b):
    """The `Validity` of block b."""
    return Validity(bias=validity.bias.index(b), flags=validity.flags.index(b))


@gluon.jit
def put_validity(validity, ok, barrier, LANES: gl.constexpr):
    """Write the `Validity` of a block: 0 or -inf per key; for each warp's keys, whether any is
    -inf."""
    validity.bias.store(gl.where(ok, 0.0, MINUS_INF))
    # Row r belongs to warp r // GROUP % 4: no warp has to ask another.
    GROUP: gl.constexpr = 32 // LANES
    missing = gl.reshape(gl.where(ok, 0, 1), [KEYS // (WARPS * GROUP), WARPS, GROUP])
    validity.flags.store(gl.max(gl.max(missing, 2), 0))
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def first_work_item(turn, info, source, counts, bars, CHUNK: gl.constexpr):
    """(where the first work item of this program was found, the `WorkItem`, its steps), after it is
    published."""
    found = first_work(source)
    if source.sequences is not None and source.counter is None:
        found = find_work(found, source, True, CHUNK)
        item, steps = work_item(found, source, counts)
    else:
        item, steps = work_item(found, source, counts, True)
        if source.sequences is not None:  # noqa: SIM102 - decided when compiled
            if steps == 0:
                found = find_work(found, source, True, CHUNK)
                item, steps = work_item(found, source, counts)
    publish_work_item(info, bars, turn, item.tile, steps, source)
    return found, item, steps


@gluon.jit
def step_ahead(
    turn, it, found, item, next_steps, j, steps, info, source, counts, bars, CHUNK: gl.constexpr
):
    """(turn, where the work item was found, `WorkItem`, steps of the next work item, place) of the
    step that follows step j of `steps`.

    The next work item is found before the last step but one, and published before the last: the
    warp-groups are busy then, and there is half a step until the tiles of a step are empty. Both at
    once would take longer. Its steps are `next_steps` from there on. For sequences, the search runs
    once before without taking a number, while the rows of the first step (`it` 0) are on their way:
    its code is then in the instruction cache.
    """
    is_next = j == gl.maximum(steps - 2, 0)
    if source.sequences is None:
        if is_next:
            found = find_work(found, source, True, CHUNK)
    elif is_next | (it == 1):
        found = find_work(found, source, is_next, CHUNK)
    place = item.skipped + (j + 1) * STEP
    if j == steps - 1:
        turn += 1
        item, next_steps = work_item(found, source, counts)
        publish_work_item(info, bars, turn, item.tile, next_steps, source)
        place = item.skipped
    return turn, found, item, next_steps, place


@gluon.jit
def gather(
    at,
    item,
    place_ahead,
    source,
    rows,
    k_descs,
    smem,
    bars,
    it,
    ST: gl.constexpr,
    DIMS: gl.constexpr,
    LANES: gl.constexpr,
):
    """Load the two blocks of a step, whose `StepEntries` are `at`. Returns the `StepEntries` of the
    next step, which begins at place `place_ahead` of a `WorkItem`."""
    HALF: gl.constexpr = DIMS.latent // 2
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    RL: gl.constexpr = gl.SliceLayout(1, BL)
    left, right, rope = smem.k
    k_ready, k_empty = bars.k_ready, bars.k_empty
    b = it % ST * 2
    phase = ((it // ST) & 1) ^ 1
    found = find(k_descs, source, at.block0, rows, RL)
    block0 = look_up(k_descs, source, item, place_ahead, RL)
    rope0 = rope.index(b) if DIMS.rope > 0 else None
    rope1 = rope.index(b + 1) if DIMS.rope > 0 else None
    mbarrier.wait(k_empty.index(2 * b), phase)
    if source.sequences is None:
        validity = validity_of(smem.validity, b)
        put_validity(validity, found.is_there, bars.valid_ready.index(b), LANES)
    load_tiles(k_descs, left.index(b), None, found, k_ready.index(2 * b), 0, BL)
    mbarrier.wait(k_empty.index(2 * b + 1), phase)
    load_tiles(k_descs, right.index(b), rope0, found, k_ready.index(2 * b + 1), HALF, BL)
    found = find(k_descs, source, at.block1, rows, RL)
    block1 = look_up(k_descs, source, item, place_ahead + KEYS, RL)
    b += 1
    mbarrier.wait(k_empty.index(2 * b), phase)
    if source.sequences is None:
        validity = validity_of(smem.validity, b)
        put_validity(validity, found.is_there, bars.valid_ready.index(b), LANES)
    load_tiles(k_descs, left.index(b), rope1, found, k_ready.index(2 * b), 0, BL)
    mbarrier.wait(k_empty.index(2 * b + 1), phase)
    load_tiles(k_descs, right.index(b), None, found, k_ready.index(2 * b + 1), HALF, BL)
    return StepEntries(block0=block0, block1=block1)


@gluon.jit
def producer(
    info,
    source,
    rows,
    counts,
    q_descs,
    k_descs,
    smem,
    bars,
    ST: gl.constexpr,
    DIMS: gl.constexpr,
    LANES: gl.constexpr,
    CHUNK: gl.constexpr,
):
    """Load every work item of this program: the `CacheRows` that a `Source` names. LANES: threads
    that copy neighboring 16 bytes of a row. CHUNK: see source.find_work.
    """
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    RL: gl.constexpr = gl.SliceLayout(1, BL)
    turn = gl.program_id(0) * 0
    it = turn  # steps so far, over all work items
    found, item, steps = first_work_item(turn, info, source, counts, bars, CHUNK)
    at = StepEntries(
        block0=look_up(k_descs, source, item, item.skipped, RL),
        block1=look_up(k_descs, source, item, item.skipped + KEYS, RL),
    )
    while steps > 0:
        mbarrier.wait(bars.q_empty, (turn & 1) ^ 1)
        load_queries(q_descs, smem.q, bars.q_ready, item.box, DIMS)
        next_steps = steps * 0
        for j in range(0, steps):
            turn, found, item, next_steps, place = step_ahead(
                turn, it, found, item, next_steps, j, steps, info, source, counts, bars, CHUNK
            )
            at = gather(
                at,
                item,
                place,
                source,
                rows,
                k_descs,
                smem,
                bars,
                it,
                ST,
                DIMS,
                LANES,
            )
            it += 1
        steps = next_steps
