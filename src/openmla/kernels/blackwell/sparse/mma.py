# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""The products of the sparse kernel, all issued by one warp.

Step k multiplies Q with the keys of step k, then the weights of step k - 1 with their V: the
softmax of a step runs under the products of the next.

Arguments of all functions: Tiles `smem`, the TMEM allocation `tmem`, Barriers `bars`, TmemMap `MAP`
and TmemLayouts `TMEM`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    mbarrier,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma,
)

from openmla.kernels.blackwell.sparse.load import GATHERED, HEADS, q_staging
from openmla.kernels.blackwell.sparse.rows import wait_for_step
from openmla.kernels.gluon.compat import reinterpret_columns
from openmla.kernels.gluon.scores import opaque_zero

WORDS_PER_TILE = gl.constexpr(32)  # tensor-memory columns of 64 columns of Q, two to a cell


@gluon.jit
def output(tmem, ATOM: gl.constexpr, MAP: gl.constexpr, TMEM: gl.constexpr):
    """Atom ATOM, 256 columns of O. The two atoms share columns, each in half of the lanes."""
    LAYOUT: gl.constexpr = TMEM.output
    COLUMNS: gl.constexpr = MAP.scores - MAP.output
    both = reinterpret_columns(tmem.slice(MAP.output, COLUMNS), gl.float32, [HEADS, 512], LAYOUT)
    return both.slice(ATOM * 256, 256)


@gluon.jit
def scores(tmem, MAP: gl.constexpr, TMEM: gl.constexpr, B_TOPK: gl.constexpr):
    """S: a row per head, a column per key of a step."""
    LAYOUT: gl.constexpr = TMEM.scores
    return reinterpret_columns(tmem.slice(MAP.scores, B_TOPK), gl.float32, [HEADS, B_TOPK], LAYOUT)


@gluon.jit
def query(tmem, GROUP: gl.constexpr, DTYPE: gl.constexpr, MAP: gl.constexpr, TMEM: gl.constexpr):
    """Columns GROUP x 64 … of the copied part of Q, as a left operand."""
    LAYOUT: gl.constexpr = TMEM.q
    place = tmem.slice(MAP.q + GROUP * WORDS_PER_TILE, WORDS_PER_TILE)
    return reinterpret_columns(place, DTYPE, [HEADS, GATHERED], LAYOUT)


@gluon.jit
def cp_q_from_smem_to_tmem(
    smem,
    tmem,
    GROUPS: gl.constexpr,
    WORDS: gl.constexpr,
    MAP: gl.constexpr,
    TMEM: gl.constexpr,
):
    """Move the staged columns of Q, 64 at a time."""
    LAYOUT: gl.constexpr = TMEM.q_copy
    for g in gl.static_range(GROUPS):
        place = tmem.slice(MAP.q + g * WORDS_PER_TILE, WORDS_PER_TILE)
        lanes = reinterpret_columns(place, gl.float32, [128, WORDS_PER_TILE], LAYOUT)
        tcgen05_copy(q_staging(smem, g, WORDS), lanes)


@gluon.jit
def multiply_qk(
    smem,
    tmem,
    bars,
    k,
    B_TOPK: gl.constexpr,
    NB: gl.constexpr,
    MAP: gl.constexpr,
    TMEM: gl.constexpr,
):
    """S of step k: Q's columns in shared memory, then those in tensor memory."""
    q_smem, k_smem = smem.q, smem.k
    EARLY: gl.constexpr = q_smem.shape[0]
    TILES: gl.constexpr = k_smem.shape[0]
    S = scores(tmem, MAP, TMEM, B_TOPK)
    wait_for_step(bars.k_p0_ready, k, NB)
    wait_for_step(bars.p_free, k - 1, NB)
    # Opaque: else the descriptors of all tiles would be kept in registers over the steps.
    for g in gl.static_range(EARLY):
        here = opaque_zero() + g
        tcgen05_mma(q_smem.index(here), k_smem.index(here).permute((1, 0)), S, use_acc=g > 0)
    tcgen05_commit(bars.qk_ss_done.index(k % NB))
    wait_for_step(bars.k_p1_ready, k, NB)
    for g in gl.static_range(EARLY, TILES):
        q = query(tmem, g - EARLY, q_smem.dtype, MAP, TMEM)
        tcgen05_mma(q, k_smem.index(opaque_zero() + g).permute((1, 0)), S)
    tcgen05_commit(bars.qk_ts_done.index(k % NB))


@gluon.jit
def multiply_sv_half(p_smem, v_smem, O, ready, done, k, HALF: gl.constexpr, NB: gl.constexpr):
    """Half the keys of step k: all atoms of columns."""
    ATOMS: gl.constexpr = v_smem.shape[0] // 2
    KEYS: gl.constexpr = v_smem.shape[1]
    weights = p_smem.slice(HALF * KEYS, KEYS, dim=1)
    wait_for_step(ready, k, NB)
    for atom in gl.static_range(ATOMS):
        tile = v_smem.index(opaque_zero() + (ATOMS * HALF + atom))
        tcgen05_mma(weights, tile, O[atom], use_acc=(k > 0) | (HALF > 0))
    tcgen05_commit(done.index(k % NB))


@gluon.jit
def mma(
    smem,
    tmem,
    bars,
    steps,
    B_TOPK: gl.constexpr,
    NB: gl.constexpr,
    MAP: gl.constexpr,
    TMEM: gl.constexpr,
    WORDS: gl.constexpr,
):
    """The mma partition: every product of the token. V of a step comes with K of the next, so the
    loop has one iteration more than there are steps."""
    GROUPS: gl.constexpr = smem.k.shape[0] - smem.q.shape[0]
    mbarrier.wait(bars.q_ready.index(0), 0)
    cp_q_from_smem_to_tmem(smem, tmem, GROUPS, WORDS, MAP, TMEM)
    tcgen05_commit(bars.q_copied.index(0))
    O = (output(tmem, 0, MAP, TMEM), output(tmem, 1, MAP, TMEM))
    for k in range(0, steps + 1):
        if k < steps:
            multiply_qk(smem, tmem, bars, k, B_TOPK, NB, MAP, TMEM)
        if k > 0:
            wait_for_step(bars.so_ready, k - 1, NB)
            multiply_sv_half(smem.p, smem.v, O, bars.v_p0_ready, bars.sv_p0_done, k - 1, 0, NB)
            multiply_sv_half(smem.p, smem.v, O, bars.v_p1_ready, bars.sv_p1_done, k - 1, 1, NB)
