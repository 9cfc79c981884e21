"""The producer of the latent FP8 kernel: publishes work items, loads Q and gathers rows.

Rows are copied 16 bytes at a time (cp.async) into swizzled tiles, and their scales 4 bytes at a
time; where there is no key the copy fills in zeros. The copies see pairs of bytes as bf16, whose
values do not matter. The 128 rows of a step are copied in parts of 32, each as soon as the rows
before it in the slot are read. The scores wait for a step as a whole, and most of its rows are
there before the last copies are issued.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from openmla.kernels.gluon.compat import cp_async, reinterpret
from openmla.kernels.gluon.scores import MINUS_INF
from openmla.kernels.hopper.latent.rows import (
    arrive_copied,
    copy,
    first_work_item,
    load_box,
    start_of,
    step_ahead,
)
from openmla.kernels.hopper.latent.source import KEYS, entries, locate
from openmla.kernels.hopper.latent_fp8.signals import wait_read

WARPS = gl.constexpr(4)
LANES = gl.constexpr(8)
PART = gl.constexpr(32)  # rows that are copied together
PARTS = gl.constexpr(4)  # of a step
# For each part of a step, every thread arrives when its copies are done, and one thread when
# validity is written.
ARRIVALS = gl.constexpr(PARTS.value * (32 * WARPS.value + 1))


@gluon.jit
def load_queries(descs, tiles, barrier, start, ROPE: gl.constexpr):
    """Load Q of a tile into `RowTiles`. descs: its `RowDescriptors`; start: its `BoxStart`."""
    LATENT: gl.constexpr = tiles.latent.shape[2]
    BYTES: gl.constexpr = LATENT + (tiles.rope.shape[2] if ROPE else 0)
    mbarrier.expect(barrier, 64 * BYTES)
    load_box(descs.latent, start, 0, barrier, tiles.latent.index(0))
    if ROPE:
        load_box(descs.rope, start, LATENT, barrier, tiles.rope.index(0))


@gluon.jit
def as_pairs(tile):
    """A tile of bytes as pairs of bytes."""
    WIDTH: gl.constexpr = tile.shape[1] // 2
    ROWS: gl.constexpr = tile.shape[0]
    SPAN: gl.constexpr = min(2 * WIDTH, 128)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=SPAN, element_bitwidth=16, rank=2
    )
    return reinterpret(tile, gl.bfloat16, [ROWS, WIDTH], LAYOUT)


@gluon.jit
def halves(entry):
    """The entries of both parts of a block."""
    LAYOUT: gl.constexpr = entry.type.layout
    low, high = gl.split(gl.permute(gl.reshape(entry, [2, PART]), (1, 0)))
    low = gl.convert_layout(low, LAYOUT, assert_trivial=True)
    return low, gl.convert_layout(high, LAYOUT, assert_trivial=True)


@gluon.jit
def any_of_warps(ok):
    """For each warp's rows of a part, whether any is not there. Row r belongs to warp
    r // GROUP % 4: no warp has to ask another."""
    GROUP: gl.constexpr = 32 // LANES
    missing = gl.reshape(gl.where(ok, 0, 1), [PART // (WARPS * GROUP), WARPS, GROUP])
    return gl.max(gl.max(missing, 0), 1)


@gluon.jit
def copy_scales(tile, rows, page, place, ok):
    """Start copying the scales of some rows of `CacheRows`."""
    start = place.to(gl.int64) * rows.scale_row_stride
    if rows.page_stride is not None:
        start += page.to(gl.int64) * rows.scale_page_stride
    cp_async(tile, rows.scale_ptr + start, mask=ok)


@gluon.jit
def gather(
    entry,
    source,
    rows,
    smem,
    k_ready,
    slot,
    used,
    NUMBER: gl.constexpr,
    ROPE: gl.constexpr,
):
    """Copy part NUMBER of a step's rows, with their scales, and write their validity. Parts 0 and 1
    are read together, and waited for as one."""
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    LATENT: gl.constexpr = smem.k.latent.shape[2] // 2
    FIRST: gl.constexpr = NUMBER * PART
    page, place, ok = locate(source, entry, rows)
    start = start_of(rows, page, place)
    missing = any_of_warps(ok)
    if NUMBER != 1:
        wait_read(slot, used, max(NUMBER - 1, 0))
    copy(as_pairs(smem.k.latent.index(slot)).slice(FIRST, PART), start, ok, 0, BL)
    if ROPE:
        copy(as_pairs(smem.k.rope.index(slot)).slice(FIRST, PART), start, ok, LATENT, BL)
    if rows.scale_ptr is not None:
        copy_scales(smem.scales.index(slot).slice(FIRST, PART), rows, page, place, ok)
    arrive_copied(k_ready.index(slot))
    bias = smem.validity.bias.index(slot).slice(FIRST, PART)
    bias.store(gl.where(ok, 0.0, MINUS_INF))
    smem.validity.flags.index(slot).slice(NUMBER * WARPS, WARPS).store(missing)
    mbarrier.arrive(k_ready.index(slot), count=1)


@gluon.jit
def producer(
    info,
    source,
    rows,
    counts,
    q_descs,
    smem,
    bars,
    ST: gl.constexpr,
    ROPE: gl.constexpr,
    CHUNK: gl.constexpr,
):
    """Load every work item of this program: the `CacheRows` that a `Source` names. CHUNK: see
    source.find_work."""
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    RL: gl.constexpr = gl.SliceLayout(1, BL)
    k_ready = bars.k_ready
    turn = gl.program_id(0) * 0
    it = turn  # steps so far, over all work items
    found, item, steps = first_work_item(turn, info, source, counts, bars, CHUNK)
    entry0 = entries(source, item.first_entry, item.stop, item.skipped, RL)
    entry1 = entries(source, item.first_entry, item.stop, item.skipped + KEYS, RL)
    while steps > 0:
        mbarrier.wait(bars.q_empty, (turn & 1) ^ 1)
        load_queries(q_descs, smem.q, bars.q_ready, item.box, ROPE)
        next_steps = steps * 0
        for j in range(0, steps):
            turn, found, item, next_steps, place = step_ahead(
                turn, it, found, item, next_steps, j, steps, info, source, counts, bars, CHUNK
            )
            slot, used = it % ST, it >= ST
            low, high = halves(entry0)
            entry0 = entries(source, item.first_entry, item.stop, place, RL)
            gather(low, source, rows, smem, k_ready, slot, used, 0, ROPE)
            gather(high, source, rows, smem, k_ready, slot, used, 1, ROPE)
            low, high = halves(entry1)
            entry1 = entries(source, item.first_entry, item.stop, place + KEYS, RL)
            gather(low, source, rows, smem, k_ready, slot, used, 2, ROPE)
            gather(high, source, rows, smem, k_ready, slot, used, 3, ROPE)
            it += 1
        steps = next_steps
