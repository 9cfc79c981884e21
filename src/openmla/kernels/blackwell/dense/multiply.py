"""The MMA warp: issues every product, in the order that keeps both score tiles moving.

Products of one warp run in the order they are issued, so a score tile may be overwritten right
after the PV that reads its weights has been issued, and a commit covers all products so far.

Two query tiles: S0 S1, then per block O0 S0' O1 S1' (S': scores of the next block). While one
tile's scores become weights, the tensor cores work on the other's.
The first tile leaves out the blocks that none of its rows sees.
One query tile: S0 S1, then per block O S' (S': scores of the block after the next, in the tile that
the weights just left).

Arguments of all functions: tiles in shared memory `smem` (records.Tiles), the TMEM allocation
`tmem`, all Barriers `bars`, and the MultiplyHow `HOW`. TMEM: see columns.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
)

from openmla.kernels.blackwell.dense.columns import output, scores, weights
from openmla.kernels.blackwell.dense.ring import k_place, tile_of, v_place
from openmla.kernels.gluon.scores import opaque_zero

Q_ROWS = gl.constexpr(128)


@gluon.jit
def score(
    smem,
    tile,
    bars,
    half: gl.constexpr,
    j,
    first,
    slot,
    place,
    HOW: gl.constexpr,
):
    """Scores of query tile `half` and block j of keys: one product per part of the columns.

    K is in `slot` of its ring, its rope in rope buffer `place`. Rope that is dequantized is waited
    for: Q's in the first block of the tile, number `first`, K's in every block.
    """
    q, k = smem.q, smem.k
    here = opaque_zero() + half  # or descriptors of Q are kept in registers that are not there
    k_main = tile_of(k.main, slot, HOW.columns.main).permute((1, 0))
    tcgen05_mma(q.main.index(here), k_main, tile, use_acc=False)
    if HOW.columns.tail > 0:
        tcgen05_mma(q.tail.index(here), k.tail.index(slot).permute((1, 0)), tile)
    if HOW.raw.q:
        mbarrier.wait(bars.q_wide.index(half), 0, pred=j == first)
    if HOW.raw.k:
        mbarrier.wait(bars.k_wide.index(place), (j // k.rope.shape[0]) & 1)
    if HOW.columns.rope > 0:
        tcgen05_mma(q.rope.index(here), k.rope.index(place).permute((1, 0)), tile)


@gluon.jit
def accumulate(tmem, v, tile: gl.constexpr, out: gl.constexpr, first, TMEM: gl.constexpr):
    """Add the weights over score tile `tile`, times V, to output `out`; overwrite it if `first`."""
    tile_weights = weights(tmem, tile, v.dtype, TMEM)
    tcgen05_mma(tile_weights, v, output(tmem, out, TMEM), use_acc=first == 0)


@gluon.jit
def multiply_two(smem, tmem, bars, blocks, skipped, HOW: gl.constexpr, TMEM: gl.constexpr):
    """Both query tiles over every block; the first tile leaves out the first `skipped` blocks."""
    full, empty = bars.ring.full, bars.ring.empty
    D_V: gl.constexpr = HOW.columns.v
    if blocks > 0:
        zero = blocks * 0
        slot, phase, place = k_place(zero, False, HOW.ring)
        mbarrier.wait(full.index(slot), phase)
        if skipped == 0:
            score(smem, scores(tmem, 0, TMEM), bars, 0, zero, zero, slot, place, HOW)
            tcgen05_commit(bars.s_full.index(0))
        mbarrier.wait(bars.second.index(0), 0)
        score(smem, scores(tmem, 1, TMEM), bars, 1, zero, zero, slot, place, HOW)
        tcgen05_commit(bars.s_full.index(1))
        tcgen05_commit(empty.index(slot))
    for j in range(0, blocks):
        first = gl.where(j == 0, 1, 0)
        v_slot, v_phase, at = v_place(j, False, HOW.ring)
        mbarrier.wait(full.index(at), v_phase)
        if j >= skipped:
            mbarrier.wait(bars.p_full.index(0), (j - skipped) & 1)
            begins = gl.where(j == skipped, 1, 0)
            accumulate(tmem, tile_of(smem.v, v_slot, D_V), 0, 0, begins, TMEM)
            tcgen05_commit(bars.o_full.index(0))
        slot, phase, place = k_place(j + 1, False, HOW.ring)
        if j + 1 < blocks:
            mbarrier.wait(full.index(slot), phase)
            if j + 1 >= skipped:
                score(smem, scores(tmem, 0, TMEM), bars, 0, j + 1, skipped, slot, place, HOW)
                tcgen05_commit(bars.s_full.index(0))
        mbarrier.wait(bars.p_full.index(1), j & 1)
        accumulate(tmem, tile_of(smem.v, v_slot, D_V), 1, 1, first, TMEM)
        tcgen05_commit(bars.o_full.index(1))
        tcgen05_commit(empty.index(at))
        if j + 1 < blocks:
            score(smem, scores(tmem, 1, TMEM), bars, 1, j + 1, 0, slot, place, HOW)
            tcgen05_commit(bars.s_full.index(1))
            tcgen05_commit(empty.index(slot))


@gluon.jit
def score_block(smem, tmem, bars, j, tile: gl.constexpr, HOW: gl.constexpr, TMEM: gl.constexpr):
    """Scores of block j of one query tile, in score tile j % 2."""
    slot, phase, place = k_place(j, True, HOW.ring)
    mbarrier.wait(bars.ring.full.index(slot), phase)
    score(smem, scores(tmem, tile, TMEM), bars, 0, j, 0, slot, place, HOW)
    tcgen05_commit(bars.s_full.index(tile))
    tcgen05_commit(bars.ring.empty.index(slot))


@gluon.jit
def add_block(v_smem, tmem, bars, j, tile: gl.constexpr, RING: gl.constexpr, TMEM: gl.constexpr):
    """PV of block j of one query tile."""
    slot, phase, at = v_place(j, True, RING)
    mbarrier.wait(bars.ring.full.index(at), phase)
    mbarrier.wait(bars.p_full.index(tile), (j // 2) & 1)
    accumulate(tmem, tile_of(v_smem, slot, TMEM.d_v), tile, 0, gl.where(j == 0, 1, 0), TMEM)
    tcgen05_commit(bars.o_full.index(0))
    tcgen05_commit(bars.ring.empty.index(at))


@gluon.jit
def multiply_one(smem, tmem, bars, blocks, HOW: gl.constexpr, TMEM: gl.constexpr):
    """One query tile; block j's scores are in score tile j % 2, one accumulator takes all."""
    for tile in gl.static_range(2):
        if tile < blocks:
            score_block(smem, tmem, bars, blocks * 0 + tile, tile, HOW, TMEM)
    for pair in range(0, (blocks + 1) // 2):
        for tile in gl.static_range(2):
            j = 2 * pair + tile
            if j < blocks:
                add_block(smem.v, tmem, bars, j, tile, HOW.ring, TMEM)
            if j + 2 < blocks:
                score_block(smem, tmem, bars, j + 2, tile, HOW, TMEM)


@gluon.jit
def multiply(
    smem,
    tmem,
    bars,
    work,
    QUERIES: gl.constexpr,
    HOW: gl.constexpr,
    TMEM: gl.constexpr,
):
    """The MMA partition, for WorkItem `work`.

    QUERIES: 1 or 2 query tiles; 0: one where the work item has at most 128 rows, else two.
    """
    if QUERIES == 1:
        multiply_one(smem, tmem, bars, work.blocks, HOW, TMEM)
    elif QUERIES == 2:
        multiply_two(smem, tmem, bars, work.blocks, work.skipped, HOW, TMEM)
    else:
        if work.rows > Q_ROWS:
            multiply_two(smem, tmem, bars, work.blocks, work.skipped, HOW, TMEM)
        else:
            multiply_one(smem, tmem, bars, work.blocks, HOW, TMEM)
