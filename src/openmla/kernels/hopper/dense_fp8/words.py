"""FP8 weights as words of four.

A tensor of 8-bit values that a loop carries would take a register per value, so weights are carried
as int32 and become e4m3 where a product takes them, which costs no instruction.

wgmma leaves column 8 g + 2 t + e of the scores (g: 0, 1, …; e: 0, 1) with thread t of a quad, and
takes columns 4 t … 4 t + 3 of every 16 from it as an FP8 left operand. Instead of exchanging
weights between threads, every 16 keys are taken in another order, in which both are the same:

    place of key 8 g + 2 t + e (g: 0, 1) is 4 t + 2 g + e

V must have its keys in that order too: transpose.py puts them there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.hopper.dense.softmax import pack, unpack


@gluon.jit
def bytes_of(words):
    """The four e4m3 of every word, lowest first."""
    a = words.to(gl.int8).to(gl.float8e4nv, bitcast=True)
    b = (words >> 8).to(gl.int8).to(gl.float8e4nv, bitcast=True)
    c = (words >> 16).to(gl.int8).to(gl.float8e4nv, bitcast=True)
    d = (words >> 24).to(gl.int8).to(gl.float8e4nv, bitcast=True)
    return gl.join(gl.join(a, c), gl.join(b, d))


@gluon.constexpr_function
def word_layout(words):
    """Of [64, words, 4]: a thread has words of two rows, 8 apart, in turn."""
    along = [[0, 1 << bit, 0] for bit in range(words.bit_length() - 1)]
    lanes = [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(
        [[8, 0, 0], *along], lanes, [[16, 0, 0], [32, 0, 0]], [], [64, words, 4]
    )


@gluon.jit
def word_parts(P, DTYPE: gl.constexpr):
    """[64, BN] as what the words of `pack_weights` are made of, two or four of [64, words, 4]."""
    BN: gl.constexpr = P.shape[1]
    if gl.float8e4nv == DTYPE:
        order = gl.permute(gl.reshape(P, [64, BN // 16, 2, 4, 2]), (0, 1, 3, 4, 2))
        first, second = gl.split(order)
        a, b = gl.split(first)
        c, d = gl.split(second)
        return a, b, c, d
    else:
        return gl.split(gl.reshape(P, [64, BN // 8, 4, 2]))


@gluon.jit
def rounded(P, DTYPE: gl.constexpr):
    """fp32 [64, BN] as what `joined_words` takes: words of two 16-bit weights, or two of each word
    of four e4m3.

    e4m3 of 2^8 times what is given, at most 1.75: as fp16 its bits are then those of e4m3 and seven
    more. Rounded and doubled, the upper byte of each half is e4m3. Hopper's own conversion is slow.
    """
    if gl.float8e4nv == DTYPE:
        a, b, c, d = word_parts(P, DTYPE)
        return _pair(a, b), _pair(c, d)
    else:
        return (pack(P, P.shape[1], DTYPE),)


@gluon.jit
def _pair(low, high):
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; cvt.rn.f16x2.f32 t, $2, $1; mad.lo.u32 $0, t, 2, 8388736; }",
        "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def joined_words(parts):
    """Words of what `rounded` gives."""
    if len(parts) == 1:
        return parts[0]
    else:
        return gl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7531;", "=r,r,r", [parts[0], parts[1]], dtype=gl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip


@gluon.jit
def unpack_weights(words, BN: gl.constexpr, DTYPE: gl.constexpr, PL: gl.constexpr):
    """The way back, as the left operand of a product."""
    if gl.float8e4nv == DTYPE:
        return gl.convert_layout(gl.reshape(bytes_of(words), [64, BN]), PL)
    else:
        return unpack(words, BN, DTYPE, PL)
