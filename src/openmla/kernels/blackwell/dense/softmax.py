"""A softmax group: scores of 128 rows to weights, a row per thread, in log2 units.

Per row, with s the scores times factor (= scale * log2 e):

| state | meaning | before the first key |
|---|---|---|
| row_max | reference maximum: at most THRESHOLD below the true one | -inf |
| row_sum | sum(exp2(s - row_max)) | 0 |

Per-token scales multiply the scores first, since they are part of the scores. Bits that hide keys
are loaded before the scores are waited for.

The reference moves only when the maximum grew by more than THRESHOLD, because then the correction
group has to multiply the accumulator. Weights reach 2^THRESHOLD instead of 1, which every dtype
holds. The factor goes to the correction group as soon as it is known; row_max and row_sum follow
after the last block.

Arguments of all functions: the TMEM allocation `tmem`, all Barriers `bars`, WorkItem `work`,
TokenScales or TileScales `scales`, Visibility `hidden`, KeyMask `key_mask` or its KeyBits `bits`,
which may be None,
SoftmaxHow `HOW`; factor = scale * log2 e. TMEM: see columns.py.
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
    store_row_value,
)
from openmla.kernels.blackwell.dense.records import KeyBits, Limits, SoftmaxState, TileScales
from openmla.kernels.gluon.scores import MINUS_INF, SELECT, mask, opaque_zero, signed

Q_ROWS = gl.constexpr(128)
MOST_STEPS = gl.constexpr(127)  # from there on 2^-steps is 0, whose exponent's bits are 0
MANTISSA_BITS = gl.constexpr(23)
WORD = gl.constexpr(32)  # keys of a word of bits


@gluon.jit
def moved(row_max, highest, THRESHOLD: gl.constexpr):
    """(new reference, factor for sums made with the old one) after a block whose maximum is
    `highest`. The factor is exactly 1 where the reference stayed.

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
def bits_of_tile(key_mask, work, half: gl.constexpr, TMEM: gl.constexpr):
    """The KeyBits of query tile `half` of a call with a mask."""
    skipped = half * Q_ROWS * TMEM.ctas
    token = (work.token + skipped).to(gl.int64)
    return KeyBits(
        base=key_mask.base + token * key_mask.row_stride,
        row_stride=key_mask.row_stride,
        words=key_mask.words,
        rows=work.rows - skipped,
    )


@gluon.jit
def words_of(bits, key, half: gl.constexpr, TMEM: gl.constexpr):
    """The words for half of a block of keys that begins at `key`."""
    WIDTH: gl.constexpr = TMEM.keys // 2
    ROWS: gl.constexpr = Q_ROWS * TMEM.ctas
    REGS: gl.constexpr = row_registers(gl.float32, WIDTH, TMEM.ctas)
    scores = gl.zeros([ROWS, WIDTH], gl.float32, REGS)
    L: gl.constexpr = gl.reshape(scores, [ROWS, WIDTH // WORD, WORD]).type.layout
    WL: gl.constexpr = gl.SliceLayout(2, L)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, WL))
    at = gl.arange(0, WIDTH // WORD, gl.SliceLayout(0, WL)) + (key + half * WIDTH) // WORD
    exists = (row < bits.rows)[:, None] & (at < bits.words)[None, :]
    lines = bits.base + row.to(gl.int64) * bits.row_stride
    return gl.load(lines[:, None] + at[None, :], mask=exists, other=0)


@gluon.jit
def keep_bits(S, words):
    """S where the key's bit is set, else -inf."""
    SL: gl.constexpr = S.type.layout
    ROWS: gl.constexpr = S.shape[0]
    WIDTH: gl.constexpr = S.shape[1]
    parts = gl.reshape(S, [ROWS, WIDTH // WORD, WORD])
    L: gl.constexpr = parts.type.layout
    BL: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, L))
    parts, words = gl.broadcast(parts, words[:, :, None])
    parts, bit = gl.broadcast(parts, (1 << gl.arange(0, WORD, BL))[None, None, :])
    kept = gl.inline_asm_elementwise(
        SELECT, "=f,f,r,r", [parts, words, bit], dtype=gl.float32, is_pure=True, pack=1
    )
    return gl.convert_layout(gl.reshape(kept, [ROWS, WIDTH]), SL)


@gluon.jit
def keep_since(S, since):
    """S where row r sees the column, from since + r on, else -inf."""
    SL: gl.constexpr = S.type.layout
    columns = gl.arange(0, S.shape[1], gl.SliceLayout(0, SL)) + opaque_zero()
    rows = gl.arange(0, S.shape[0], gl.SliceLayout(1, SL))
    return gl.where(columns[None, :] >= (rows + since)[:, None], S, MINUS_INF)


@gluon.jit
def half_of(
    tmem,
    tile: gl.constexpr,
    half: gl.constexpr,
    limits,
    scales,
    place,
    words,
    MASKED: gl.constexpr,
    HOW: gl.constexpr,
    TMEM: gl.constexpr,
):
    """Half of the columns of a score tile, times scales where there are any, and masked.

    The scales of the keys are in buffer `place`. If MASKED, Limits `limits` say what counts, and
    `words` what is seen of that, if they are not None.
    """
    WIDTH: gl.constexpr = TMEM.keys // 2
    REGS: gl.constexpr = row_registers(gl.float32, WIDTH, TMEM.ctas)
    first: gl.constexpr = half * WIDTH
    S = signed(tmem.slice(TMEM.scores[tile] + first, WIDTH).load(REGS), HOW.sign)
    if scales.keys is not None:
        part = scales.keys.index(place).slice(first, WIDTH)
        S = S * part.load(gl.SliceLayout(0, REGS))[None, :]
    if scales.rows is not None:
        S = S * scales.rows[:, None]
    if MASKED:
        S = mask(S, limits.seen - first, limits.keys - first, HOW.is_causal)
        if limits.since is not None:
            S = keep_since(S, limits.since - first)
    if words is not None:
        S = keep_bits(S, words)
    return S


@gluon.jit
def store_weights(
    tmem, P, tile: gl.constexpr, half: gl.constexpr, DTYPE: gl.constexpr, TMEM: gl.constexpr
):
    """Half of the weights of a tile, over its scores."""
    REGS: gl.constexpr = row_registers(DTYPE, TMEM.keys // 2, TMEM.ctas)
    half_weights(tmem, tile, half, DTYPE, TMEM).store(gl.convert_layout(P.to(DTYPE), REGS))


@gluon.jit
def weigh(  # noqa: PLR0913
    tmem,
    bars,
    state,
    tile: gl.constexpr,
    j,
    turn,
    limits,
    factor,
    scales,
    bits,
    key,
    READERS: gl.constexpr,
    MASKED: gl.constexpr,
    HOW: gl.constexpr,
    TMEM: gl.constexpr,
):
    """Scores of block j, the turn-th in score tile `tile`, to weights; returns the new state. The
    block begins at `key`.

    Half a row at a time: less is alive at once, so it stays in registers. READERS: how many softmax
    groups read the scales of keys.
    """
    place = j % HOW.scale_buffers
    left_words = None  # assigned here: with Triton 3.6 no function can return None
    right_words = None
    if bits is not None:
        left_words = words_of(bits, key, 0, TMEM)
        right_words = words_of(bits, key, 1, TMEM)
    mbarrier.wait(bars.s_full.index(tile), turn & 1)
    if scales.keys is not None:
        mbarrier.wait(bars.scales.full.index(place), (j // HOW.scale_buffers) & 1)
    left = half_of(tmem, tile, 0, limits, scales, place, left_words, MASKED, HOW, TMEM)
    right = half_of(tmem, tile, 1, limits, scales, place, right_words, MASKED, HOW, TMEM)
    if scales.keys is not None:
        mbarrier.arrive(bars.scales.empty.index(place), count=2 // READERS)
    highest = gl.maximum(gl.max(left, 1), gl.max(right, 1)) * factor
    new_max, rescale = moved(state.row_max, highest, HOW.threshold)
    store_row_value(tmem, tile, RESCALE, rescale, TMEM)
    mbarrier.arrive(bars.c_full.index(tile), count=1)
    shift = gl.where(new_max == MINUS_INF, 0.0, new_max)[:, None]
    left = gl.exp2(left * factor - shift)
    row_sum = state.row_sum * rescale + gl.sum(left, 1)
    store_weights(tmem, left, tile, 0, HOW.dtype, TMEM)
    right = gl.exp2(right * factor - shift)
    row_sum += gl.sum(right, 1)
    store_weights(tmem, right, tile, 1, HOW.dtype, TMEM)
    mbarrier.arrive(bars.p_full.index(tile), count=1)
    return SoftmaxState(row_max=new_max, row_sum=row_sum)


@gluon.jit
def start(TMEM: gl.constexpr):
    """The SoftmaxState before the first key."""
    ROWS: gl.constexpr = Q_ROWS * TMEM.ctas
    VECTOR: gl.constexpr = gl.SliceLayout(1, row_registers(gl.float32, TMEM.keys // 2, TMEM.ctas))
    row_max = gl.full([ROWS], MINUS_INF, gl.float32, VECTOR)
    row_sum = gl.zeros([ROWS], gl.float32, VECTOR)
    return SoftmaxState(row_max=row_max, row_sum=row_sum)


@gluon.jit
def scales_of_rows(q_scale_ptr, work, half: gl.constexpr, row_max):
    """The scales of the rows of query tile `half`, laid out as `row_max`."""
    ROWS: gl.constexpr = row_max.shape[0]
    row = gl.arange(0, ROWS, row_max.type.layout) + half * ROWS
    return gl.load(q_scale_ptr + (work.token + row), mask=row < work.rows, other=0.0)


@gluon.jit
def softmax_two(
    tmem,
    bars,
    work,
    factor,
    scales,
    hidden,
    WHO: gl.constexpr,
    HOW: gl.constexpr,
    TMEM: gl.constexpr,
):
    """Query tile WHO over every block; the first tile leaves out those that it skips."""
    blocks = work.blocks
    BN: gl.constexpr = TMEM.keys
    seen = work.seen + WHO * Q_ROWS * TMEM.ctas
    state = start(TMEM)
    row_scales = None
    if scales.queries is not None:
        row_scales = scales_of_rows(scales.queries, work, WHO, state.row_max)
    tile_scales = TileScales(keys=scales.keys, rows=row_scales)
    key_mask, windows = hidden
    tile_bits = None
    if key_mask.base is not None:
        tile_bits = bits_of_tile(key_mask, work, WHO, TMEM)
    first = blocks * 0
    if WHO == 0:
        first = work.skipped
    # Blocks that need a causal mask, those that need none, and where windows begin.
    for part in gl.static_range(2 if windows.keys is None else 3):
        begin = first
        end = blocks - work.unmasked
        if part > 0:
            begin = blocks - work.unmasked
            end = blocks
            if windows.keys is not None:
                if part == 1:
                    end = blocks - windows.blocks
                else:
                    begin = blocks - windows.blocks
        for j in range(begin, end):
            skip = (blocks - 1 - j) * BN
            turn = j - first
            limits = None
            if part != 1:
                limits = Limits(seen=seen - skip, keys=work.keys - skip, since=None)
                if windows.keys is not None:
                    since = seen - windows.keys - skip
                    limits = Limits(seen=limits.seen, keys=limits.keys, since=since)
            state = weigh(
                tmem,
                bars,
                state,
                WHO,
                j,
                turn,
                limits,
                factor,
                tile_scales,
                tile_bits,
                skip,
                2,
                part != 1,
                HOW,
                TMEM,
            )
    if blocks > 0:
        store_row_value(tmem, WHO, REFERENCE, state.row_max, TMEM)
        store_row_value(tmem, WHO, TOTAL, state.row_sum, TMEM)
        mbarrier.arrive(bars.t_full.index(WHO), count=1)


@gluon.jit
def softmax_one(tmem, bars, work, factor, scales, hidden, HOW: gl.constexpr, TMEM: gl.constexpr):
    """One query tile, the scores of block j in score tile j % 2."""
    blocks, unmasked = work.blocks, work.unmasked
    BN: gl.constexpr = TMEM.keys
    state = start(TMEM)
    row_scales = None
    if scales.queries is not None:
        row_scales = scales_of_rows(scales.queries, work, 0, state.row_max)
    tile_scales = TileScales(keys=scales.keys, rows=row_scales)
    key_mask, windows = hidden
    tile_bits = None
    if key_mask.base is not None:
        tile_bits = bits_of_tile(key_mask, work, 0, TMEM)
    for pair in range(0, (blocks + 1) // 2):
        for tile in gl.static_range(2):
            j = 2 * pair + tile
            skip = (blocks - 1 - j) * BN
            is_masked = j < blocks - unmasked
            if windows.keys is not None:
                is_masked = is_masked | ((j >= blocks - windows.blocks) & (j < blocks))
            if is_masked:
                limits = Limits(seen=work.seen - skip, keys=work.keys - skip, since=None)
                if windows.keys is not None:
                    since = work.seen - windows.keys - skip
                    limits = Limits(seen=limits.seen, keys=limits.keys, since=since)
                state = weigh(
                    tmem,
                    bars,
                    state,
                    tile,
                    j,
                    pair,
                    limits,
                    factor,
                    tile_scales,
                    tile_bits,
                    skip,
                    1,
                    True,
                    HOW,
                    TMEM,
                )
            elif j < blocks:
                state = weigh(
                    tmem,
                    bars,
                    state,
                    tile,
                    j,
                    pair,
                    None,
                    factor,
                    tile_scales,
                    tile_bits,
                    skip,
                    1,
                    False,
                    HOW,
                    TMEM,
                )
    if blocks > 0:
        store_row_value(tmem, 0, REFERENCE, state.row_max, TMEM)
        store_row_value(tmem, 0, TOTAL, state.row_sum, TMEM)
        mbarrier.arrive(bars.t_full.index(0), count=1)


@gluon.jit
def softmax(
    tmem,
    bars,
    work,
    factor,
    scales,
    hidden,
    WHO: gl.constexpr,
    QUERIES: gl.constexpr,
    HOW: gl.constexpr,
    TMEM: gl.constexpr,
):
    """The partition of softmax group WHO. QUERIES: as in multiply.py."""
    if QUERIES == 2:
        softmax_two(tmem, bars, work, factor, scales, hidden, WHO, HOW, TMEM)
    elif QUERIES == 1:
        if WHO == 0:
            softmax_one(tmem, bars, work, factor, scales, hidden, HOW, TMEM)
    else:
        if work.rows > Q_ROWS:
            softmax_two(tmem, bars, work, factor, scales, hidden, WHO, HOW, TMEM)
        elif WHO == 0:
            softmax_one(tmem, bars, work, factor, scales, hidden, HOW, TMEM)
