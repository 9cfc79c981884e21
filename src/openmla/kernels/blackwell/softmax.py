# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""A softmax group: scores of 128 rows to weights, a row per thread, in log2 units.

Per row, with s the scores times factor (= scale * log2 e):

| state | meaning | before the first key |
|---|---|---|
| top | reference maximum: at most THRESHOLD below the true one | -inf |
| total | sum(exp2(s - top)) | 0 |

The reference moves only when the maximum grew by more than THRESHOLD, because then the correction
group has to multiply the accumulator. Weights reach 2^THRESHOLD instead of 1, which every dtype
holds. The new reference goes to the correction group as soon as it is known; the total follows
after the last block.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

from openmla.kernels.blackwell.columns import (
    REFERENCE,
    TOTAL,
    row_registers,
    scores,
    tell,
    weights,
)
from openmla.kernels.scores import MINUS_INF, mask, signed

Q_ROWS = gl.constexpr(128)


@gluon.jit
def shrink_of(old, new):
    """What sums made with the old reference are multiplied by: exactly 1 where it stayed."""
    return gl.where(old == new, 1.0, gl.exp2(old - gl.where(new == MINUS_INF, 0.0, new)))


@gluon.jit
def weigh(
    tmem, bars, top, total, tile: gl.constexpr, turn, seen, keys, factor,
    MASKED: gl.constexpr, HOW: gl.constexpr, TMEM: gl.constexpr,
):  # fmt: skip
    """Score tile `tile` to weights; `turn` counts the blocks that were in this tile."""
    s_full, p_full, c_full, _t_full = bars
    CAUSAL: gl.constexpr = HOW[0]
    SIGN: gl.constexpr = HOW[1]
    THRESHOLD: gl.constexpr = HOW[2]
    DTYPE: gl.constexpr = HOW[3]
    S_REGS: gl.constexpr = row_registers(gl.float32, TMEM[4])
    P_REGS: gl.constexpr = row_registers(DTYPE, TMEM[4])
    mbarrier.wait(s_full.index(tile), turn & 1)
    S = signed(scores(tmem, tile, TMEM).load(S_REGS), SIGN)
    if MASKED:
        S = mask(S, seen, keys, CAUSAL)
    highest = gl.max(S, 1) * factor
    new_top = gl.where(highest > top + THRESHOLD, highest, top)
    tell(tmem, tile, REFERENCE, new_top, TMEM)
    mbarrier.arrive(c_full.index(tile), count=1)
    shift = gl.where(new_top == MINUS_INF, 0.0, new_top)
    P = gl.exp2(S * factor - shift[:, None])
    total = total * shrink_of(top, new_top) + gl.sum(P, 1)
    weights(tmem, tile, DTYPE, TMEM).store(gl.convert_layout(P.to(DTYPE), P_REGS))
    mbarrier.arrive(p_full.index(tile), count=1)
    return new_top, total


@gluon.jit
def softmax_two(
    tmem, bars, piece, factor, WHO: gl.constexpr, HOW: gl.constexpr, TMEM: gl.constexpr
):
    """Query tile WHO over every block."""
    _head, _token, _rows, _key, keys, seen, blocks, whole, _request = piece
    VECTOR: gl.constexpr = gl.SliceLayout(1, row_registers(gl.float32, TMEM[4]))
    BN: gl.constexpr = TMEM[4]
    seen += WHO * Q_ROWS
    top = gl.full([Q_ROWS], MINUS_INF, gl.float32, VECTOR)
    total = gl.zeros([Q_ROWS], gl.float32, VECTOR)
    for j in range(0, blocks - whole):
        skip = (blocks - 1 - j) * BN
        top, total = weigh(
            tmem, bars, top, total, WHO, j, seen - skip, keys - skip, factor, True, HOW,
            TMEM,
        )  # fmt: skip
    for j in range(blocks - whole, blocks):
        top, total = weigh(tmem, bars, top, total, WHO, j, seen, keys, factor, False, HOW, TMEM)
    if blocks > 0:
        tell(tmem, WHO, TOTAL, total, TMEM)
        mbarrier.arrive(bars[3].index(WHO), count=1)


@gluon.jit
def softmax_one(tmem, bars, piece, factor, HOW: gl.constexpr, TMEM: gl.constexpr):
    """One query tile, the scores of block j in score tile j % 2."""
    _head, _token, _rows, _key, keys, seen, blocks, whole, _request = piece
    VECTOR: gl.constexpr = gl.SliceLayout(1, row_registers(gl.float32, TMEM[4]))
    BN: gl.constexpr = TMEM[4]
    top = gl.full([Q_ROWS], MINUS_INF, gl.float32, VECTOR)
    total = gl.zeros([Q_ROWS], gl.float32, VECTOR)
    for pair in range(0, (blocks + 1) // 2):
        for tile in gl.static_range(2):
            j = 2 * pair + tile
            skip = (blocks - 1 - j) * BN
            if j < blocks - whole:
                top, total = weigh(
                    tmem, bars, top, total, tile, pair, seen - skip, keys - skip, factor,
                    True, HOW, TMEM,
                )  # fmt: skip
            elif j < blocks:
                top, total = weigh(
                    tmem, bars, top, total, tile, pair, seen, keys, factor, False, HOW,
                    TMEM,
                )  # fmt: skip
    if blocks > 0:
        tell(tmem, 0, TOTAL, total, TMEM)
        mbarrier.arrive(bars[3].index(0), count=1)


@gluon.jit
def softmax(
    tmem, bars, piece, factor, WHO: gl.constexpr, QUERIES: gl.constexpr,
    HOW: gl.constexpr, TMEM: gl.constexpr,
):  # fmt: skip
    """Softmax group WHO. HOW: causal, sign of the scale, threshold, type of the weights."""
    if QUERIES == 2:
        softmax_two(tmem, bars, piece, factor, WHO, HOW, TMEM)
    elif QUERIES == 1:
        if WHO == 0:
            softmax_one(tmem, bars, piece, factor, HOW, TMEM)
    else:
        if piece[2] > Q_ROWS:
            softmax_two(tmem, bars, piece, factor, WHO, HOW, TMEM)
        elif WHO == 0:
            softmax_one(tmem, bars, piece, factor, HOW, TMEM)
