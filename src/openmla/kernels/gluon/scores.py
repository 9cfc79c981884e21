"""From scores to weights and back: what every Gluon attention kernel does to a row of scores.

Scores are in raw units until they are multiplied by factor = scale * log2 e; `row_max`, the
reference maximum of a row, and `row_sum`, the sum of exp2(score - row_max), are in log2 units.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MINUS_INF = gl.constexpr(float("-inf"))
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
# A score where its bit is set, else -inf. In assembly, because LLVM would gather the tests of a
# whole row in integers.
SELECT = gl.constexpr(
    "{ .reg .pred p; .reg .b32 t; and.b32 t, $2, $3; setp.ne.b32 p, t, 0; "
    "selp.f32 $0, $1, 0fFF800000, p; }"
)


@gluon.jit
def opaque_zero():
    """A zero the compiler cannot see through.

    Indices made of it are computed where they are used, instead of being hoisted out of the loop
    into registers that are not there.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def signed(S, SIGN: gl.constexpr):
    """Scores as if scale were positive: negated for a negative scale, 0 for a vanishing one."""
    if SIGN < 0:
        S = -S
    elif SIGN == 0:
        S = gl.zeros_like(S)
    return S


@gluon.jit
def mask(S, seen, keys, CAUSAL: gl.constexpr):
    """Row r sees columns below min(seen + r, keys) if causal, else below keys."""
    SL: gl.constexpr = S.type.layout
    columns = gl.arange(0, S.shape[1], gl.SliceLayout(0, SL)) + opaque_zero()
    if CAUSAL:
        rows = gl.arange(0, S.shape[0], gl.SliceLayout(1, SL))
        last = gl.minimum(rows + seen, keys)
        return gl.where(columns[None, :] < last[:, None], S, MINUS_INF)
    else:
        return gl.where((columns < keys)[None, :], S, MINUS_INF)


@gluon.jit
def normalize(row_max, row_sum, sink_ptr, head):
    """(1 / denominator, lse, whether the row saw no key) per row. The sink is not in the lse."""
    empty = row_sum == 0.0
    sum_or_one = gl.where(empty, 1.0, row_sum)
    lse = gl.where(empty, MINUS_INF, (row_max + gl.log2(sum_or_one)) * LN_2)
    denominator = sum_or_one
    if sink_ptr is not None:
        shift = gl.where(empty, 0.0, row_max)
        denominator = sum_or_one + gl.exp2(gl.load(sink_ptr + head) * LOG2_E - shift)
    return 1.0 / denominator, lse, empty
