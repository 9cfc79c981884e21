"""Producers of the sparse kernel over an fp8 cache: rows are gathered raw, then dequantized.

The value of an element is bf16(fp32(e4m3) * scale), rounded once.

| buffer | tiles of K, halves of V | raw tiles |
|---|---|---|
| K | 9 of [64, 64], 8192 bytes each | 9 of 4096 bytes, in a buffer of their own |
| K, rows of 656 bytes | 9, the last one bf16 | 8 of them |
| V | 2 of [32, 512], 32768 bytes each | 16 of [32, 64], tile i at 32768 + 2048 * i of V's |

Raw rows of K are gathered a step ahead: as soon as all warps have read those of the step before, so
that they arrive under its products. There is no room for V's beside its tiles: they lie in the
upper half. V's first half overwrites nothing, of the second all is read first.

Rows of 656 bytes hold their rope part as bf16, which is gathered straight to its tile, and their
scales, one per 128 columns.

HOW as in load.py. CACHE is
(columns that share a scale, dequantized tiles of K): (64, 9) for fp8_block64, (128, 8) for 656
bytes, (576, 9) for fp8_token, (0, 9) for rows without scales.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    fence_async_shared,
    mbarrier,
    tma,
)

from openmla.kernels.blackwell.sparse.load import GATHERED, offsets_layout
from openmla.kernels.blackwell.sparse.rows import descriptor_rows, listed, wait_for_step
from openmla.kernels.gluon.compat import reinterpret, thread_barrier

ROPE_OF_656 = gl.constexpr(264)  # 16-bit columns before the rope part: 512 bytes and 4 scales


@gluon.constexpr_function
def scale_blocks(cache, tiles):
    """Scales of a key: of its K columns and of its 512 V columns; one where there are none."""
    block, dequantized = cache
    if block == 0:
        return 1, 1
    return -(-dequantized * 64 // block), -(-512 // block)


@gluon.jit
def load_scales_to_smem(scales, keys, first, smem, N: gl.constexpr, HOW: gl.constexpr):
    """fp32 scales of N listed keys, a line of `smem` per block of columns; 0 where none counts."""
    scale_ptr, stride_page, stride_row = scales
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    BLOCKS: gl.constexpr = smem.shape[0]
    PAGE: gl.constexpr = HOW[3]
    index, ok = listed(keys, first, N, L, HOW)
    at = index.to(gl.int64) * stride_row
    if PAGE > 0:
        at = (index // PAGE).to(gl.int64) * stride_page + (index % PAGE).to(gl.int64) * stride_row
    for block in gl.static_range(BLOCKS):
        smem.index(block).store(gl.load(scale_ptr + at + block, mask=ok, other=0.0))


@gluon.jit
def load_k_scales_to_smem(scales, keys, k, k_scales, HOW: gl.constexpr):
    """Scales of the keys of step k, all columns."""
    load_scales_to_smem(scales, keys, k * HOW[0], k_scales, HOW[0], HOW)


@gluon.jit
def load_v_scales_to_smem(scales, keys, k, v_scales, HOW: gl.constexpr):
    """Scales of the keys of step k, columns of V."""
    load_scales_to_smem(scales, keys, k * HOW[0], v_scales, HOW[0], HOW)


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
def convert_k_fp8_to_bf16(
    raw, k_smem, k_scales, FIRST: gl.constexpr, LAST: gl.constexpr, CACHE: gl.constexpr
):
    """Dequantize tiles FIRST … LAST - 1 of K."""
    L: gl.constexpr = raw_layout(gl.num_warps())
    BLOCK: gl.constexpr = CACHE[0]
    for g in gl.static_range(FIRST, LAST):
        wide = dequantize(raw.index(g).load(L), k_scales, 0, g * GATHERED, BLOCK, k_smem.dtype)
        k_smem.index(g).store(wide)


@gluon.jit
def convert_v_fp8_to_bf16(raw, v_smem, v_scales, HALF: gl.constexpr, CACHE: gl.constexpr):
    """Dequantize half the keys of V: read all 8 raw tiles, then write."""
    L: gl.constexpr = raw_layout(gl.num_warps())
    BLOCK: gl.constexpr = CACHE[0]
    KEYS: gl.constexpr = v_smem.shape[1]
    PER_ATOM: gl.constexpr = v_smem.shape[2] // GATHERED
    tiles = ()
    for g in gl.static_range(2 * PER_ATOM):
        tiles = tiles + (raw.index((4 + 2 * HALF) * PER_ATOM + g).load(L),)  # noqa: RUF005
    thread_barrier()
    for g in gl.static_range(2 * PER_ATOM):
        wide = dequantize(tiles[g], v_scales, HALF * KEYS, g * GATHERED, BLOCK, v_smem.dtype)
        atom = v_smem.index(2 * HALF + g // PER_ATOM)
        atom.slice(g % PER_ATOM * GATHERED, GATHERED, dim=1).store(wide)


@gluon.jit
def load_k_fp8_tma(raw_desc, keys, raw, bars, k, HOW: gl.constexpr):
    """Start gathering the raw tiles of step k."""
    OFFSETS: gl.constexpr = offsets_layout(gl.num_warps())
    TILES: gl.constexpr = raw.shape[0]
    done = bars.index(k % HOW[1])
    rows = descriptor_rows(keys, k * HOW[0], HOW[0], OFFSETS, HOW)
    mbarrier.expect(done, HOW[0] * GATHERED * TILES)
    for g in gl.static_range(TILES):
        tma.async_gather(raw_desc, rows, g * GATHERED, done, raw.index(g))


@gluon.jit
def load_k_rope_tma(rope_desc, keys, tile, bars, k, HOW: gl.constexpr):
    """Likewise the rope part of rows of 656 bytes, which needs no dequantizing."""
    OFFSETS: gl.constexpr = offsets_layout(gl.num_warps())
    done = bars.index(k % HOW[1])
    mbarrier.expect(done, HOW[0] * GATHERED * 2)
    rows = descriptor_rows(keys, k * HOW[0], HOW[0], OFFSETS, HOW)
    tma.async_gather(rope_desc, rows, ROPE_OF_656, done, tile)


@gluon.jit
def load_k_fp8(
    descs, scales, keys, k_smem, raw, k_scales, bars, steps, EARLY: gl.constexpr,
    HOW: gl.constexpr, CACHE: gl.constexpr,
):  # fmt: skip
    """K of every step; raw rows come a step ahead."""
    q_copied, qk_ss_done, qk_ts_done, k_p0_ready, k_p1_ready, fp8_bars = bars
    k_fp8_tma_done, k_rope_done = fp8_bars
    NB: gl.constexpr = HOW[1]
    WIDENED: gl.constexpr = CACHE[1]
    PLAIN: gl.constexpr = k_smem.shape[0] - WIDENED
    load_k_fp8_tma(descs[0], keys, raw, k_fp8_tma_done, steps * 0, HOW)
    mbarrier.wait(q_copied.index(0), 0)
    for k in range(0, steps):
        if CACHE[0] > 0:
            load_k_scales_to_smem(scales, keys, k, k_scales, HOW)
        wait_for_step(qk_ss_done, k - 1, NB)
        wait_for_step(qk_ts_done, k - 1, NB)
        if PLAIN > 0:
            load_k_rope_tma(descs[1], keys, k_smem.index(WIDENED), k_rope_done, k, HOW)
        wait_for_step(k_fp8_tma_done, k, NB)
        convert_k_fp8_to_bf16(raw, k_smem, k_scales, 0, EARLY, CACHE)
        fence_async_shared()
        mbarrier.arrive(k_p0_ready.index(k % NB), count=1)
        convert_k_fp8_to_bf16(raw, k_smem, k_scales, EARLY, WIDENED, CACHE)
        if PLAIN > 0:
            wait_for_step(k_rope_done, k, NB)
        fence_async_shared()
        mbarrier.arrive(k_p1_ready.index(k % NB), count=1)
        thread_barrier()  # all warps have read the raw rows
        if k + 1 < steps:
            load_k_fp8_tma(descs[0], keys, raw, k_fp8_tma_done, k + 1, HOW)


@gluon.jit
def load_v_fp8_tma(raw_desc, keys, raw, done, k, HOW: gl.constexpr):
    """Start gathering the raw tiles of a step: two halves of the keys, 64 columns each."""
    OFFSETS: gl.constexpr = offsets_layout(gl.num_warps())
    KEYS: gl.constexpr = raw.shape[1]
    TILES: gl.constexpr = raw.shape[0] // 2
    mbarrier.expect(done, TILES * KEYS * GATHERED)
    for half in gl.static_range(2):
        rows = descriptor_rows(keys, k * HOW[0] + half * KEYS, KEYS, OFFSETS, HOW)
        for g in gl.static_range(TILES // 2):
            tile = raw.index(TILES + half * (TILES // 2) + g)
            tma.async_gather(raw_desc, rows, g * GATHERED, done, tile)


@gluon.jit
def load_v_fp8(
    raw_desc, scales, keys, v_smem, v_scales, bars, steps, HOW: gl.constexpr, CACHE: gl.constexpr,
    BYTES: gl.constexpr,
):  # fmt: skip
    """V of every step, likewise."""
    q_copied, sv_p0_done, sv_p1_done, v_p0_ready, v_p1_ready, v_fp8_tma_done = bars
    NB: gl.constexpr = HOW[1]
    TILES: gl.constexpr = v_smem.shape[0] * (v_smem.shape[2] // GATHERED)
    KEYS: gl.constexpr = v_smem.shape[1]
    raw = reinterpret(v_smem, gl.float8e4nv, [2 * TILES, KEYS, GATHERED], BYTES)
    mbarrier.wait(q_copied.index(0), 0)
    for k in range(0, steps):
        wait_for_step(sv_p0_done, k - 1, NB)
        wait_for_step(sv_p1_done, k - 1, NB)
        load_v_fp8_tma(raw_desc, keys, raw, v_fp8_tma_done.index(k % NB), k, HOW)
        if CACHE[0] > 0:
            load_v_scales_to_smem(scales, keys, k, v_scales, HOW)
        wait_for_step(v_fp8_tma_done, k, NB)
        convert_v_fp8_to_bf16(raw, v_smem, v_scales, 0, CACHE)
        fence_async_shared()
        mbarrier.arrive(v_p0_ready.index(k % NB), count=1)
        convert_v_fp8_to_bf16(raw, v_smem, v_scales, 1, CACHE)
        fence_async_shared()
        mbarrier.arrive(v_p1_ready.index(k % NB), count=1)
