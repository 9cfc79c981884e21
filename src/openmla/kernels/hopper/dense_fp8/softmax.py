"""What FP8 adds to the online softmax of dense/softmax.py: scales, weights that e4m3 can hold, and
references that no exponential waits for.

Weights are 2^(S * factor - row_max); `factor` is a number, or with q_scale one of each row. What
belongs to a row is kept as every thread of a quad has it, [64, 4], as `quad_sums` are.

A block is weighed with the reference of the blocks before it (`weigh`): its maximum costs a third
of the instructions of a step, and exponentials would wait for it. Weights that are too large for
the reference show in their sums, and a warp that sees one weighs again, now with the maximum
(`correct`). That is rare: sums of a thread may grow to MOST, 2^15 for weights of 16 bits.

e4m3 reaches from 2^-9 to 448. With FP8 values a reference is FP8_OFFSET below the maximum: the
largest weight is 8 or more, equal weights of a thread add up to 256 of the 448 that it may have,
and weights keep three bits down to 2^-9 of the largest, or better.
"""

import itertools
import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.scores import MINUS_INF, opaque_zero
from openmla.kernels.hopper.dense.softmax import (
    RESCALE_32,
    RESCALE_32_TYPES,
    RESCALE_64,
    RESCALE_64_TYPES,
    quad_sums,
)
from openmla.kernels.hopper.dense_fp8.words import pack_weights, word_layout, word_parts
from openmla.planning.hopper.dense_fp8 import FP8_OFFSET, MOST_SUM

OFFSET = gl.constexpr(FP8_OFFSET)
# row_max before the first key: unlike -inf it can be subtracted from a hidden score.
LOWEST = gl.constexpr(-1e38)
LEAST_FACTOR = gl.constexpr(2.0**-126)


@gluon.jit
def by_quads(x, SL: gl.constexpr):
    """A value of each row, as every thread of a quad has it: [64] to [64, 4]. SL: layout of S."""
    BN: gl.constexpr = SL.instr_shape[1]
    none = quad_sums(gl.zeros([64, BN], gl.float32, SL), BN)
    return gl.convert_layout(x, gl.SliceLayout(1, none.type.layout))[:, None] + none


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
        return by_quads(gl.where(found > LEAST_FACTOR, found, LEAST_FACTOR), SL)


@gluon.jit
def key_scales(scales, stage, SL: gl.constexpr, SCALED: gl.constexpr):
    """What the scores of a block are multiplied by: [1, BN], or 1."""
    if SCALED:
        return scales.index(stage).load(gl.SliceLayout(0, SL))[None, :]
    else:
        return 1.0


@gluon.jit
def first_reference(S, factor, DTYPE: gl.constexpr):
    """row_max of a first block; LOWEST where a row sees nothing."""
    BELOW: gl.constexpr = OFFSET if gl.float8e4nv == DTYPE else 0.0
    SL: gl.constexpr = S.type.layout
    highest = by_quads(gl.max(S, 1), SL)
    return gl.maximum(highest * factor - BELOW, LOWEST)


@gluon.jit
def per_score(x, scores):
    """[64, 4] for scores [64, eights, 4, 2]."""
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, scores.type.layout))
    return gl.convert_layout(x, ROWS, assert_trivial=True)[:, None, :, None]


@gluon.jit
def weigh(S, row_max, factor, PER_ROW: gl.constexpr, DTYPE: gl.constexpr):
    """(words, sums) of columns of a block, with the reference that is known."""
    BN: gl.constexpr = S.shape[1]
    scores = gl.reshape(S, [64, BN // 8, 4, 2])
    by = factor
    if PER_ROW:
        by = per_score(factor, scores)
    P = gl.exp2(scores * by - per_score(row_max, scores))
    sums = gl.convert_layout(gl.sum(gl.sum(P, 3), 1), row_max.type.layout, assert_trivial=True)
    return pack_weights(gl.reshape(P, [64, BN]), BN, DTYPE), sums


def _correction(words: int, dtype: str) -> tuple[str, str]:
    """Assembly of `correct` for a thread with so many words, of two rows in turn, and its types.

    Outputs: words; row_max of both rows, their sums, and what is not used. Inputs: words, the first
    scores of each, the second …, and for each word its row's sum, row_max and factor.
    """
    of_word, convert, below = {
        "bf16": (2, "cvt.rn.bf16x2.f32", 0.0),
        "fp16": (2, "cvt.rn.f16x2.f32", 0.0),
        "fp8e4nv": (4, "cvt.rn.satfinite.e4m3x2.f32", FP8_OFFSET),
    }[dtype]
    most, offset = (struct.pack(">f", x).hex() for x in (MOST_SUM[4 // of_word], -below))
    given, *scores = ([f"${(2 + i) * words + j}" for j in range(words)] for i in range(1 + of_word))
    sums, old, factor = ([f"${(3 + of_word + i) * words + j}" for j in range(2)] for i in range(3))
    out, rest = ([f"${i * words + j}" for j in range(words)] for i in range(2))
    text = [f"mov.b32 {a}, {b}" for a, b in zip(out, given, strict=True)]
    text += [f"mov.f32 {a}, {b}" for a, b in zip(rest, [*old, *sums] * (words // 4), strict=True)]
    text += [f"setp.gt.f32 p, {sums[0]}, 0f{most}", f"setp.gt.or.f32 p, {sums[1]}, 0f{most}, p"]
    text += ["vote.sync.any.pred p, p, -1", "@!p bra.uni DONE"]
    for row in range(2):  # only a row whose own sums are too large: no other row is in its bits
        text += [f"mov.f32 s, {sums[row]}", "mov.f32 m, 0fFF800000"]
        text += [f"max.f32 m, m, {part[i]}" for part in scores for i in range(row, words, 2)]
        for lanes, x in itertools.product((1, 2), "sm"):
            text += [f"shfl.sync.bfly.b32 x0, {x}, {lanes}, 31, -1", f"max.f32 {x}, {x}, x0"]
        text += [f"setp.gt.f32 p, s, 0f{most}", "mov.f32 s, 0f00000000"]
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
                text += [f"@p mov.b32 {out[i]}, {{h0, h1}}"]
        text += [f"@p mov.f32 {rest[2 + row]}, s"]
    registers = ".reg .pred p; .reg .f32 m, s, x0, x1, x2, x3; .reg .b16 h0, h1; "
    kinds = ["=r"] * words + ["=f"] * words + ["r"] * words + ["f"] * (words * (of_word + 3))
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
def correct(words, S, sums, row_max, factor, PER_ROW: gl.constexpr, DTYPE: gl.constexpr):
    """(words, sums, row_max) of a block, weighed again where a sum is too large."""
    parts = word_parts(S, DTYPE)
    SHAPE: gl.constexpr = parts[0].shape
    WL: gl.constexpr = words.type.layout
    L: gl.constexpr = word_layout(SHAPE[1])
    QL: gl.constexpr = row_max.type.layout
    given = gl.convert_layout(gl.reshape(words, SHAPE), L, assert_trivial=True)
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
    for i in gl.static_range(len(parts)):
        arguments += (gl.convert_layout(parts[i], L, assert_trivial=True),)
    arguments += (total, old, by)
    new, rest = gl.inline_asm_elementwise(
        ASM[0], ASM[1], arguments, dtype=(gl.int32, gl.float32), is_pure=True, pack=WORDS
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


@gluon.jit
def rescale_quads(O, rescale):  # noqa: E741
    """O times rescale [64, 4], row by row; nothing is multiplied where a warp's factors are 1."""
    OL: gl.constexpr = O.type.layout
    sums = gl.reshape(O, [64, O.shape[1] // 8, 4, 2])
    _sums, by = gl.broadcast(sums, per_score(rescale, sums))
    by = gl.convert_layout(gl.reshape(by, O.shape), OL, assert_trivial=True)
    if O.shape[1] == 64:
        return gl.inline_asm_elementwise(
            RESCALE_32, RESCALE_32_TYPES, [O, by], dtype=gl.float32, is_pure=True, pack=32
        )
    else:
        return gl.inline_asm_elementwise(
            RESCALE_64, RESCALE_64_TYPES, [O, by], dtype=gl.float32, is_pure=True, pack=64
        )


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
def known_before(x):
    """x, which ptxas must know before the wait that follows: a store that never happens, since no
    arithmetic makes this NaN."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a, t; mov.b32 a, 0; mov.b32 t, $1; "
        "setp.eq.u32 p, t, 4290847557; @p st.shared.f32 [a], $1; mov.b32 $0, $1; }",
        "=f,f,~{memory}", [x], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip
