"""Weights of a block computed again, for rows whose reference has become too low.

softmax.py weighs a block with the reference of the blocks before it. How far the scores of a row
have grown beyond that shows in the sums of its weights: when one of a thread is above MOST_SUM,
which fp16 holds, a warp branches to weights with the row's maximum as the reference. All of it is
assembly, because Gluon has no branches of a warp. It changes rows by their own scores alone, so
that their bits do not depend on other rows.
"""

import itertools
import struct
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.hopper.dense_fp8.plan import MOST_SUM


class Assembly(NamedTuple):
    """Inline assembly."""

    text: str
    constraints: str


def _correction(words: int, dtype: str) -> Assembly:
    """Assembly of `correct` for a thread with so many words, of two rows in turn.

    Outputs: words; row_max of both rows, their sums, and what is not used. Inputs: words, the left
    and the right score of each, and its row's sum, row_max and factor.
    """
    limit = struct.pack(">f", MOST_SUM).hex()
    lists = [[f"${i * words + j}" for j in range(words)] for i in range(8)]
    out, rest, given, left, right = lists[:5]
    sums, old, factor = (x[:2] for x in lists[5:])
    text = [f"mov.b32 {a}, {b}" for a, b in zip(out, given, strict=True)]
    text += [f"mov.f32 {a}, {b}" for a, b in zip(rest, [*old, *sums] * (words // 4), strict=True)]
    text += [f"setp.gt.f32 p, {sums[0]}, 0f{limit}", f"setp.gt.or.f32 p, {sums[1]}, 0f{limit}, p"]
    text += ["vote.sync.any.pred p, p, -1", "@!p bra.uni DONE"]
    for row in range(2):
        text += [f"mov.f32 s, {sums[row]}", "mov.f32 m, 0fFF800000"]
        text += [f"max.f32 m, m, {x}" for part in (left, right) for x in part[row::2]]
        for lanes, x in itertools.product((1, 2), "sm"):
            text += [f"shfl.sync.bfly.b32 x, {x}, {lanes}, 31, -1", f"max.f32 {x}, {x}, x"]
        text += [f"setp.gt.f32 p, s, 0f{limit}", "mov.f32 s, 0f00000000"]
        text += [f"mul.f32 m, m, {factor[row]}", f"max.f32 m, m, {old[row]}"]
        text += [f"@p mov.f32 {rest[row]}, m", "neg.f32 m, m"]
        for i in range(row, words, 2):
            for name, score in (("x", left[i]), ("y", right[i])):
                text += [f"fma.rn.f32 {name}, {score}, {factor[row]}, m"]
                text += [f"ex2.approx.ftz.f32 {name}, {name}", f"add.f32 s, s, {name}"]
            text += [f"@p cvt.rn.{dtype}x2.f32 {out[i]}, y, x"]
        text += [f"@p mov.f32 {rest[2 + row]}, s"]
    kinds = ["=r", "=f", "r", *["f"] * 5]
    types = ",".join(kind for kind in kinds for _ in range(words))
    return Assembly("{ .reg .pred p; .reg .f32 m, s, x, y; " + "; ".join(text) + "; DONE: }", types)


# By the type of the weights and the words of a thread: a block of 128, 64 or 32 keys.
CORRECTIONS = gl.constexpr(
    {
        (n, words): _correction(words, asm)
        for n, asm in (("bf16", "bf16"), ("fp16", "f16"))
        for words in (8, 16, 32)
    }
)


@gluon.constexpr_function
def chosen(corrections, dtype, words):
    """The Assembly for a thread with so many words of that type."""
    return corrections[dtype.name, words]


@gluon.constexpr_function
def word_layout(words):
    """Layout of [64, words, 4]: a thread has words of two rows, 8 apart, in turn."""
    along = [[0, 1 << bit, 0] for bit in range(words.bit_length() - 1)]
    lanes = [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(
        [[8, 0, 0], *along], lanes, [[16, 0, 0], [32, 0, 0]], [], [64, words, 4]
    )


@gluon.jit
def per_word(x, words):
    """Expand [64, 4] to words [64, words, 4]."""
    ROWS: gl.constexpr = gl.SliceLayout(1, words.type.layout)
    return gl.convert_layout(x, ROWS, assert_trivial=True)[:, None, :]


@gluon.jit
def correct(words, S, sums, row_max, factor, PER_ROW: gl.constexpr, DTYPE: gl.constexpr):
    """(words, sums, row_max) of a block, from those of `weigh`.

    Rows with a sum above MOST_SUM repeat exp2 with their true maximum; the others stay as they are.
    """
    EIGHTS: gl.constexpr = S.shape[1] // 8
    L: gl.constexpr = word_layout(EIGHTS)
    WL: gl.constexpr = words.type.layout
    QL: gl.constexpr = row_max.type.layout
    given = gl.convert_layout(gl.reshape(words, [64, EIGHTS, 4]), L, assert_trivial=True)
    left, right = gl.split(gl.reshape(S, [64, EIGHTS, 4, 2]))
    left = gl.convert_layout(left, L, assert_trivial=True)
    right = gl.convert_layout(right, L, assert_trivial=True)
    if PER_ROW:
        by = per_word(factor, given)
    else:
        by = gl.full([64, 1, 4], 0.0, gl.float32, L) + factor
    given, total = gl.broadcast(given, per_word(sums, given))
    given, old = gl.broadcast(given, per_word(row_max, given))
    given, by = gl.broadcast(given, by)
    WORDS: gl.constexpr = 2 * EIGHTS  # of a thread
    ASM: gl.constexpr = chosen(CORRECTIONS, DTYPE, WORDS)
    new, rest = gl.inline_asm_elementwise(
        ASM.text,
        ASM.constraints,
        [given, left, right, total, old, by],
        dtype=(gl.int32, gl.float32),
        is_pure=True,
        pack=WORDS,
    )
    found, again = first_two(rest)
    return (
        gl.convert_layout(gl.reshape(new, words.shape), WL, assert_trivial=True),
        gl.convert_layout(again, QL, assert_trivial=True),
        gl.convert_layout(found, QL, assert_trivial=True),
    )


@gluon.jit
def first_two(x):
    """x[:, 0] and x[:, 1] of [64, words, 4], which are in registers of the same thread."""
    HALF: gl.constexpr = x.shape[1] // 2
    if HALF > 1:
        first, _rest = gl.split(gl.permute(gl.reshape(x, [64, 2, HALF, 4]), (0, 2, 3, 1)))
        return first_two(first)
    else:
        return gl.split(gl.permute(x, (0, 2, 1)))
