"""Producers of the sparse kernel over an fp8 cache: rows are gathered raw, then dequantized.

The value of an element is bf16(fp32(e4m3) * scale), rounded once.

| buffer | tiles of K, halves of V | raw tiles |
|---|---|---|
| K | 9 of [64, 64], 8192 bytes each | 9 of 4096 bytes, in a buffer of their own |
| K, rows of 656 bytes | 9, the last one bf16 | 8 of them |
| K, rows of 584 bytes | 8, the last one bf16 | 7 of them |
| V | 2 of [32, 512], 32768 bytes each | 16 of [32, 64], tile i at 32768 + 2048 * i of V's |
| V, rows of 584 bytes | the last 64 columns bf16 | 14 of them |

Raw rows of K are gathered a step ahead: as soon as all warps have read the raw rows of the step
before, so that they arrive under its products. There is no room for raw rows of V beside V's tiles:
they lie in the upper half. Dequantizing the first half of the keys overwrites nothing; raw rows of
the second half are all read before any is overwritten.

Rows of 656 bytes hold their rope part as bf16, which is gathered straight to its tile, and their
scales, one per 128 columns. Rows of 584 bytes are DeepSeek-V4's: their last 64 columns are bf16 and
V's as much as K's, and the exponent of each 64 columns is a byte behind the rows of the page. V's
bf16 columns lie where no raw rows do: raw tiles of 7 x 64 columns end 4096 bytes before V does.

Steps of a second source follow those of the first: they read other descriptors and other scales.

Arguments of all functions: Tiles `smem`, Barriers `bars`, the token's KeyList `keys`, Sources
`sources`, ScaleSource `scales`, records.How `HOW`, Fp8Cache `CACHE`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    fence_async_shared,
    mbarrier,
    tma,
)

from openmla.kernels.blackwell.sparse.load import GATHERED, offsets_layout
from openmla.kernels.blackwell.sparse.records import ScaleBlocks
from openmla.kernels.blackwell.sparse.rows import (
    listed,
    second_listed,
    step_rows,
    wait_for_step,
)
from openmla.kernels.gluon.compat import reinterpret, thread_barrier

SMALLEST = gl.constexpr(0x00400000)  # 2^-127
QUIET_NAN = gl.constexpr(0x7FC00000)


@gluon.constexpr_function
def scale_blocks(cache):
    """The scales of a key's K columns and of its V columns; one where there are none."""
    block = cache.scale_columns
    if block == 0:
        return ScaleBlocks(k=1, v=1)
    return ScaleBlocks(k=-(-cache.raw_tiles * 64 // block), v=-(-cache.v_tiles * 64 // block))


@gluon.jit
def power_of_two(exponent):
    """The fp32 scale of a ue8m0 byte: 127 is 1.0, 0 is 2^-127, 255 is NaN."""
    exponent = exponent.to(gl.int32)
    bits = gl.where(exponent == 0, SMALLEST, exponent << 23)
    return gl.where(exponent == 255, QUIET_NAN, bits).to(gl.float32, bitcast=True)


@gluon.jit
def load_scales_to_smem(sources, keys, k, tile, HOW: gl.constexpr, CACHE: gl.constexpr):
    """fp32 scales of the keys of step k, a row of `tile` per block of columns."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    B_TOPK: gl.constexpr = HOW.b_topk
    INDEXING: gl.constexpr = HOW.indexing
    SECOND: gl.constexpr = CACHE.second
    if keys.second is None:
        index, ok = listed(keys, k * B_TOPK, B_TOPK, L, INDEXING)
        store_scales(sources.scales, index, ok, tile, CACHE)
    else:
        if k < keys.second.after:
            index, ok = listed(keys, k * B_TOPK, B_TOPK, L, INDEXING)
            store_scales(sources.scales, index, ok, tile, CACHE)
        else:
            index, ok = second_listed(keys.second, k, 0, B_TOPK, L, HOW)
            store_scales(sources.second.scales, index, ok, tile, SECOND)


@gluon.jit
def store_scales(scales, index, ok, tile, CACHE: gl.constexpr):
    """Scales of rows; finite for one that does not count, whose columns are zeros."""
    BLOCKS: gl.constexpr = tile.shape[0]
    PAGE: gl.constexpr = CACHE.scale_page_size
    at = index.to(gl.int64) * scales.row_stride
    if PAGE > 0:
        page = (index // PAGE).to(gl.int64) * scales.page_stride
        at = page + (index % PAGE).to(gl.int64) * scales.row_stride
    for block in gl.static_range(BLOCKS):
        if CACHE.has_exponents:
            scale = power_of_two(gl.load(scales.base + at + block, mask=ok, other=0))
        else:
            scale = gl.load(scales.base + at + block, mask=ok, other=0.0)
        tile.index(block).store(scale)


@gluon.jit
def load_k_scales_to_smem(sources, keys, k, k_scales, HOW: gl.constexpr, CACHE: gl.constexpr):
    """Scales of the keys of step k, all columns."""
    load_scales_to_smem(sources, keys, k, k_scales, HOW, CACHE)


@gluon.jit
def load_v_scales_to_smem(sources, keys, k, v_scales, HOW: gl.constexpr, CACHE: gl.constexpr):
    """Scales of the keys of step k, columns of V."""
    load_scales_to_smem(sources, keys, k, v_scales, HOW, CACHE)


@gluon.jit
def dequantize(
    raw, scales, first_key, COLUMN: gl.constexpr, BLOCK: gl.constexpr, DTYPE: gl.constexpr
):
    """64 columns from COLUMN on; their keys have the scales from `first_key` on."""
    L: gl.constexpr = raw.type.layout
    KEYS: gl.constexpr = raw.shape[0]
    BY_KEY: gl.constexpr = gl.SliceLayout(1, L)
    value = raw.to(gl.float32)
    if BLOCK > 0:
        line = scales.index(COLUMN // BLOCK).slice(first_key, KEYS)
        factor = line.load(BY_KEY)[:, None]
        if BLOCK < GATHERED:
            line = scales.index(COLUMN // BLOCK + 1).slice(first_key, KEYS)
            column = gl.arange(0, GATHERED, gl.SliceLayout(0, L))[None, :]
            factor = gl.where(column < BLOCK, factor, line.load(BY_KEY)[:, None])
        value = value * factor
    return value.to(DTYPE)


@gluon.constexpr_function
def raw_layout(warps):
    """16 bytes of a raw row to a thread."""
    return gl.BlockedLayout([1, 16], [8, 4], [warps, 1], [1, 0])


@gluon.jit
def convert_k_fp8_to_bf16(smem, FIRST: gl.constexpr, LAST: gl.constexpr, CACHE: gl.constexpr):
    """Dequantize tiles FIRST … LAST - 1 of K."""
    L: gl.constexpr = raw_layout(gl.num_warps())
    BLOCK: gl.constexpr = CACHE.scale_columns
    for g in gl.static_range(FIRST, LAST):
        raw = smem.k_raw.index(g).load(L)
        wide = dequantize(raw, smem.k_scales, 0, g * GATHERED, BLOCK, smem.k.dtype)
        smem.k.index(g).store(wide)


@gluon.jit
def convert_v_fp8_to_bf16(raw, v_smem, v_scales, HALF: gl.constexpr, CACHE: gl.constexpr):
    """Dequantize half the keys of V: read all raw tiles, then write."""
    L: gl.constexpr = raw_layout(gl.num_warps())
    BLOCK: gl.constexpr = CACHE.scale_columns
    KEYS: gl.constexpr = v_smem.shape[1]
    ATOMS: gl.constexpr = v_smem.shape[0] // 2
    PER_ATOM: gl.constexpr = v_smem.shape[2] // GATHERED
    RAW: gl.constexpr = CACHE.v_tiles
    tiles = ()
    for g in gl.static_range(RAW):
        at = 2 * ATOMS * PER_ATOM + HALF * RAW + g
        tiles = tiles + (raw.index(at).load(L),)  # noqa: RUF005
    thread_barrier()
    for g in gl.static_range(RAW):
        wide = dequantize(tiles[g], v_scales, HALF * KEYS, g * GATHERED, BLOCK, v_smem.dtype)
        atom = v_smem.index(ATOMS * HALF + g // PER_ATOM)
        atom.slice(g % PER_ATOM * GATHERED, GATHERED, dim=1).store(wide)


@gluon.jit
def gather_tiles(raw_desc, rows, ready, raw, FIRST: gl.constexpr, NUMBER: gl.constexpr):
    """Start gathering the first NUMBER x 64 columns of rows to raw tiles FIRST … ."""
    for g in gl.static_range(NUMBER):
        tma.async_gather(raw_desc, rows, g * GATHERED, ready, raw.index(FIRST + g))


@gluon.jit
def gather_plain(sources, keys, rows, ready, tile, k, CACHE: gl.constexpr):
    """Start gathering the 16-bit columns of rows of step k, which need no dequantizing."""
    if keys.second is None:
        tma.async_gather(sources.plain, rows, CACHE.plain_column, ready, tile)
    else:
        if k < keys.second.after:
            tma.async_gather(sources.plain, rows, CACHE.plain_column, ready, tile)
        else:
            tma.async_gather(sources.second.plain, rows, CACHE.plain_column, ready, tile)


@gluon.jit
def load_k_fp8_tma(sources, keys, raw, done, k, HOW: gl.constexpr):
    """Start gathering the raw tiles of step k."""
    OFFSETS: gl.constexpr = offsets_layout(gl.num_warps())
    TILES: gl.constexpr = raw.shape[0]
    B_TOPK: gl.constexpr = HOW.b_topk
    ready = done.index(k % HOW.num_mbars)
    rows = step_rows(keys, k, 0, B_TOPK, OFFSETS, HOW)
    mbarrier.expect(ready, B_TOPK * GATHERED * TILES)
    if keys.second is None:
        gather_tiles(sources.k, rows, ready, raw, 0, TILES)
    else:
        if k < keys.second.after:
            gather_tiles(sources.k, rows, ready, raw, 0, TILES)
        else:
            gather_tiles(sources.second.raw, rows, ready, raw, 0, TILES)


@gluon.jit
def load_k_plain_tma(sources, keys, tile, done, k, HOW: gl.constexpr, CACHE: gl.constexpr):
    """Start gathering the 16-bit columns of step k."""
    OFFSETS: gl.constexpr = offsets_layout(gl.num_warps())
    B_TOPK: gl.constexpr = HOW.b_topk
    ready = done.index(k % HOW.num_mbars)
    mbarrier.expect(ready, B_TOPK * GATHERED * 2)
    rows = step_rows(keys, k, 0, B_TOPK, OFFSETS, HOW)
    gather_plain(sources, keys, rows, ready, tile, k, CACHE)


@gluon.jit
def load_k_fp8(
    sources,
    keys,
    smem,
    bars,
    steps,
    EARLY: gl.constexpr,
    HOW: gl.constexpr,
    CACHE: gl.constexpr,
):
    """K of every step; raw rows come a step ahead."""
    NB: gl.constexpr = HOW.num_mbars
    RAW: gl.constexpr = CACHE.raw_tiles
    PLAIN: gl.constexpr = smem.k.shape[0] - RAW
    load_k_fp8_tma(sources, keys, smem.k_raw, bars.k_fp8_tma_done, steps * 0, HOW)
    mbarrier.wait(bars.q_copied.index(0), 0)
    for k in range(0, steps):
        if CACHE.scale_columns > 0:
            load_k_scales_to_smem(sources, keys, k, smem.k_scales, HOW, CACHE)
        wait_for_step(bars.qk_ss_done, k - 1, NB)
        wait_for_step(bars.qk_ts_done, k - 1, NB)
        if PLAIN > 0:
            tile = smem.k.index(RAW)
            load_k_plain_tma(sources, keys, tile, bars.k_plain_done, k, HOW, CACHE)
        wait_for_step(bars.k_fp8_tma_done, k, NB)
        convert_k_fp8_to_bf16(smem, 0, EARLY, CACHE)
        fence_async_shared()
        mbarrier.arrive(bars.k_p0_ready.index(k % NB), count=1)
        convert_k_fp8_to_bf16(smem, EARLY, RAW, CACHE)
        if PLAIN > 0:
            wait_for_step(bars.k_plain_done, k, NB)
        fence_async_shared()
        mbarrier.arrive(bars.k_p1_ready.index(k % NB), count=1)
        thread_barrier()  # all warps have read the raw rows
        if k + 1 < steps:
            load_k_fp8_tma(sources, keys, smem.k_raw, bars.k_fp8_tma_done, k + 1, HOW)


@gluon.jit
def load_v_fp8_tma(
    sources,
    keys,
    raw,
    wide,
    done,
    k,
    HOW: gl.constexpr,
    CACHE: gl.constexpr,
):
    """Start gathering the raw tiles of a step: two halves of the keys, 64 columns each; and 16-bit
    columns to their tile."""
    OFFSETS: gl.constexpr = offsets_layout(gl.num_warps())
    KEYS: gl.constexpr = raw.shape[1]
    TILES: gl.constexpr = raw.shape[0] // 2
    RAW: gl.constexpr = CACHE.v_tiles
    PLAIN: gl.constexpr = TILES // 2 - RAW
    mbarrier.expect(done, 2 * (RAW + 2 * PLAIN) * KEYS * GATHERED)
    for half in gl.static_range(2):
        rows = step_rows(keys, k, half * KEYS, KEYS, OFFSETS, HOW)
        if keys.second is None:
            gather_tiles(sources.v, rows, done, raw, TILES + half * RAW, RAW)
        else:
            if k < keys.second.after:
                gather_tiles(sources.v, rows, done, raw, TILES + half * RAW, RAW)
            else:
                gather_tiles(sources.second.raw, rows, done, raw, TILES + half * RAW, RAW)
        if PLAIN > 0:
            tile = wide.index(half * (RAW + PLAIN) + RAW)
            gather_plain(sources, keys, rows, done, tile, k, CACHE)


@gluon.jit
def load_v_fp8(
    sources,
    keys,
    smem,
    bars,
    steps,
    HOW: gl.constexpr,
    CACHE: gl.constexpr,
    TILE: gl.constexpr,
    BYTES: gl.constexpr,
):
    """V of every step; raw rows come once the products of the step before have read V."""
    v_smem, v_scales = smem.v, smem.v_scales
    NB: gl.constexpr = HOW.num_mbars
    TILES: gl.constexpr = v_smem.shape[0] * (v_smem.shape[2] // GATHERED)
    KEYS: gl.constexpr = v_smem.shape[1]
    raw = reinterpret(v_smem, gl.float8e4nv, [2 * TILES, KEYS, GATHERED], BYTES)
    wide = None
    if 2 * CACHE.v_tiles < TILES:
        wide = reinterpret(v_smem, v_smem.dtype, [TILES, KEYS, GATHERED], TILE)
    mbarrier.wait(bars.q_copied.index(0), 0)
    for k in range(0, steps):
        wait_for_step(bars.sv_p0_done, k - 1, NB)
        wait_for_step(bars.sv_p1_done, k - 1, NB)
        done = bars.v_fp8_tma_done.index(k % NB)
        load_v_fp8_tma(sources, keys, raw, wide, done, k, HOW, CACHE)
        if CACHE.scale_columns > 0:
            load_v_scales_to_smem(sources, keys, k, v_scales, HOW, CACHE)
        wait_for_step(bars.v_fp8_tma_done, k, NB)
        convert_v_fp8_to_bf16(raw, v_smem, v_scales, 0, CACHE)
        fence_async_shared()
        mbarrier.arrive(bars.v_p0_ready.index(k % NB), count=1)
        convert_v_fp8_to_bf16(raw, v_smem, v_scales, 1, CACHE)
        fence_async_shared()
        mbarrier.arrive(bars.v_p1_ready.index(k % NB), count=1)
