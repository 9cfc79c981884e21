"""The producer of the latent kernel over an FP8 cache: rows are dequantized to bf16 on their way.

Takes the place of sparse_rows.producer: the same tiles, barriers and orders. Rows pass through
registers, 64 columns (a chunk) of 64 keys at a time, two chunks loaded ahead of the one that is
being dequantized, also across blocks, steps and work items. A chunk takes 8 registers a thread, its
scales 4; chunks of one block of scales share them.

| block | tiles that a barrier covers, in chunks (512 + 64) |
|---|---|
| 0 | left 0 1 2 3; right 4 5 6 7, rope 8 |
| 1 | left 0 1 2 3, rope 8; right 4 5 6 7 |

Rope that is stored as bf16 is copied as in sparse_rows, from its barrier's first chunk to
the last; rope of 32 columns follows the last.

Ordinary stores wrote the tiles that wgmma will read: one arrival for all 128 threads ends each of
them, and whoever waits for it fences them (`wait_tile` of kernel.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from openmla.kernels.gluon.dequantize.rows import (
    CHUNK,
    dequantized,
    key_layout,
    load_raw,
    load_scales,
    rope_start,
)
from openmla.kernels.hopper.latent.rows import copy, load_queries, put_validity
from openmla.kernels.hopper.latent.source import KEYS, STEP, begin, entries, locate, work_item
from openmla.kernels.hopper.latent.work_items import announce

THREADS = gl.constexpr(128)


@gluon.constexpr_function
def chunk_order(dims, block, with_rope):
    """Chunks of a block as (tile, column in the tile, column of the row, barrier): see above.

    Tile 0 is left, 1 right, 2 rope; barrier 0 that of left, 1 that of right.
    """
    half = dims[0]
    order = [(tile, c, tile * half + c, tile) for tile in (0, 1) for c in range(0, half, 64)]
    if with_rope:
        rope = (2, 0, 2 * half, 1 - block)
        order.insert(len(order) if block == 0 else half // 64, rope)
    return tuple(order)


@gluon.constexpr_function
def rope_in_order(is_e4m3, dims):
    """Whether rope is one chunk more; else it is copied, or stored on its own."""
    return is_e4m3 and dims[1] == 64


@gluon.jit
def next_chunk(
    rows, keys, previous, BEFORE: gl.constexpr, FIRST: gl.constexpr, CACHE: gl.constexpr,
    LANES: gl.constexpr,
):  # fmt: skip
    """Start loading a chunk; `previous` holds the scales of column BEFORE of the same keys."""
    raw = load_raw(rows, keys, FIRST, CHUNK, CACHE, LANES)
    scales = previous
    if BEFORE < 0 or BEFORE // CACHE[1] != FIRST // CACHE[1]:
        scales = load_scales(rows, keys, FIRST, CHUNK, CACHE, LANES)
    return raw, scales


@gluon.jit
def open_tile(
    rows, keys, rope, free, phase, COPIED: gl.constexpr, CACHE: gl.constexpr, LANES: gl.constexpr
):
    """Wait until the tiles of a barrier may be overwritten; start copying rope that is bf16."""
    mbarrier.wait(free, phase)
    if COPIED:
        L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
        keys = gl.convert_layout(keys, gl.SliceLayout(1, L))
        copy(rope, rope_start(rows, keys, CACHE), keys >= 0, 0, L)
        async_copy.commit_group()


@gluon.jit
def close_tile(
    rows, keys, rope, ready, COPIED: gl.constexpr, ALONE: gl.constexpr, FIRST: gl.constexpr,
    CACHE: gl.constexpr, LANES: gl.constexpr,
):  # fmt: skip
    """Finish the rope columns, and hand the tiles of a barrier to wgmma."""
    if COPIED:
        async_copy.wait_group(0)
    if ALONE:
        WIDTH: gl.constexpr = rope.shape[1]
        raw = load_raw(rows, keys, FIRST, WIDTH, CACHE, LANES)
        rope.store(dequantized(raw, load_scales(rows, keys, FIRST, WIDTH, CACHE, LANES)))
    mbarrier.arrive(ready, count=THREADS)


@gluon.jit
def chunk_after(
    rows, keys, next_keys, scales, N: gl.constexpr, ORDER: gl.constexpr, AFTER: gl.constexpr,
    CACHE: gl.constexpr, LANES: gl.constexpr,
):  # fmt: skip
    """Start loading the chunk two after number N: of this block, or of the next."""
    COUNT: gl.constexpr = len(ORDER)
    if N + 2 < COUNT:
        return next_chunk(rows, keys, scales, ORDER[N + 1][2], ORDER[N + 2][2], CACHE, LANES)
    else:
        NEXT: gl.constexpr = N + 2 - COUNT
        BEFORE: gl.constexpr = AFTER[0][2] if NEXT > 0 else -1
        return next_chunk(rows, next_keys, scales, BEFORE, AFTER[NEXT][2], CACHE, LANES)


@gluon.jit
def fill_chunk(  # noqa: PLR0913
    rows, keys, next_keys, chunks, tiles, b, phase, bars, N: gl.constexpr, BLOCK: gl.constexpr,
    CACHE: gl.constexpr, DIMS: gl.constexpr, LANES: gl.constexpr,
):  # fmt: skip
    """Dequantize chunk number N of block BLOCK, and start loading the one two after it."""
    ready, free = bars
    raw, scales, raw_next, scales_next = chunks
    ROPE_IN: gl.constexpr = rope_in_order(rows[6] is None, DIMS)
    ORDER: gl.constexpr = chunk_order(DIMS, BLOCK, ROPE_IN)
    AFTER: gl.constexpr = chunk_order(DIMS, 1 - BLOCK, ROPE_IN)
    COUNT: gl.constexpr = len(ORDER)
    BARRIER: gl.constexpr = ORDER[N][3]
    ROPE_HERE: gl.constexpr = DIMS[1] > 0 and not ROPE_IN and BARRIER == 1 - BLOCK
    COPIED: gl.constexpr = ROPE_HERE and rows[6] is not None
    ALONE: gl.constexpr = ROPE_HERE and rows[6] is None
    place = 2 * b + 2 * BLOCK + BARRIER
    rope = tiles[2].index(b + BLOCK)
    if N == 0 or ORDER[N - 1][3] != BARRIER:
        open_tile(rows, keys, rope, free.index(place), phase, COPIED, CACHE, LANES)
    target = tiles[ORDER[N][0]].index(b + BLOCK)
    target.slice(ORDER[N][1], CHUNK, dim=1).store(dequantized(raw, scales))
    more, scales = chunk_after(rows, keys, next_keys, scales_next, N, ORDER, AFTER, CACHE, LANES)
    if N == COUNT - 1 or ORDER[N + 1][3] != BARRIER:
        ROPE_AT: gl.constexpr = 2 * DIMS[0]
        close_tile(rows, keys, rope, ready.index(place), COPIED, ALONE, ROPE_AT, CACHE, LANES)
    return raw_next, scales_next, more, scales


@gluon.jit
def fill(
    rows, keys, next_keys, chunks, tiles, b, phase, bars, BLOCK: gl.constexpr,
    CACHE: gl.constexpr, DIMS: gl.constexpr, LANES: gl.constexpr,
):  # fmt: skip
    """Dequantize block BLOCK of a step; returns the first two chunks of the block after it."""
    COUNT: gl.constexpr = len(chunk_order(DIMS, BLOCK, rope_in_order(rows[6] is None, DIMS)))
    for i in gl.static_range(COUNT):
        chunks = fill_chunk(
            rows, keys, next_keys, chunks, tiles, b, phase, bars, i, BLOCK, CACHE, DIMS, LANES
        )
    return chunks


@gluon.jit
def physical(source, entry, PAGE: gl.constexpr):
    """Physical rows of 64 keys, -1 where there is none."""
    page, place, ok = locate(source, entry, PAGE)
    if PAGE > 0:
        place += page * PAGE
    return gl.where(ok, place, -1)


@gluon.jit
def fp8_producer(
    info, source, rows, shape, q_descs, smem, bars, ST: gl.constexpr, DIMS: gl.constexpr,
    CACHE: gl.constexpr, LANES: gl.constexpr,
):  # fmt: skip
    """Every work item of this program."""
    q_smem, k_smem, validity = smem
    bias, flags = validity
    q_bars, ready, free, valid, t_bars = bars
    q_ready, q_free = q_bars
    tile_bars = (ready, free)
    PAGE: gl.constexpr = CACHE[0]
    KL: gl.constexpr = key_layout(CHUNK, CACHE[1], LANES)
    ORDER: gl.constexpr = chunk_order(DIMS, 0, rope_in_order(rows[6] is None, DIMS))
    turn = gl.program_id(0) * 0
    it = turn  # steps so far, over all work items
    cursor, tile, box, first, skipped, count, steps = work_item(begin(source), source, shape, False)
    announce(info, t_bars, turn, tile, steps, source)
    keys0 = physical(source, entries(source, first, count, skipped, KL), PAGE)
    entry = entries(source, first, count, skipped + KEYS, KL)
    scales = load_scales(rows, keys0, 0, CHUNK, CACHE, LANES)
    raw = load_raw(rows, keys0, 0, CHUNK, CACHE, LANES)
    raw_next, scales_next = next_chunk(rows, keys0, scales, 0, ORDER[1][2], CACHE, LANES)
    chunks = (raw, scales, raw_next, scales_next)
    while steps > 0:
        cursor, tile, next_box, next_first, next_skipped, next_count, next_steps = work_item(
            cursor, source, shape, True
        )
        announce(info, t_bars, turn + 1, tile, next_steps, source)
        mbarrier.wait(q_free, (turn & 1) ^ 1)
        load_queries(q_descs, q_smem, q_ready, box, DIMS)
        for j in range(0, steps):
            b = it % ST * 2
            phase = ((it // ST) & 1) ^ 1
            last = j == steps - 1
            ahead = gl.where(last, next_skipped, skipped + (j + 1) * STEP)
            ahead_first = gl.where(last, next_first, first)
            ahead_count = gl.where(last, next_count, count)
            keys1 = physical(source, entry, PAGE)
            entry = entries(source, ahead_first, ahead_count, ahead, KL)
            chunks = fill(
                rows, keys0, keys1, chunks, k_smem, b, phase, tile_bars, 0, CACHE, DIMS, LANES
            )
            put_validity(bias.index(b), flags.index(b), keys0 >= 0, valid.index(b), LANES)
            keys0 = physical(source, entry, PAGE)
            entry = entries(source, ahead_first, ahead_count, ahead + KEYS, KL)
            chunks = fill(
                rows, keys1, keys0, chunks, k_smem, b, phase, tile_bars, 1, CACHE, DIMS, LANES
            )
            b += 1
            put_validity(bias.index(b), flags.index(b), keys1 >= 0, valid.index(b), LANES)
            it += 1
        turn += 1
        box = next_box
        first = next_first
        skipped = next_skipped
        count = next_count
        steps = next_steps
