"""The dequantizing warps: rope that is stored in FP8 becomes 16-bit where the products read it.

Raw rows of 64 bytes arrive in the lower half of the buffer that will hold 64 16-bit values a row:

| bytes (128 rows) | 0-4095 | 4096-8191 | 8192-12287 | 12288-16383 |
|---|---|---|---|---|
| raw | | | rows 0-63 | rows 64-127 |
| wide | rows 0-31 | rows 32-63 | rows 64-95 | rows 96-127 |

So the first half of the rows can be dequantized into free memory, and the second half once all of
it is in registers. Q's rope is dequantized once, without scales; K's rope, from a cache, block
after block, times the scale of its row. A value is bf16(fp32(e4m3) * scale), rounded once.

RAW is a RawRope, SCALES are RopeScales (both in dense/records.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared, mbarrier

from openmla.kernels.blackwell.dense.records import RopeScales, TableLine
from openmla.kernels.gluon.compat import reinterpret, thread_barrier
from openmla.kernels.gluon.requests import cut

Q_ROWS = gl.constexpr(128)
NO_SCALES = gl.constexpr(RopeScales(number=0, second_column=0, columns=0))


@gluon.jit
def raw_of(wide, RAW: gl.constexpr):
    """Where raw rows lie in a buffer of [rows, 64] 16-bit values."""
    ROWS: gl.constexpr = wide.shape[0]
    SHAPE: gl.constexpr = (2, ROWS, wide.shape[1])
    LAYOUT: gl.constexpr = RAW.layout
    return reinterpret(wide, gl.float8e4nv, SHAPE, LAYOUT).index(1)


@gluon.jit
def row_scales(scales, line, row, keys, first: gl.constexpr, PAGE: gl.constexpr):
    """Scale number `first` of rows of a request; 0 for rows that do not exist.

    CacheScales `scales` has all scales of the cache, TableLine `line` the pages of the request.
    """
    exists = (row >= 0) & (row < keys)
    entry = gl.minimum(gl.where(exists, row, 0) // PAGE, line.entries - 1)
    page = cut(gl.load(line.base + entry, mask=exists, other=0), scales.last_page)
    page_start = page.to(gl.int64) * scales.page_stride
    here = page_start + (row % PAGE).to(gl.int64) * scales.row_stride + first
    return gl.load(scales.base + here, mask=exists, other=0.0)


@gluon.jit
def dequantize_rows(
    wide, scales, line, key, keys, PAGE: gl.constexpr, RAW: gl.constexpr, SCALES: gl.constexpr
):
    """Raw rows to 16 bits, in place. With scales, they are rows key … of a request of `keys` keys;
    `scales` and `line` as in `row_scales`."""
    BL: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [2, 1], [1, 0])
    HALF: gl.constexpr = wide.shape[0] // 2
    NUMBER: gl.constexpr = SCALES.number
    raw = raw_of(wide, RAW)
    for half in gl.static_range(2):
        value = raw.slice(half * HALF, HALF).load(BL).to(gl.float32)
        if NUMBER > 0:
            row = key + half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, BL))
            column = gl.arange(0, wide.shape[1], gl.SliceLayout(0, BL))
            scale = row_scales(scales, line, row, keys, 0, PAGE)[:, None]
            for i in gl.static_range(1, NUMBER):
                mine = (column >= SCALES.second_column + (i - 1) * SCALES.columns)[None, :]
                other = row_scales(scales, line, row, keys, i, PAGE)
                scale = gl.where(mine, other[:, None], scale)
            value = value * scale
        thread_barrier()  # the second half lies under itself: all is read before any is written
        wide.slice(half * HALF, HALF).store(value.to(wide.dtype))
    fence_async_shared()


@gluon.jit
def dequantize(
    smem,
    bars,
    table,
    work,
    scales,
    RING: gl.constexpr,
    ROPE: gl.constexpr,
    RAW: gl.constexpr,
    SCALES: gl.constexpr,
):
    """The dequantizing partition: Tiles `smem`, Barriers `bars`, BlockTable `table`, WorkItem
    `work`, CacheScales `scales` of K's rope."""
    q_rope, k_rope = smem.q.rope, smem.k.rope
    BN: gl.constexpr = k_rope.shape[1]
    NQ: gl.constexpr = q_rope.shape[0]
    if RAW.q:
        for half in gl.static_range(NQ):
            if (work.blocks > 0) & ((half == 0) | (work.rows > Q_ROWS)):
                mbarrier.wait(bars.q_raw.index(half), 0)
                dequantize_rows(q_rope.index(half), None, None, 0, 0, 0, RAW, NO_SCALES)
                mbarrier.arrive(bars.q_wide.index(half), count=1)
    if RAW.k:
        line = None  # only pages have scales
        if ROPE.source == "cache":
            line = TableLine(table.base + work.request.to(gl.int64) * table.entries, table.entries)
        for j in range(0, work.blocks):
            place = j % RING.rope_buffers
            phase = (j // RING.rope_buffers) & 1
            key = (work.blocks - 1 - j) * BN
            mbarrier.wait(bars.k_raw.index(place), phase)
            tile = k_rope.index(place)
            dequantize_rows(tile, scales, line, key, work.keys, ROPE.page_size, RAW, SCALES)
            mbarrier.arrive(bars.k_wide.index(place), count=1)
