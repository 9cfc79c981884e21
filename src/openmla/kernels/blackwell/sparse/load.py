"""Producers of the sparse kernel over bf16 (or fp16) rows: Q by TMA boxes, K and V by gather4.

K of a step is 9 tiles of [B_TOPK, 64] (8 or 5 of narrower rows); those that meet Q's columns in
shared memory and the others have a barrier each. V is two halves of the keys, each with two atoms
of 256 columns, or one.

Arguments of all functions: Tiles `smem`, Barriers `bars`, the token's KeyList `keys`, records.How
`HOW`, QSplit `SPLIT`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier, tma

from openmla.kernels.blackwell.sparse.rows import descriptor_rows, wait_for_step
from openmla.kernels.gluon.boxes import load_rows
from openmla.kernels.gluon.compat import reinterpret

GATHERED = gl.constexpr(64)  # columns of one gather of K: a swizzle span
HEADS = gl.constexpr(64)  # rows of the products
WARP_HEADS = gl.constexpr(16)  # heads in the 32 lanes of a warp
LANES = gl.constexpr(32)


@gluon.constexpr_function
def offsets_layout(warps, ctas=1, divided=False):
    """Row numbers for gather4: four to a message, the messages dealt to the warps.

    In a pair every CTA gathers all rows, or, if `divided`, each CTA gathers one half.
    """
    cluster = [[0, int(divided)]] if ctas > 1 else []
    return gl.SliceLayout(0, gl.BlockedLayout([1, 4], [32, 1], [1, warps], [1, 0], cluster))


@gluon.jit
def q_staging(smem, GROUP: gl.constexpr, WORDS: gl.constexpr):
    """Where columns GROUP x 64 … of Q wait to be copied: 128 rows of 128 bytes, as fp32 words.

    The first groups are in V's buffer, as many as V has tiles; others from the fifth of K on.
    """
    IN_V: gl.constexpr = smem.v.shape[0]
    if GROUP < IN_V:
        return reinterpret(smem.v, gl.float32, [IN_V, 128, 32], WORDS).index(GROUP)
    else:
        return reinterpret(smem.k, gl.float32, [4, 128, 32], WORDS).index(GROUP - 2)


@gluon.jit
def load_q(
    q_desc,
    q_warp_desc,
    smem,
    ready,
    token,
    head,
    SPLIT: gl.constexpr,
    TILE: gl.constexpr,
):
    """The token's heads: the first SPLIT.smem columns stay in shared memory, the other SPLIT.tmem
    wait there to be copied to tensor memory.

    Heads past the last are zeros.
    """
    KEPT: gl.constexpr = SPLIT.smem // GATHERED
    mbarrier.expect(ready, HEADS * (SPLIT.smem + 2 * SPLIT.tmem) * 2)
    for g in gl.static_range(KEPT):
        load_rows(q_desc, token, head, g * GATHERED, ready, smem.q.index(g))
    stage_q(q_warp_desc, smem, ready, token, head, SPLIT, TILE)


@gluon.jit
def stage_q(q_warp_desc, smem, ready, token, head, SPLIT: gl.constexpr, TILE: gl.constexpr):
    """The columns to be copied. A copy moves 128 rows to the 128 lanes of tensor memory, but the
    products read 64 rows, 16 from each warp's 32 lanes. So 32 heads are loaded for every warp, and
    the next starts 16 heads further on.
    """
    KEPT: gl.constexpr = SPLIT.smem
    COPIED: gl.constexpr = SPLIT.tmem // GATHERED
    IN_V: gl.constexpr = smem.v.shape[0]
    low = reinterpret(smem.v, q_warp_desc.dtype, [4 * IN_V, LANES, GATHERED], TILE)
    if COPIED > IN_V:
        high = reinterpret(smem.k, q_warp_desc.dtype, [16, LANES, GATHERED], TILE)
    for g in gl.static_range(COPIED):
        for w in gl.static_range(HEADS // WARP_HEADS):
            tile = low.index(4 * g + w) if g < IN_V else high.index(4 * (g - 2) + w)
            load_rows(q_warp_desc, token, head + w * WARP_HEADS, KEPT + g * GATHERED, ready, tile)


@gluon.jit
def load_k(k_desc, keys, k_smem, bars, steps, EARLY: gl.constexpr, HOW: gl.constexpr):
    """K of every step, as soon as the products of the step before have read their columns."""
    B_TOPK: gl.constexpr = HOW.b_topk
    NB: gl.constexpr = HOW.num_mbars
    INDEXING: gl.constexpr = HOW.indexing
    OFFSETS: gl.constexpr = offsets_layout(gl.num_warps())
    TILES: gl.constexpr = k_smem.shape[0]
    TILE_BYTES: gl.constexpr = B_TOPK * GATHERED * 2
    for k in range(0, steps):
        rows = descriptor_rows(keys, k * B_TOPK, B_TOPK, OFFSETS, INDEXING)
        ready = bars.k_p0_ready.index(k % NB)
        wait_for_step(bars.qk_ss_done, k - 1, NB)
        mbarrier.expect(ready, EARLY * TILE_BYTES)
        for g in gl.static_range(EARLY):
            tma.async_gather(k_desc, rows, g * GATHERED, ready, k_smem.index(g))
        ready = bars.k_p1_ready.index(k % NB)
        if k == 0:
            mbarrier.wait(bars.q_copied.index(0), 0)
        wait_for_step(bars.qk_ts_done, k - 1, NB)
        mbarrier.expect(ready, (TILES - EARLY) * TILE_BYTES)
        for g in gl.static_range(EARLY, TILES):
            tma.async_gather(k_desc, rows, g * GATHERED, ready, k_smem.index(g))


@gluon.jit
def load_v_half(v_desc, keys, v_smem, done, ready, k, HALF: gl.constexpr, HOW: gl.constexpr):
    """Half the keys of step k, all atoms of columns."""
    B_TOPK: gl.constexpr = HOW.b_topk
    NB: gl.constexpr = HOW.num_mbars
    INDEXING: gl.constexpr = HOW.indexing
    OFFSETS: gl.constexpr = offsets_layout(gl.num_warps())
    KEYS: gl.constexpr = B_TOPK // 2
    ATOMS: gl.constexpr = v_smem.shape[0] // 2
    ATOM: gl.constexpr = v_smem.shape[2]
    rows = descriptor_rows(keys, k * B_TOPK + HALF * KEYS, KEYS, OFFSETS, INDEXING)
    wait_for_step(done, k - 1, NB)
    mbarrier.expect(ready.index(k % NB), ATOMS * KEYS * ATOM * 2)
    for atom in gl.static_range(ATOMS):
        tile = v_smem.index(ATOMS * HALF + atom)
        tma.async_gather(v_desc, rows, atom * ATOM, ready.index(k % NB), tile)


@gluon.jit
def load_v(v_desc, keys, v_smem, bars, steps, HOW: gl.constexpr):
    """V of every step; the first has to wait until Q has left the buffer."""
    mbarrier.wait(bars.q_copied.index(0), 0)
    for k in range(0, steps):
        load_v_half(v_desc, keys, v_smem, bars.sv_p0_done, bars.v_p0_ready, k, 0, HOW)
        load_v_half(v_desc, keys, v_smem, bars.sv_p1_done, bars.v_p1_ready, k, 1, HOW)
