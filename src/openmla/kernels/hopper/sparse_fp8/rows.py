"""The producer of the latent FP8 kernel: tells the warp-groups their tiles, loads Q, gathers rows.

Rows are copied 16 bytes at a time (cp.async) into swizzled tiles, and their scales 4 bytes at a
time; where there is no key the copy fills in zeros. Bytes are copied as pairs, which nobody looks
at. The 128 rows of a step are copied in parts of 32, as soon as those before in their place are
read: a step is waited for as a whole, and most of its rows are there before the last are asked for.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from openmla.kernels.gluon.compat import cp_async, reinterpret
from openmla.kernels.gluon.scores import MINUS_INF
from openmla.kernels.hopper.latent.rows import arrive_copied, copy, load_box, start_of
from openmla.kernels.hopper.latent.source import KEYS, STEP, begin, entries, locate, work_item
from openmla.kernels.hopper.latent.work_items import announce
from openmla.kernels.hopper.sparse_fp8.signals import wait_read

WARPS = gl.constexpr(4)
LANES = gl.constexpr(8)
PART = gl.constexpr(32)  # rows that are copied together
PARTS = gl.constexpr(4)  # of a step
ARRIVALS = gl.constexpr(PARTS.value * (32 * WARPS.value + 1))  # when rows and validity are there


@gluon.jit
def load_queries(descs, smem, barrier, place, ROPE: gl.constexpr):
    """Q of a tile: latent and rope columns."""
    LATENT: gl.constexpr = smem[0].shape[2]
    BYTES: gl.constexpr = LATENT + (smem[1].shape[2] if ROPE else 0)
    mbarrier.expect(barrier, 64 * BYTES)
    load_box(descs[0], place, 0, barrier, smem[0].index(0))
    if ROPE:
        load_box(descs[1], place, LATENT, barrier, smem[1].index(0))


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
def copy_scales(tile, rows, page, place, ok, PAGE: gl.constexpr):
    """The scales of some rows."""
    _data, _page, _row, scale_ptr, scale_page, scale_row = rows
    start = place.to(gl.int64) * scale_row
    if PAGE > 0:
        start += page.to(gl.int64) * scale_page
    cp_async(tile, scale_ptr + start, mask=ok)


@gluon.jit
def gather(
    entry, source, rows, smem, ready, slot, used, NUMBER: gl.constexpr, PAGE: gl.constexpr,
    ROPE: gl.constexpr,
):  # fmt: skip
    """Copy part NUMBER of a step's rows, with their scales; the first two are read together."""
    _q, k_smem, validity, scales = smem
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    LATENT: gl.constexpr = k_smem[0].shape[2] // 2
    FIRST: gl.constexpr = NUMBER * PART
    page, place, ok = locate(source, entry, PAGE)
    start = start_of(rows[:3], page, place, PAGE)
    missing = any_of_warps(ok)
    if NUMBER != 1:
        wait_read(slot, used, max(NUMBER - 1, 0))
    copy(as_pairs(k_smem[0].index(slot)).slice(FIRST, PART), start, ok, 0, BL)
    if ROPE:
        copy(as_pairs(k_smem[1].index(slot)).slice(FIRST, PART), start, ok, LATENT, BL)
    if rows[3] is not None:
        copy_scales(scales.index(slot).slice(FIRST, PART), rows, page, place, ok, PAGE)
    arrive_copied(ready.index(slot))
    validity[0].index(slot).slice(FIRST, PART).store(gl.where(ok, 0.0, MINUS_INF))
    validity[1].index(slot).slice(NUMBER * WARPS, WARPS).store(missing)
    mbarrier.arrive(ready.index(slot), count=1)


@gluon.jit
def producer(
    info, source, rows, shape, q_descs, smem, bars, ST: gl.constexpr, PAGE: gl.constexpr,
    ROPE: gl.constexpr,
):  # fmt: skip
    """Every work item of this program.

    The next work item is looked for before the last step of one: the warp-groups are busy then.
    """
    q_bars, ready, t_bars = bars
    q_ready, q_free = q_bars
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    RL: gl.constexpr = gl.SliceLayout(1, BL)
    turn = gl.program_id(0) * 0
    it = turn  # steps so far, over all work items
    cursor, tile, box, first, skipped, count, steps = work_item(begin(source), source, shape, False)
    announce(info, t_bars, turn, tile, steps, source)
    entry0 = entries(source, first, count, skipped, RL)
    entry1 = entries(source, first, count, skipped + KEYS, RL)
    while steps > 0:
        mbarrier.wait(q_free, (turn & 1) ^ 1)
        load_queries(q_descs, smem[0], q_ready, box, ROPE)
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
            slot, used = it % ST, it >= ST
            low, high = halves(entry0)
            entry0 = entries(source, first, count, place, RL)
            gather(low, source, rows, smem, ready, slot, used, 0, PAGE, ROPE)
            gather(high, source, rows, smem, ready, slot, used, 1, PAGE, ROPE)
            low, high = halves(entry1)
            entry1 = entries(source, first, count, place + KEYS, RL)
            gather(low, source, rows, smem, ready, slot, used, 2, PAGE, ROPE)
            gather(high, source, rows, smem, ready, slot, used, 3, PAGE, ROPE)
            it += 1
        steps = left_over
