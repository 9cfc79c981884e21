"""The dequantizing warps: rope that is stored in FP8 becomes 16-bit where the products read it.

Raw rows of 64 bytes arrive in the lower half of the buffer that will hold 64 16-bit values a row:

| bytes (128 rows) | 0-4095 | 4096-8191 | 8192-12287 | 12288-16383 |
|---|---|---|---|---|
| raw | | | rows 0-63 | rows 64-127 |
| wide | rows 0-31 | rows 32-63 | rows 64-95 | rows 96-127 |

So the first half of the rows can be dequantized into free memory, and the second half once all of
it is in registers. Q's rope is dequantized once, as it is; K's rope, from a cache, block after
block, times the scale of its row. A value is bf16(fp32(e4m3) * scale), rounded once, as everywhere.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared, mbarrier

from openmla.kernels.gluon.compat import reinterpret, thread_barrier
from openmla.kernels.gluon.offsets import cut

Q_ROWS = gl.constexpr(128)
NO_SCALES = gl.constexpr((0, 0, 0))


@gluon.jit
def raw_of(wide, RAW: gl.constexpr):
    """Where raw rows lie in a buffer of [rows, 64] 16-bit values."""
    ROWS: gl.constexpr = wide.shape[0]
    SHAPE: gl.constexpr = (2, ROWS, wide.shape[1])
    LAYOUT: gl.constexpr = RAW[2]
    return reinterpret(wide, gl.float8e4nv, SHAPE, LAYOUT).index(1)


@gluon.jit
def row_scales(source, row, keys, first: gl.constexpr, PAGE: gl.constexpr):
    """Scale number `first` of cache rows; 0 for rows that do not exist."""
    scales_ptr, page_stride, row_stride, last_page, line, entries = source
    exists = (row >= 0) & (row < keys)
    entry = gl.minimum(gl.where(exists, row, 0) // PAGE, entries - 1)
    page = cut(gl.load(line + entry, mask=exists, other=0), last_page)
    here = page.to(gl.int64) * page_stride + (row % PAGE).to(gl.int64) * row_stride + first
    return gl.load(scales_ptr + here, mask=exists, other=0.0)


@gluon.jit
def dequantize_rows(
    wide, source, key, keys, PAGE: gl.constexpr, RAW: gl.constexpr, SCALES: gl.constexpr
):
    """Raw rows to 16 bits, in place.

    SCALES: how many scales a row has (0: none), the first column of the second, columns per scale.
    """
    BL: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [2, 1], [1, 0])
    HALF: gl.constexpr = wide.shape[0] // 2
    NUMBER: gl.constexpr = SCALES[0]
    raw = raw_of(wide, RAW)
    for half in gl.static_range(2):
        value = raw.slice(half * HALF, HALF).load(BL).to(gl.float32)
        if NUMBER > 0:
            row = key + half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, BL))
            column = gl.arange(0, wide.shape[1], gl.SliceLayout(0, BL))
            scale = row_scales(source, row, keys, 0, PAGE)[:, None]
            for i in gl.static_range(1, NUMBER):
                mine = (column >= SCALES[1] + (i - 1) * SCALES[2])[None, :]
                scale = gl.where(mine, row_scales(source, row, keys, i, PAGE)[:, None], scale)
            value = value * scale
        thread_barrier()  # the second half lies under itself: all is read before any is written
        wide.slice(half * HALF, HALF).store(value.to(wide.dtype))
    fence_async_shared()


@gluon.jit
def dequantize(
    given, RING: gl.constexpr, ROPE: gl.constexpr, RAW: gl.constexpr, SCALES: gl.constexpr
):
    """RAW: whether Q's rope is raw; whether K's is; layout of raw rows. SCALES: of K's rope."""
    smem, bars, table, work, source = given
    q_rope, k_rope = smem
    q_raw, q_wide, k_raw, k_wide = bars
    table_ptr, table_stride = table
    scales_ptr, page_stride, row_stride, last_page = source
    rows, keys, blocks, request = work[2], work[4], work[6], work[8]
    BN: gl.constexpr = k_rope.shape[1]
    NQ: gl.constexpr = q_rope.shape[0]
    if RAW[0]:
        for half in gl.static_range(NQ):
            if (blocks > 0) & ((half == 0) | (rows > Q_ROWS)):
                mbarrier.wait(q_raw.index(half), 0)
                dequantize_rows(q_rope.index(half), source, 0, 0, 0, RAW, NO_SCALES)
                mbarrier.arrive(q_wide.index(half), count=1)
    if RAW[1]:
        line = request  # of the block table; without pages there is none
        if ROPE[0] == "cache":
            line = table_ptr + request.to(gl.int64) * table_stride
        row_source = (scales_ptr, page_stride, row_stride, last_page, line, table_stride)
        for j in range(0, blocks):
            place = j % RING[2]
            phase = (j // RING[2]) & 1
            key = (blocks - 1 - j) * BN
            mbarrier.wait(k_raw.index(place), phase)
            dequantize_rows(k_rope.index(place), row_source, key, keys, ROPE[1], RAW, SCALES)
            mbarrier.arrive(k_wide.index(place), count=1)
