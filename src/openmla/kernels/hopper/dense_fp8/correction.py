"""Weights of a block once more, of rows whose reference has become too low.

softmax.py weighs a block with the reference of the blocks before it. How far the scores of a row
have grown beyond that shows in the sums of its weights: when one of a thread is above MOST_SUM, a
warp branches to weights with the row's maximum as the reference. All of the branch is assembly,
since Gluon has no branches of a warp, and no other way around 64 maxima and as many exponentials.
It changes rows by their own scores alone, so that their bits do not depend on other rows.

MOST_SUM is what the type of the weights holds, 448 of e4m3: then no weight has been cut off. Equal
weights of e4m3, 32 of a thread with the largest at 2^FP8_OFFSET, add up to 256 of it.
"""

import itertools
import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.hopper.dense_fp8.words import word_layout, word_parts
from openmla.planning.hopper.dense_fp8 import FP8_OFFSET, FP8_SHIFT, MOST_SUM


def _correction(words: int, dtype: str) -> tuple[str, str]:
    """Assembly of `correct` for a thread with so many words, of two rows in turn, and its types.

    Outputs: words; row_max of both rows, their sums, and what is not used. Inputs: what the words
    are joined of, the first scores of each, the second …, and its row's sum, row_max and factor.
    """
    of_word, convert, above, most = {
        "bf16": (2, "cvt.rn.bf16x2.f32", 0.0, MOST_SUM[2]),
        "fp16": (2, "cvt.rn.f16x2.f32", 0.0, MOST_SUM[2]),
        "fp8e4nv": (4, "cvt.rn.f16x2.f32", FP8_SHIFT - FP8_OFFSET, MOST_SUM[1] * 2.0**-FP8_SHIFT),
    }[dtype]
    limit, offset = (struct.pack(">f", x).hex() for x in (most, above))
    of = of_word // 2
    lists = [[f"${i * words + j}" for j in range(words)] for i in range(2 + of + of_word + 3)]
    (out, rest), given, scores = lists[:2], lists[2 : 2 + of], lists[2 + of : -3]
    sums, old, factor = (x[:2] for x in lists[-3:])
    join = "mov.b32 {}, {}" if of == 1 else "prmt.b32 {}, {}, {}, 0x7531"
    text = [join.format(*each) for each in zip(out, *given, strict=True)]
    text += [f"mov.f32 {a}, {b}" for a, b in zip(rest, [*old, *sums] * (words // 4), strict=True)]
    text += [f"setp.gt.f32 p, {sums[0]}, 0f{limit}", f"setp.gt.or.f32 p, {sums[1]}, 0f{limit}, p"]
    text += ["vote.sync.any.pred p, p, -1", "@!p bra.uni DONE"]
    for row in range(2):  # only a row whose own sums are too large: no other row is in its bits
        text += [f"mov.f32 s, {sums[row]}", "mov.f32 m, 0fFF800000"]
        text += [f"max.f32 m, m, {part[i]}" for part in scores for i in range(row, words, 2)]
        for lanes, x in itertools.product((1, 2), "sm"):
            text += [f"shfl.sync.bfly.b32 x0, {x}, {lanes}, 31, -1", f"max.f32 {x}, {x}, x0"]
        text += [f"setp.gt.f32 p, s, 0f{limit}", "mov.f32 s, 0f00000000"]
        text += [f"fma.rn.f32 m, m, {factor[row]}, 0f{offset}", f"max.f32 m, m, {old[row]}"]
        text += [f"@p mov.f32 {rest[row]}, m", "neg.f32 m, m"]
        for i in range(row, words, 2):
            for j, part in enumerate(scores):
                text += [f"fma.rn.f32 x{j}, {part[i]}, {factor[row]}, m"]
                text += [f"ex2.approx.ftz.f32 x{j}, x{j}", f"add.f32 s, s, x{j}"]
            if of_word == 2:
                text += [f"@p {convert} {out[i]}, x1, x0"]
            else:
                text += [f"{convert} h0, x1, x0", f"{convert} h1, x3, x2"]
                text += [f"mad.lo.u32 {h}, {h}, 2, 8388736" for h in ("h0", "h1")]
                text += [f"@p prmt.b32 {out[i]}, h0, h1, 0x7531"]
        text += [f"@p mov.f32 {rest[2 + row]}, s"]
    registers = ".reg .pred p; .reg .f32 m, s, x0, x1, x2, x3; .reg .b32 h0, h1; "
    kinds = [k for k, n in (("=r", 1), ("=f", 1), ("r", of), ("f", of_word + 3)) for _ in range(n)]
    kinds = [kind for kind in kinds for _ in range(words)]
    return "{ " + registers + "; ".join(text) + "; DONE: }", ",".join(kinds)


CORRECTIONS = gl.constexpr(
    {
        (dtype, words): _correction(words, dtype)
        for dtype in ("bf16", "fp16", "fp8e4nv")
        for words in (4, 8, 16, 32)
    }
)


@gluon.constexpr_function
def chosen(corrections, dtype, words):
    """Assembly and types for a thread with so many words of that type."""
    return corrections[dtype.name, words]


@gluon.jit
def per_word(x, words):
    """[64, 4] for words [64, words, 4]."""
    ROWS: gl.constexpr = gl.SliceLayout(1, words.type.layout)
    return gl.convert_layout(x, ROWS, assert_trivial=True)[:, None, :]


@gluon.jit
def correct(weights, S, sums, row_max, factor, PER_ROW: gl.constexpr, DTYPE: gl.constexpr):
    """(words, sums, row_max) of a block that `weigh` weighed, again where a sum is too large."""
    parts = word_parts(S, DTYPE)
    SHAPE: gl.constexpr = parts[0].shape
    WL: gl.constexpr = weights[0].type.layout
    L: gl.constexpr = word_layout(SHAPE[1])
    QL: gl.constexpr = row_max.type.layout
    given = gl.convert_layout(gl.reshape(weights[0], SHAPE), L, assert_trivial=True)
    if PER_ROW:
        by = per_word(factor, given)
    else:
        by = gl.full([64, 1, 4], 0.0, gl.float32, L) + factor
    given, total = gl.broadcast(given, per_word(sums, given))
    given, old = gl.broadcast(given, per_word(row_max, given))
    given, by = gl.broadcast(given, by)
    WORDS: gl.constexpr = 2 * SHAPE[1]  # of a thread
    ASM: gl.constexpr = chosen(CORRECTIONS, DTYPE, WORDS)
    arguments = (given,)
    if len(weights) == 2:
        arguments += (gl.convert_layout(gl.reshape(weights[1], SHAPE), L, assert_trivial=True),)
    for i in gl.static_range(len(parts)):
        arguments += (gl.convert_layout(parts[i], L, assert_trivial=True),)
    arguments += (total, old, by)
    new, rest = gl.inline_asm_elementwise(
        ASM[0], ASM[1], arguments, dtype=(gl.int32, gl.float32), is_pure=True, pack=WORDS
    )
    found, again = first_two(rest)
    return (
        gl.convert_layout(gl.reshape(new, weights[0].shape), WL, assert_trivial=True),
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
