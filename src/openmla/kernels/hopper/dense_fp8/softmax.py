"""What FP8 adds to the online softmax of dense/softmax.py: scales, and weights that e4m3 can hold.

e4m3 reaches from 2^-9 to 448. With FP8 values the reference of a row is therefore FP8_OFFSET below
its maximum, and moves when the maximum has grown by FP8_THRESHOLD: weights lie below 2^(4 + 4) =
256, and keep three bits down to 2^-10 of the largest, or better.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.scores import MINUS_INF, opaque_zero
from openmla.kernels.hopper.dense.softmax import THRESHOLD, quad_sums
from openmla.planning.hopper.dense_fp8 import FP8_RESCALE_THRESHOLD

FP8_OFFSET = gl.constexpr(4.0)
FP8_THRESHOLD = gl.constexpr(FP8_RESCALE_THRESHOLD)


@gluon.jit
def row_scales(q_scale_ptr, work, factor, WHO: gl.constexpr, SL: gl.constexpr):
    """q_scale times factor of a consumer's 64 rows; 0 for rows that are not there."""
    _head, token, rows, _part = work
    row = gl.arange(0, 64, gl.SliceLayout(1, SL)) + (opaque_zero() + WHO * 64)
    return gl.load(q_scale_ptr + (token + row), mask=row < rows, other=0.0) * factor


@gluon.jit
def scaled(S, row_scale, s_smem, stage, Q_SCALED: gl.constexpr, K_SCALED: gl.constexpr):
    """Scores times the scales of their keys and of their rows, where there are any."""
    if K_SCALED:
        S = S * s_smem.index(stage).load(gl.SliceLayout(0, S.type.layout))[None, :]
    if Q_SCALED:
        S = S * row_scale[:, None]
    return S


@gluon.jit
def first_reference(S, factor, DTYPE: gl.constexpr):
    """(row_max, what exponents are shifted by) of a first block: as softmax_first."""
    OFFSET: gl.constexpr = FP8_OFFSET if gl.float8e4nv == DTYPE else 0.0
    row_max = gl.max(S, 1) * factor - OFFSET
    return row_max, gl.where(row_max == MINUS_INF, 0.0, row_max)


@gluon.jit
def next_reference(S, row_max, factor, MASKED: gl.constexpr, DTYPE: gl.constexpr):
    """(row_max, what exponents are shifted by, rescale) with one more block: see softmax_step."""
    OFFSET: gl.constexpr = FP8_OFFSET if gl.float8e4nv == DTYPE else 0.0
    LAG: gl.constexpr = FP8_THRESHOLD if gl.float8e4nv == DTYPE else THRESHOLD
    reached = gl.max(S, 1) * factor - OFFSET
    new_max = gl.where(reached > row_max + LAG, reached, row_max)
    shift = new_max
    if MASKED:
        shift = gl.where(new_max == MINUS_INF, 0.0, new_max)
    return new_max, shift, gl.exp2(row_max - shift)


@gluon.jit
def weights_of(X, row_sum, rescale):
    """(P, row_sum) from the exponents of one more block."""
    P = gl.exp2(X)
    old = gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None]
    return P, row_sum * old + quad_sums(P, P.shape[1])


@gluon.jit
def no_row_sums(X):
    """row_sum before the first block."""
    return quad_sums(gl.zeros_like(X), X.shape[1])


@gluon.jit
def keep_after(shift):
    """`shift`, made anew: what is computed with it stays after what came before."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,f", [shift], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def masked_scores(S, seen, keys, CAUSAL: gl.constexpr):
    """As `mask` of gluon/scores.py, where a column is a constant plus the thread's own two: then
    a comparison is one instruction, and no column takes a register."""
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
def exponents_here(S, factor, shift):
    """S * factor - shift"""
    S, shifts = gl.broadcast(S, -shift[:, None])
    factors = gl.full(S.shape, 0.0, gl.float32, S.type.layout) + factor
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [S, factors, shifts], dtype=gl.float32, is_pure=False, pack=1
    )
