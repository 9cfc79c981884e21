"""The MMA warp: issues every product, in the order that keeps both score tiles moving.

Products of one warp run in the order they are issued, so a score tile may be overwritten right
after the PV that reads its weights has been issued, and a commit speaks for all products so far.

Two query tiles: S0 S1, then per block O0 S0' O1 S1' (S': of the next block). While one tile's
scores become weights, the tensor cores work on the other's.
The first tile leaves out the blocks that none of its rows sees.
One query tile: S0 S1, then per block O S' (S': of the block after the next, in the tile that the
weights just left).
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
    smem, tile, wide, half: gl.constexpr, j, first, slot, place, DIMS: gl.constexpr,
    RAW: gl.constexpr,
):  # fmt: skip
    """Scores of a query tile and block j of keys: one product per part of the columns.

    wide: barriers of dequantized rope of Q and of K, waited for where RAW says so; of Q if j is the
    first block.
    """
    q_smem, k_smem, _v_smem = smem
    q_main, q_tail, q_rope = q_smem
    k_main, k_tail, k_rope = k_smem
    here = opaque_zero() + half  # or descriptors of Q are kept in registers that are not there
    k = tile_of(k_main, slot, DIMS[0]).permute((1, 0))
    tcgen05_mma(q_main.index(here), k, tile, use_acc=False)
    if DIMS[1] > 0:
        tcgen05_mma(q_tail.index(here), k_tail.index(slot).permute((1, 0)), tile)
    q_wide, k_wide = wide
    if RAW[0]:
        mbarrier.wait(q_wide.index(half), 0, pred=j == first)
    if RAW[1]:
        mbarrier.wait(k_wide.index(place), (j // k_rope.shape[0]) & 1)
    if DIMS[2] > 0:
        tcgen05_mma(q_rope.index(here), k_rope.index(place).permute((1, 0)), tile)


@gluon.jit
def accumulate(tmem, v, tile: gl.constexpr, out: gl.constexpr, first, TMEM: gl.constexpr):
    """Add the weights over score tile `tile`, times V, to output `out`.

    Weights of 8 bits come in two parts, each with a product of its own.
    """
    row_sum = output(tmem, out, TMEM)
    tcgen05_mma(weights(tmem, tile, 0, v.dtype, TMEM), v, row_sum, use_acc=first == 0)
    if v.dtype.primitive_bitwidth == 8:
        tcgen05_mma(weights(tmem, tile, 1, v.dtype, TMEM), v, row_sum)


@gluon.jit
def multiply_two(
    smem, tmem, bars, blocks, skipped,
    RING: gl.constexpr, DIMS: gl.constexpr, RAW: gl.constexpr, TMEM: gl.constexpr,
):  # fmt: skip
    """Both query tiles over every block, but for those that the first skips."""
    ring, second, s_full, p_full, o_full, wide = bars
    full, empty = ring
    v_smem = smem[2]
    if blocks > 0:
        zero = blocks * 0
        slot, phase, place = k_place(zero, False, RING)
        mbarrier.wait(full.index(slot), phase)
        if skipped == 0:
            score(smem, scores(tmem, 0, TMEM), wide, 0, zero, zero, slot, place, DIMS, RAW)
            tcgen05_commit(s_full.index(0))
        mbarrier.wait(second.index(0), 0)
        score(smem, scores(tmem, 1, TMEM), wide, 1, zero, zero, slot, place, DIMS, RAW)
        tcgen05_commit(s_full.index(1))
        tcgen05_commit(empty.index(slot))
    for j in range(0, blocks):
        first = gl.where(j == 0, 1, 0)
        v_slot, v_phase, at = v_place(j, False, RING)
        mbarrier.wait(full.index(at), v_phase)
        if j >= skipped:
            mbarrier.wait(p_full.index(0), (j - skipped) & 1)
            begins = gl.where(j == skipped, 1, 0)
            accumulate(tmem, tile_of(v_smem, v_slot, DIMS[3]), 0, 0, begins, TMEM)
            tcgen05_commit(o_full.index(0))
        slot, phase, place = k_place(j + 1, False, RING)
        if j + 1 < blocks:
            mbarrier.wait(full.index(slot), phase)
            if j + 1 >= skipped:
                tile = scores(tmem, 0, TMEM)
                score(smem, tile, wide, 0, j + 1, skipped, slot, place, DIMS, RAW)
                tcgen05_commit(s_full.index(0))
        mbarrier.wait(p_full.index(1), j & 1)
        accumulate(tmem, tile_of(v_smem, v_slot, DIMS[3]), 1, 1, first, TMEM)
        tcgen05_commit(o_full.index(1))
        tcgen05_commit(empty.index(at))
        if j + 1 < blocks:
            score(smem, scores(tmem, 1, TMEM), wide, 1, j + 1, 0, slot, place, DIMS, RAW)
            tcgen05_commit(s_full.index(1))
            tcgen05_commit(empty.index(slot))


@gluon.jit
def score_block(
    smem, tmem, bars, j, tile: gl.constexpr, RING: gl.constexpr, DIMS: gl.constexpr,
    RAW: gl.constexpr, TMEM: gl.constexpr,
):  # fmt: skip
    """Scores of block j of one query tile, in score tile j % 2."""
    ring, _second, s_full, _p_full, _o_full, wide = bars
    full, empty = ring
    slot, phase, place = k_place(j, True, RING)
    mbarrier.wait(full.index(slot), phase)
    score(smem, scores(tmem, tile, TMEM), wide, 0, j, 0, slot, place, DIMS, RAW)
    tcgen05_commit(s_full.index(tile))
    tcgen05_commit(empty.index(slot))


@gluon.jit
def add_block(smem, tmem, bars, j, tile: gl.constexpr, RING: gl.constexpr, TMEM: gl.constexpr):
    """PV of block j of one query tile."""
    ring, _second, _s_full, p_full, o_full, _wide = bars
    full, empty = ring
    slot, phase, at = v_place(j, True, RING)
    mbarrier.wait(full.index(at), phase)
    mbarrier.wait(p_full.index(tile), (j // 2) & 1)
    accumulate(tmem, tile_of(smem[2], slot, TMEM[5]), tile, 0, gl.where(j == 0, 1, 0), TMEM)
    tcgen05_commit(o_full.index(0))
    tcgen05_commit(empty.index(at))


@gluon.jit
def multiply_one(
    smem, tmem, bars, blocks,
    RING: gl.constexpr, DIMS: gl.constexpr, RAW: gl.constexpr, TMEM: gl.constexpr,
):  # fmt: skip
    """One query tile; block j's scores are in score tile j % 2, one accumulator takes all."""
    for tile in gl.static_range(2):
        if tile < blocks:
            score_block(smem, tmem, bars, blocks * 0 + tile, tile, RING, DIMS, RAW, TMEM)
    for pair in range(0, (blocks + 1) // 2):
        for tile in gl.static_range(2):
            j = 2 * pair + tile
            if j < blocks:
                add_block(smem, tmem, bars, j, tile, RING, TMEM)
            if j + 2 < blocks:
                score_block(smem, tmem, bars, j + 2, tile, RING, DIMS, RAW, TMEM)


@gluon.jit
def multiply(
    given, QUERIES: gl.constexpr, RING: gl.constexpr, DIMS: gl.constexpr, RAW: gl.constexpr,
    TMEM: gl.constexpr,
):  # fmt: skip
    """QUERIES: 1 or 2 query tiles; 0: one where the work item has at most 128 rows, else two."""
    smem, tmem, bars, work = given
    rows, blocks, skipped = work[2], work[6], work[9]
    if QUERIES == 1:
        multiply_one(smem, tmem, bars, blocks, RING, DIMS, RAW, TMEM)
    elif QUERIES == 2:
        multiply_two(smem, tmem, bars, blocks, skipped, RING, DIMS, RAW, TMEM)
    else:
        if rows > Q_ROWS:
            multiply_two(smem, tmem, bars, blocks, skipped, RING, DIMS, RAW, TMEM)
        else:
            multiply_one(smem, tmem, bars, blocks, RING, DIMS, RAW, TMEM)
