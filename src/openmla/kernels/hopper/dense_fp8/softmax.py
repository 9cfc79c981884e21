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
def exponentials(S, factor, shift):
    """exp2(S * factor - shift), and its sums per thread of a quad."""
    P = gl.exp2(S * factor - shift[:, None])
    return P, quad_sums(P, P.shape[1])


@gluon.jit
def first_weights(S, factor, DTYPE: gl.constexpr):
    """As softmax_first, for weights of V's type."""
    OFFSET: gl.constexpr = FP8_OFFSET if gl.float8e4nv == DTYPE else 0.0
    row_max = gl.max(S, 1) * factor - OFFSET
    shift = gl.where(row_max == MINUS_INF, 0.0, row_max)
    P, row_sum = exponentials(S, factor, shift)
    return P, row_max, row_sum


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
def next_weights(S, row_sum, factor, shift, rescale):
    """(P, row_sum) of one more block."""
    P, sums = exponentials(S, factor, shift)
    old = gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None]
    return P, row_sum * old + sums
