"""A softmax group: scores of 128 rows to weights, a row per thread, in log2 units.

Per row, with s the scores times factor (= scale * log2 e):

| state | meaning | before the first key |
|---|---|---|
| row_max | reference maximum: at most THRESHOLD below the true one | -inf |
| row_sum | sum(exp2(s - row_max)) | 0 |

Weights of 8 bits would be too coarse alone: their rounding error, in 8 bits as well, is a second
part, and together they keep as many bits as bf16. They are multiplied by 2^BIAS, which cancels in
the end, so that small ones are not lost.

Per-token scales multiply the scores first, since they are part of the scores.

The reference moves only when the maximum grew by more than THRESHOLD, because then the correction
group has to multiply the accumulator. Weights reach 2^THRESHOLD instead of 1, which every dtype
holds. By how much goes to the correction group as soon as it is known; row_max and row_sum follow
after the last block.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

from openmla.kernels.blackwell.dense.columns import (
    REFERENCE,
    RESCALE,
    TOTAL,
    half_weights,
    row_registers,
    tell,
)
from openmla.kernels.gluon.scores import MINUS_INF, mask, signed

Q_ROWS = gl.constexpr(128)
MOST_STEPS = gl.constexpr(127)  # from there on 2^-steps is 0, whose exponent's bits are 0
MANTISSA_BITS = gl.constexpr(23)


@gluon.jit
def moved(row_max, highest, THRESHOLD: gl.constexpr):
    """The reference after a block whose maximum is `highest`, and what sums made with the one
    before are multiplied by: exactly 1 where it stayed.

    After its first value a reference moves by whole numbers, so that 2^-steps is made of its
    exponent's bits: the units that compute exponentials are busy, and no sum is rounded. From 127
    on nothing is left of the sums, and a reference far from its maximum would not be exact either.
    """
    moves = highest > row_max + THRESHOLD
    grown = gl.ceil(highest - row_max)
    steps = gl.maximum(gl.minimum(grown, MOST_STEPS), 0.0)
    power = ((MOST_STEPS - steps).to(gl.int32) << MANTISSA_BITS).to(gl.float32, bitcast=True)
    new_max = gl.where(grown < MOST_STEPS, row_max + grown, highest)
    return gl.where(moves, new_max, row_max), gl.where(moves, power, 1.0)


@gluon.jit
def half_of(
    tmem, tile: gl.constexpr, half: gl.constexpr, limits, scales, place, MASKED: gl.constexpr,
    HOW: gl.constexpr, TMEM: gl.constexpr,
):  # fmt: skip
    """Half of the columns of a score tile, times scales where there are any, and masked."""
    WIDTH: gl.constexpr = TMEM[4] // 2
    REGS: gl.constexpr = row_registers(gl.float32, WIDTH, TMEM[6])
    key_scales, q_scale_ptr, row_scale = scales
    seen, keys = limits
    first: gl.constexpr = half * WIDTH
    S = signed(tmem.slice(TMEM[tile] + first, WIDTH).load(REGS), HOW[1])
    if HOW[5]:
        part = key_scales.index(place).slice(first, WIDTH)
        S = S * part.load(gl.SliceLayout(0, REGS))[None, :]
    if q_scale_ptr is not None:
        S = S * row_scale[:, None]
    if MASKED:
        S = mask(S, seen - first, keys - first, HOW[0])
    return S


@gluon.jit
def store_weights(
    tmem, P, tile: gl.constexpr, half: gl.constexpr, DTYPE: gl.constexpr, TMEM: gl.constexpr
):
    """Half of the weights of a tile, over its scores; 8-bit ones in two parts."""
    REGS: gl.constexpr = row_registers(DTYPE, TMEM[4] // 2, TMEM[6])
    rounded = P.to(DTYPE)
    half_weights(tmem, tile, 0, half, DTYPE, TMEM).store(gl.convert_layout(rounded, REGS))
    if DTYPE.primitive_bitwidth == 8:
        rest = (P - rounded.to(gl.float32)).to(DTYPE)
        half_weights(tmem, tile, 1, half, DTYPE, TMEM).store(gl.convert_layout(rest, REGS))


@gluon.jit
def weigh(  # noqa: PLR0913
    tmem, bars, state, tile: gl.constexpr, j, turn, limits, factor, scales,
    READERS: gl.constexpr, MASKED: gl.constexpr, HOW: gl.constexpr, TMEM: gl.constexpr,
):  # fmt: skip
    """Scores of block j, the turn-th in score tile `tile`, to weights.

    Half a row at a time: less is alive at once, so it stays in registers.
    """
    s_full, p_full, c_full, _t_full, scale_bars = bars
    row_max, row_sum = state
    THRESHOLD: gl.constexpr = HOW[2]
    BIAS: gl.constexpr = HOW[3]
    DTYPE: gl.constexpr = HOW[4]
    place = j % scales[0].shape[0]
    mbarrier.wait(s_full.index(tile), turn & 1)
    if HOW[5]:
        mbarrier.wait(scale_bars[0].index(place), (j // scales[0].shape[0]) & 1)
    left = half_of(tmem, tile, 0, limits, scales, place, MASKED, HOW, TMEM)
    right = half_of(tmem, tile, 1, limits, scales, place, MASKED, HOW, TMEM)
    if HOW[5]:
        mbarrier.arrive(scale_bars[1].index(place), count=2 // READERS)
    highest = gl.maximum(gl.max(left, 1), gl.max(right, 1)) * factor
    new_max, rescale = moved(row_max, highest, THRESHOLD)
    tell(tmem, tile, RESCALE, rescale, TMEM)
    mbarrier.arrive(c_full.index(tile), count=1)
    shift = (gl.where(new_max == MINUS_INF, 0.0, new_max) - BIAS)[:, None]
    left = gl.exp2(left * factor - shift)
    row_sum = row_sum * rescale + gl.sum(left, 1)
    store_weights(tmem, left, tile, 0, DTYPE, TMEM)
    right = gl.exp2(right * factor - shift)
    row_sum += gl.sum(right, 1)
    store_weights(tmem, right, tile, 1, DTYPE, TMEM)
    mbarrier.arrive(p_full.index(tile), count=1)
    return new_max, row_sum


@gluon.jit
def start(work, q_scale_ptr, half: gl.constexpr, TMEM: gl.constexpr):
    """(row_max, row_sum) before the first key, and the scales of the rows, if they have any."""
    token, rows = work[1], work[2]
    ROWS: gl.constexpr = Q_ROWS * TMEM[6]
    VECTOR: gl.constexpr = gl.SliceLayout(1, row_registers(gl.float32, TMEM[4] // 2, TMEM[6]))
    row_max = gl.full([ROWS], MINUS_INF, gl.float32, VECTOR)
    row_sum = gl.zeros([ROWS], gl.float32, VECTOR)
    row_scale = row_sum
    if q_scale_ptr is not None:
        row = gl.arange(0, ROWS, VECTOR) + half * ROWS
        row_scale = gl.load(q_scale_ptr + (token + row), mask=row < rows, other=0.0)
    return (row_max, row_sum), row_scale


@gluon.jit
def softmax_two(
    tmem, bars, work, factor, scales, WHO: gl.constexpr, HOW: gl.constexpr, TMEM: gl.constexpr
):
    """Query tile WHO over every block, but for those that the first tile skips."""
    _head, _token, _rows, _key, keys, seen, blocks, whole, _request, skipped = work
    key_scales, q_scale_ptr = scales
    BN: gl.constexpr = TMEM[4]
    seen += WHO * Q_ROWS * TMEM[6]
    state, row_scale = start(work, q_scale_ptr, WHO, TMEM)
    by = (key_scales, q_scale_ptr, row_scale)
    first = blocks * 0
    if WHO == 0:
        first = skipped
    for j in range(first, blocks - whole):
        skip = (blocks - 1 - j) * BN
        state = weigh(
            tmem, bars, state, WHO, j, j - first, (seen - skip, keys - skip), factor, by, 2, True,
            HOW, TMEM,
        )  # fmt: skip
    for j in range(blocks - whole, blocks):
        state = weigh(
            tmem, bars, state, WHO, j, j - first, (seen, keys), factor, by, 2, False, HOW, TMEM
        )
    if blocks > 0:
        tell(tmem, WHO, REFERENCE, state[0], TMEM)
        tell(tmem, WHO, TOTAL, state[1], TMEM)
        mbarrier.arrive(bars[3].index(WHO), count=1)


@gluon.jit
def softmax_one(tmem, bars, work, factor, scales, HOW: gl.constexpr, TMEM: gl.constexpr):
    """One query tile, the scores of block j in score tile j % 2."""
    _head, _token, _rows, _key, keys, seen, blocks, whole, _request, _ = work
    key_scales, q_scale_ptr = scales
    BN: gl.constexpr = TMEM[4]
    state, row_scale = start(work, q_scale_ptr, 0, TMEM)
    by = (key_scales, q_scale_ptr, row_scale)
    for pair in range(0, (blocks + 1) // 2):
        for tile in gl.static_range(2):
            j = 2 * pair + tile
            skip = (blocks - 1 - j) * BN
            if j < blocks - whole:
                state = weigh(
                    tmem, bars, state, tile, j, pair, (seen - skip, keys - skip), factor, by, 1,
                    True, HOW, TMEM,
                )  # fmt: skip
            elif j < blocks:
                state = weigh(
                    tmem, bars, state, tile, j, pair, (seen, keys), factor, by, 1, False, HOW,
                    TMEM,
                )  # fmt: skip
    if blocks > 0:
        tell(tmem, 0, REFERENCE, state[0], TMEM)
        tell(tmem, 0, TOTAL, state[1], TMEM)
        mbarrier.arrive(bars[3].index(0), count=1)


@gluon.jit
def softmax(given, WHO: gl.constexpr, QUERIES: gl.constexpr, HOW: gl.constexpr, TMEM: gl.constexpr):
    """Softmax group WHO.

    HOW: causal, sign of the scale; threshold, bias and type of the weights; whether keys have
    scales. scales: the buffers of those of the keys, pointer to those of the queries or None.
    """
    tmem, bars, work, factor, scales = given
    if QUERIES == 2:
        softmax_two(tmem, bars, work, factor, scales, WHO, HOW, TMEM)
    elif QUERIES == 1:
        if WHO == 0:
            softmax_one(tmem, bars, work, factor, scales, HOW, TMEM)
    else:
        if work[2] > Q_ROWS:
            softmax_two(tmem, bars, work, factor, scales, WHO, HOW, TMEM)
        elif WHO == 0:
            softmax_one(tmem, bars, work, factor, scales, HOW, TMEM)
