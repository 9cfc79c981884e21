"""Which weights a block of transposed scores has."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# In assembly, because LLVM would gather the comparisons of a whole row in integers, as for BELOW in
# dense/softmax.py.
FROM = gl.constexpr("{ .reg .pred p; setp.lt.s32 p, $2, $3; selp.f32 $0, 0fFF800000, $1, p; }")


@gluon.jit
def hide_before(S, first):
    """Transposed scores [keys, queries]: row r keeps columns from first + r on; -inf in the others.

    A thread's columns are 8j + 2t and 8j + 2t + 1 in a quad's thread t: limits are lowered by 2t,
    and columns are then the same constants in every thread.
    """
    SL: gl.constexpr = S.type.layout
    BQ: gl.constexpr = S.shape[1]
    scores = gl.reshape(S, [64, BQ // 8, 4, 2])
    L: gl.constexpr = scores.type.layout
    RL: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    JL: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    TL: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L)))
    PL: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    limit = (gl.arange(0, 64, RL) + first)[:, None, None, None]
    limit = limit - (2 * gl.arange(0, 4, TL))[None, None, :, None]
    column = (8 * gl.arange(0, BQ // 8, JL))[None, :, None, None]
    column = column + gl.arange(0, 2, PL)[None, None, None, :]
    scores, column = gl.broadcast(scores, column)
    scores, limit = gl.broadcast(scores, limit)
    kept = gl.inline_asm_elementwise(
        FROM, "=f,f,r,r", [scores, column, limit], dtype=gl.float32, is_pure=True, pack=1
    )
    return gl.convert_layout(gl.reshape(kept, [64, BQ]), SL)
