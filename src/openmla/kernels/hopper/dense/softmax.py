"""Online softmax of 64 rows in one warp-group, in log2 units.

Per row, with s the scores times factor (= scale * log2 e):

| state | meaning | before the first key |
|---|---|---|
| row_max | reference maximum: at most THRESHOLD below the true one | -inf |
| row_sum | sum(exp2(s - row_max)), four partial sums, one per thread of a quad | 0 |
| O | sum(exp2(s - row_max) * v), not yet multiplied by `rescale` | 0 |
| rescale | what O must be multiplied by before the next product | 1 |

The reference moves only when the maximum grew by more than THRESHOLD, because multiplying O costs
more than it looks: it waits for the product in flight. Weights then reach 2^8 instead of 1, which
every dtype holds, and the sums are the same up to rounding.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.scores import MINUS_INF, SELECT
from openmla.kernels.hopper.accumulator import quad_sums
from openmla.kernels.hopper.dense.plan import RESCALE_THRESHOLD

THRESHOLD = gl.constexpr(RESCALE_THRESHOLD)


@gluon.jit
def softmax_first(S, factor, BN: gl.constexpr):
    """P, row_max, row_sum after the first block. A row that sees nothing is shifted by 0, not by
    -inf.
    """
    row_max = gl.max(S, 1) * factor
    shift = gl.where(row_max == MINUS_INF, 0.0, row_max)
    P = gl.exp2(S * factor - shift[:, None])
    return P, row_max, quad_sums(P, BN)


@gluon.jit
def softmax_step(S, row_max, row_sum, factor, MASKED: gl.constexpr, BN: gl.constexpr):
    """P, row_max, row_sum, rescale after one more block. Only a masked one leaves rows empty."""
    highest = gl.max(S, 1) * factor
    new_max = gl.where(highest > row_max + THRESHOLD, highest, row_max)
    shift = new_max
    if MASKED:
        shift = gl.where(new_max == MINUS_INF, 0.0, new_max)
    rescale = gl.exp2(row_max - shift)
    P = gl.exp2(S * factor - shift[:, None])
    old = gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None]
    return P, new_max, row_sum * old + quad_sums(P, BN), rescale


# In assembly, because LLVM would gather the comparisons of a whole row in integers: half as many
# instructions again as the rest of the block.
BELOW = gl.constexpr("{ .reg .pred p; setp.lt.s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }")
BETWEEN = gl.constexpr(
    "{ .reg .pred p; setp.lt.s32 p, $2, $3; setp.ge.or.s32 p, $2, $4, p; "
    "selp.f32 $0, 0fFF800000, $1, p; }"
)


@gluon.jit
def hide(S, seen, keys, CAUSAL: gl.constexpr, since=None):
    """S below min(seen + row, keys) if causal, else below keys, and from since + row on if there is
    a `since`; -inf in the other columns.

    A thread's columns are 8j + 2t and 8j + 2t + 1 in a quad's thread t: limits are lowered by 2t,
    and columns are then the same constants in every thread.
    """
    SL: gl.constexpr = S.type.layout
    BN: gl.constexpr = S.shape[1]
    scores = gl.reshape(S, [64, BN // 8, 4, 2])
    L: gl.constexpr = scores.type.layout
    RL: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    JL: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    TL: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L)))
    PL: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    limit = gl.full([64], 0, gl.int32, RL) + keys
    if CAUSAL:
        limit = gl.minimum(gl.arange(0, 64, RL) + seen, keys)
    limit = limit[:, None, None, None]
    lower = (2 * gl.arange(0, 4, TL))[None, None, :, None]
    limit = limit - lower
    column = (8 * gl.arange(0, BN // 8, JL))[None, :, None, None]
    column = column + gl.arange(0, 2, PL)[None, None, None, :]
    scores, column = gl.broadcast(scores, column)
    scores, limit = gl.broadcast(scores, limit)
    if since is None:
        kept = gl.inline_asm_elementwise(
            BELOW, "=f,f,r,r", [scores, column, limit], dtype=gl.float32, is_pure=True, pack=1
        )
    else:
        first = (gl.arange(0, 64, RL) + since)[:, None, None, None] - lower
        scores, first = gl.broadcast(scores, first)
        kept = gl.inline_asm_elementwise(
            BETWEEN,
            "=f,f,r,r,r",
            [scores, column, first, limit],
            dtype=gl.float32,
            is_pure=True,
            pack=1,
        )
    return gl.convert_layout(gl.reshape(kept, [64, BN]), SL)


@gluon.jit
def load_words(tile, S):
    """A row's words of bits for the columns of S, one bit each.

    Shifted so that a thread's columns, 8j + 2t and 8j + 2t + 1 in a quad's thread t, have the same
    bits 8j and 8j + 1 in every thread: constants, tested in one instruction.
    """
    BN: gl.constexpr = S.shape[1]
    L: gl.constexpr = gl.reshape(S, [64, BN // 32, 4, 4, 2]).type.layout
    WL: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(2, gl.SliceLayout(4, L)))
    TL: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, L))))
    words = tile.slice(0, BN // 32, 1).load(WL)
    thread = gl.arange(0, 4, TL)
    return words[:, :, None] >> (2 * thread)[None, None, :]


@gluon.jit
def keep_bits(S, words):
    """S where the bit is set (words as `load_words` gives them), else -inf."""
    SL: gl.constexpr = S.type.layout
    BN: gl.constexpr = S.shape[1]
    scores = gl.reshape(S, [64, BN // 32, 4, 4, 2])
    L: gl.constexpr = scores.type.layout
    JL: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, L))))
    PL: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    eights = (8 * gl.arange(0, 4, JL))[None, None, :, None, None]
    bit = 1 << (eights + gl.arange(0, 2, PL)[None, None, None, None, :])
    scores, words = gl.broadcast(scores, words[:, :, None, :, None])
    scores, bit = gl.broadcast(scores, bit)
    kept = gl.inline_asm_elementwise(
        SELECT, "=f,f,r,r", [scores, words, bit], dtype=gl.float32, is_pure=True, pack=1
    )
    return gl.convert_layout(gl.reshape(kept, [64, BN]), SL)


@gluon.jit
def pack(P, BN: gl.constexpr, DTYPE: gl.constexpr):
    """fp32 [64, BN] to int32 [64, BN / 2]: a 16-bit tensor carried by a loop would take a register
    per element."""
    low, high = gl.split(gl.reshape(P, [64, BN // 2, 2]))
    if gl.bfloat16 == DTYPE:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;",
            "=r,f,f",
            [low, high],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;",
            "=r,f,f",
            [low, high],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )


@gluon.jit
def unpack(words, BN: gl.constexpr, DTYPE: gl.constexpr, PL: gl.constexpr):
    """The inverse of `pack`, in the layout PL of the left operand of a product."""
    if gl.bfloat16 == DTYPE:
        low, high = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;",
            "=h,=h,r",
            [words],
            dtype=(gl.bfloat16, gl.bfloat16),
            is_pure=True,
            pack=1,
        )
    else:
        low, high = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2; // f16",
            "=h,=h,r",
            [words],
            dtype=(gl.float16, gl.float16),
            is_pure=True,
            pack=1,
        )
    return gl.convert_layout(gl.reshape(gl.join(low, high), [64, BN]), PL)


@gluon.jit
def keep_before(row_sum):
    """Use `row_sum` (never negative) so that ptxas cannot move the exponentials that made it after
    the wait that follows: a store that never happens, to an address that does not matter."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a; mov.b32 a, 0; setp.lt.f32 p, $1, 0f00000000; "
        "@p st.shared.f32 [a], $1; mov.b32 $0, $1; }",
        "=f,f,~{memory}",
        [row_sum],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )
