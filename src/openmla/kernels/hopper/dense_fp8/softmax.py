"""What FP8 adds to the online softmax of dense/softmax.py: scales, and a reference that no
exponential waits for.

Weights are 2^(S * factor - row_max); `factor` is a number, or with q_scale one of each row. What
belongs to a row is kept as every thread of a quad has it, [64, 4], as `quad_sums` are.

A block is weighed with the reference of the blocks before it (`weigh`). Its own maximum would take
a quarter of the instructions of a step, and all exponentials would wait for it. Where weights are
too large for their type, which shows in their sums, correction.py weighs again.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.scores import MINUS_INF, opaque_zero
from openmla.kernels.hopper.accumulator import (
    RESCALE_32,
    RESCALE_32_TYPES,
    RESCALE_64,
    RESCALE_64_TYPES,
    quad_sums,
)
from openmla.kernels.hopper.dense.softmax import pack

# row_max before the first key: unlike -inf it can be subtracted from a hidden score.
LOWEST = gl.constexpr(-1e38)
LEAST_FACTOR = gl.constexpr(2.0**-126)


@gluon.jit
def by_quads(x, SL: gl.constexpr):
    """A value of each row, as every thread of a quad has it: [64] to [64, 4]. SL: layout of S."""
    BN: gl.constexpr = SL.instr_shape[1]
    none = quad_sums(gl.zeros([64, BN], gl.float32, SL), BN)
    return gl.convert_layout(x, gl.SliceLayout(1, none.type.layout))[:, None] + none


@gluon.jit
def row_factors(q_scale_ptr, tile, factor, WHO: gl.constexpr, SL: gl.constexpr):
    """What the scores of a consumer's 64 rows are multiplied by: factor, times q_scale without its
    sign, which is in Q (products.py); never 0. tile: OutputTile."""
    if q_scale_ptr is None:
        return factor
    else:
        row = gl.arange(0, 64, gl.SliceLayout(1, SL)) + (opaque_zero() + WHO * 64)
        q_scale = gl.load(q_scale_ptr + (tile.token + row), mask=row < tile.rows, other=0.0)
        found = gl.abs(q_scale) * factor
        return by_quads(gl.where(found > LEAST_FACTOR, found, LEAST_FACTOR), SL)


@gluon.jit
def key_scales(scales, stage, SL: gl.constexpr):
    """What the scores of a block are multiplied by: [1, BN], or 1 where keys have no scales."""
    if scales is not None:
        return scales.index(stage).load(gl.SliceLayout(0, SL))[None, :]
    else:
        return 1.0


@gluon.jit
def first_reference(S, factor):
    """row_max of a first block; LOWEST where a row sees nothing."""
    SL: gl.constexpr = S.type.layout
    return gl.maximum(by_quads(gl.max(S, 1), SL) * factor, LOWEST)


@gluon.jit
def per_score(x, scores):
    """Expand [64, 4] to scores [64, eights, 4, 2]."""
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, scores.type.layout))
    return gl.convert_layout(x, ROWS, assert_trivial=True)[:, None, :, None]


@gluon.jit
def weigh(S, row_max, factor, PER_ROW: gl.constexpr, DTYPE: gl.constexpr):
    """(packed weights, their sums) of a block, with the reference of the blocks before it."""
    BN: gl.constexpr = S.shape[1]
    scores = gl.reshape(S, [64, BN // 8, 4, 2])
    by = factor
    if PER_ROW:
        by = per_score(factor, scores)
    P = gl.exp2(scores * by - per_score(row_max, scores))
    sums = gl.convert_layout(gl.sum(gl.sum(P, 3), 1), row_max.type.layout, assert_trivial=True)
    return pack(gl.reshape(P, [64, BN]), BN, DTYPE), sums


@gluon.jit
def rescale_quads(O, rescale):  # noqa: E741
    """O times rescale [64, 4], row by row; nothing is multiplied where a warp's factors are 1."""
    OL: gl.constexpr = O.type.layout
    sums = gl.reshape(O, [64, O.shape[1] // 8, 4, 2])
    _sums, by = gl.broadcast(sums, per_score(rescale, sums))
    by = gl.convert_layout(gl.reshape(by, O.shape), OL, assert_trivial=True)
    if O.shape[1] == 64:
        return gl.inline_asm_elementwise(
            RESCALE_32, RESCALE_32_TYPES, [O, by], dtype=gl.float32, is_pure=True, pack=32
        )
    else:
        return gl.inline_asm_elementwise(
            RESCALE_64, RESCALE_64_TYPES, [O, by], dtype=gl.float32, is_pure=True, pack=64
        )


@gluon.jit
def masked_scores(S, seen, keys, CAUSAL: gl.constexpr):
    """Scores as `mask` of gluon/scores.py gives them. A column is a constant plus the thread's own
    two, so that a comparison is one instruction, and no column takes a register."""
    SL: gl.constexpr = S.type.layout
    BN: gl.constexpr = S.shape[1]
    scores = gl.reshape(S, [64, BN // 8, 4, 2])
    L: gl.constexpr = scores.type.layout
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    EIGHTS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    THREADS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L)))
    PAIRS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    rows = gl.arange(0, 64, ROWS)
    last = gl.minimum(rows * CAUSAL + (seen if CAUSAL else keys), keys)
    last = last[:, None, None, None] - 2 * gl.arange(0, 4, THREADS)[None, None, :, None]
    column = 8 * gl.arange(0, BN // 8, EIGHTS)[None, :, None, None]
    column = column + gl.arange(0, 2, PAIRS)[None, None, None, :]
    kept = gl.where(column < last, scores, MINUS_INF)
    return gl.convert_layout(gl.reshape(kept, [64, BN]), SL, assert_trivial=True)


@gluon.jit
def known_before(x):
    """x, which ptxas must know before the wait that follows: a store that never happens, since no
    arithmetic makes this NaN."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a, t; mov.b32 a, 0; mov.b32 t, $1; "
        "setp.eq.u32 p, t, 4290847557; @p st.shared.f32 [a], $1; mov.b32 $0, $1; }",
        "=f,f,~{memory}",
        [x],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )
