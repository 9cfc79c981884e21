"""What FP8 adds to the online softmax of dense/softmax.py: scales, and weights that e4m3 can hold.

A block's maximum and its exponentials are in two steps of kernel.py; from one to the next go its
`exponents`, S * factor - row_max, or S itself. `factor` is a number, or with q_scale one of a row.

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
# row_max before the first key: unlike -inf it can be subtracted from a hidden score.
LOWEST = gl.constexpr(-1e38)
LEAST_FACTOR = gl.constexpr(2.0**-126)


@gluon.jit
def fma_here(a, b, c):
    """a * b + c, where it stands: LLVM does not move it."""
    a, b = gl.broadcast(a, b)
    a, c = gl.broadcast(a, c)
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], dtype=gl.float32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def row_factors(q_scale_ptr, work, factor, WHO: gl.constexpr, SL: gl.constexpr):
    """What the scores of a consumer's 64 rows are multiplied by: factor, times q_scale without its
    sign, which is in Q (products.py); never 0."""
    if q_scale_ptr is None:
        return factor
    else:
        _head, token, rows, _part = work
        row = gl.arange(0, 64, gl.SliceLayout(1, SL)) + (opaque_zero() + WHO * 64)
        q_scale = gl.load(q_scale_ptr + (token + row), mask=row < rows, other=0.0)
        found = gl.abs(q_scale) * factor
        return gl.where(found > LEAST_FACTOR, found, LEAST_FACTOR)


@gluon.jit
def exponents(S, factor, row_max, PER_ROW: gl.constexpr):
    """S * factor - row_max; the factor is one number, or one of each row."""
    if PER_ROW:
        return S * factor[:, None] - row_max[:, None]
    else:
        return S * factor - row_max[:, None]


@gluon.jit
def times_keys(S, scales, stage, SCALED: gl.constexpr):
    """Scores times the scales of their keys, where there are any."""
    if SCALED:
        S = S * scales.index(stage).load(gl.SliceLayout(0, S.type.layout))[None, :]
    return S


@gluon.jit
def first_reference(S, factor, DTYPE: gl.constexpr):
    """row_max of a first block; LOWEST where a row sees nothing."""
    OFFSET: gl.constexpr = FP8_OFFSET if gl.float8e4nv == DTYPE else 0.0
    return gl.maximum(gl.max(S, 1) * factor - OFFSET, LOWEST)


@gluon.jit
def next_reference(S, row_max, factor, DTYPE: gl.constexpr):
    """(row_max, rescale) with one more block: see softmax_step."""
    OFFSET: gl.constexpr = FP8_OFFSET if gl.float8e4nv == DTYPE else 0.0
    LAG: gl.constexpr = FP8_THRESHOLD if gl.float8e4nv == DTYPE else THRESHOLD
    reached = gl.max(S, 1) * factor - OFFSET
    new_max = gl.where(reached > row_max + LAG, reached, row_max)
    return new_max, gl.exp2(row_max - new_max)


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
def exponents_here(S, factor, row_max, PER_ROW: gl.constexpr):
    """`exponents` where they stand: they leave the registers of S, which the next scores take."""
    if PER_ROW:
        by = factor[:, None]
    else:
        by = gl.full([64, 1], 0.0, gl.float32, S.type.layout) + factor
    return fma_here(S, by, -row_max[:, None])


@gluon.jit
def known_before(x):
    """x, which ptxas must know before what follows, a wait or a turn passed on: a store that never
    happens, since no arithmetic makes this NaN."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a, t; mov.b32 a, 0; mov.b32 t, $1; "
        "setp.eq.u32 p, t, 4290847557; @p st.shared.f32 [a], $1; mov.b32 $0, $1; }",
        "=f,f,~{memory}", [x], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip
