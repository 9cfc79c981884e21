"""The producer of the latent FP8 kernel: tells the warp-groups their tiles, loads Q, gathers rows.

Rows are copied 16 bytes at a time (cp.async) into swizzled tiles, and their scales 4 bytes at a
time; where there is no key the copy fills in zeros. Bytes are copied as pairs, which nobody looks
at. A block of 64 keys is one barrier: with two steps of keys in flight nothing waits for a part.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from openmla.kernels.gluon.compat import cp_async, reinterpret
from openmla.kernels.hopper.latent.rows import (
    arrive_copied,
    copy,
    load_box,
    put_validity,
    start_of,
)
from openmla.kernels.hopper.latent.source import KEYS, STEP, begin, entries, locate, work_item
from openmla.kernels.hopper.latent.work_items import announce

WARPS = gl.constexpr(4)
LANES = gl.constexpr(8)


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
    SPAN: gl.constexpr = min(2 * WIDTH, 128)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=SPAN, element_bitwidth=16, rank=2
    )
    return reinterpret(tile, gl.bfloat16, [64, WIDTH], LAYOUT)


@gluon.jit
def copy_scales(tile, rows, page, place, ok, PAGE: gl.constexpr):
    """The scales of 64 rows."""
    _data, _page, _row, scale_ptr, scale_page, scale_row = rows
    start = place.to(gl.int64) * scale_row
    if PAGE > 0:
        start += page.to(gl.int64) * scale_page
    cp_async(tile, scale_ptr + start, mask=ok)


@gluon.jit
def gather_block(
    entry, source, rows, smem, bars, b, phase, PAGE: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """Copy 64 rows with their scales."""
    _q, k_smem, validity, scales = smem
    ready, free, valid = bars
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    LATENT: gl.constexpr = k_smem[0].shape[2] // 2
    page, place, ok = locate(source, entry, PAGE)
    start = start_of(rows[:3], page, place, PAGE)
    mbarrier.wait(free.index(b), phase)
    copy(as_pairs(k_smem[0].index(b)), start, ok, 0, BL)
    if ROPE:
        copy(as_pairs(k_smem[1].index(b)), start, ok, LATENT, BL)
    if rows[3] is not None:
        copy_scales(scales.index(b), rows, page, place, ok, PAGE)
    arrive_copied(ready.index(b))
    put_validity(validity[0].index(b), validity[1].index(b), ok, valid.index(b), LANES)


@gluon.jit
def producer(
    info, source, rows, shape, q_descs, smem, bars, ST: gl.constexpr, PAGE: gl.constexpr,
    ROPE: gl.constexpr,
):  # fmt: skip
    """Every work item of this program.

    The next work item is looked for before the last step of one: the warp-groups are busy then.
    """
    q_bars, ready, free, valid, t_bars = bars
    q_ready, q_free = q_bars
    step_bars = (ready, free, valid)
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
            b = it % ST * 2
            phase = ((it // ST) & 1) ^ 1
            here = entry0
            entry0 = entries(source, first, count, place, RL)
            gather_block(here, source, rows, smem, step_bars, b, phase, PAGE, ROPE)
            here = entry1
            entry1 = entries(source, first, count, place + KEYS, RL)
            gather_block(here, source, rows, smem, step_bars, b + 1, phase, PAGE, ROPE)
            it += 1
        steps = left_over
