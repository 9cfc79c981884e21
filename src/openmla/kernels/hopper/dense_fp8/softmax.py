"""What FP8 adds to the online softmax of dense/softmax.py: scales, and weights that e4m3 can hold.

e4m3 reaches from 2^-9 to 448. With FP8 values the reference of a row is therefore OFFSET below its
maximum, and moves when the maximum has grown by THRESHOLD: weights lie below 2^(4 + 4) = 256, and
keep three bits down to 2^-10 of the largest, or better.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.scores import MINUS_INF, opaque_zero
from openmla.kernels.hopper.dense.softmax import quad_sums, softmax_first, softmax_step
from openmla.planning.hopper.dense_fp8 import FP8_RESCALE_THRESHOLD

OFFSET = gl.constexpr(4.0)
THRESHOLD = gl.constexpr(FP8_RESCALE_THRESHOLD)


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
def first_weights(S, factor, BN: gl.constexpr, DTYPE: gl.constexpr):
    """As softmax_first, for weights of V's type."""
    if gl.float8e4nv == DTYPE:
        row_max = gl.max(S, 1) * factor - OFFSET
        shift = gl.where(row_max == MINUS_INF, 0.0, row_max)
        P = gl.exp2(S * factor - shift[:, None])
        return P, row_max, quad_sums(P, BN)
    else:
        return softmax_first(S, factor, BN)


@gluon.jit
def next_weights(
    S, row_max, row_sum, factor, MASKED: gl.constexpr, BN: gl.constexpr, DTYPE: gl.constexpr
):
    """As softmax_step, for weights of V's type."""
    if gl.float8e4nv == DTYPE:
        highest = gl.max(S, 1) * factor - OFFSET
        new_max = gl.where(highest > row_max + THRESHOLD, highest, row_max)
        shift = new_max
        if MASKED:
            shift = gl.where(new_max == MINUS_INF, 0.0, new_max)
        rescale = gl.exp2(row_max - shift)
        P = gl.exp2(S * factor - shift[:, None])
        old = gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None]
        return P, new_max, row_sum * old + quad_sums(P, BN), rescale
    else:
        return softmax_step(S, row_max, row_sum, factor, MASKED, BN)
