"""Which weights a block of scores has: of queries and keys, or transposed."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.scores import SELECT, opaque_zero

WORD_BITS = gl.constexpr(32)
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


@gluon.jit
def load_bits(mask, item, key, BN: gl.constexpr, SL: gl.constexpr, WHO: gl.constexpr):
    """Words of bits of a consumer's 64 queries for the keys from `key` on, as dense/softmax.py's
    `keep_bits` takes them: from global memory, under products in flight.

    mask: KeyMask, item: WorkItem, SL: the layout of the block's scores [64, BN]. Rows past the
    sequence and words past the mask have no bits.
    """
    like = gl.zeros([64, BN], gl.float32, SL)
    L: gl.constexpr = gl.reshape(like, [64, BN // 32, 4, 4, 2]).type.layout
    WL: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(2, gl.SliceLayout(4, L)))
    TL: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, L))))
    row = gl.arange(0, 64, gl.SliceLayout(1, WL)) + (opaque_zero() + WHO * 64)
    word = gl.arange(0, BN // WORD_BITS, gl.SliceLayout(0, WL)) + key // WORD_BITS
    first = mask.base + (item.token + row).to(gl.int64) * mask.stride
    here = (row < item.rows)[:, None] & (word < mask.words)[None, :]
    words = gl.load(first[:, None] + word[None, :], mask=here, other=0)
    return words[:, :, None] >> (2 * gl.arange(0, 4, TL))[None, None, :]


@gluon.jit
def keep_keys(S, tile, WHO: gl.constexpr):
    """Transposed scores [keys, queries] where a query's bit of the key is set, else -inf.

    tile: words [queries, 4] of the 128 keys of both consumers. A row of S has the same bit in all
    of its words, and a warp's rows are in the same word.
    """
    SL: gl.constexpr = S.type.layout
    BQ: gl.constexpr = S.shape[1]
    scores = gl.reshape(S, [2, WORD_BITS, BQ])
    L: gl.constexpr = scores.type.layout
    RL: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, L))
    words = tile.slice(2 * WHO, 2, dim=1).permute((1, 0)).load(gl.SliceLayout(1, L))
    bit = (1 << gl.arange(0, WORD_BITS, RL))[None, :, None]
    scores, words = gl.broadcast(scores, words[:, None, :])
    scores, bit = gl.broadcast(scores, bit)
    kept = gl.inline_asm_elementwise(
        SELECT, "=f,f,r,r", [scores, words, bit], dtype=gl.float32, is_pure=True, pack=1
    )
    return gl.convert_layout(gl.reshape(kept, [64, BQ]), SL)
