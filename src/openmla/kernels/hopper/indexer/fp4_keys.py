"""FP4 keys of the indexer on Hopper: e2m1 codes and exponents become e4m3 tiles that wgmma reads.

A key is four blocks of 32 e2m1 columns, each with an exponent. TMA loads codes and exponents into
rings of their own; one or two warp-groups, the converters, write the tiles that the consumers of
scores.py and decode_scores.py take, and a scale for each key:

    e4m3 = e2m1 * 2^shift           shift = the block's exponent - the key's largest + 6
    scale = 2^(the largest - 6)     so that key = e4m3 * scale, exactly

e2m1 has the magnitudes 0, 0.5 … 6, and e4m3 is normal from 2^-6 to 448: twelve shifts, -5 to 6,
need no rounding. The eight e4m3 magnitudes of a shift are the bytes of two words, and one PRMT
looks up four codes in them:

| code | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
|---|---|---|---|---|---|---|---|---|
| e2m1 | 0 | 0.5 | 1 | 1.5 | 2 | 3 | 4 | 6 |
| e4m3, shift 0 | 00 | 30 | 38 | 3C | 40 | 44 | 48 | 4C |
| e4m3, shift 6 | 00 | 60 | 68 | 6C | 70 | 74 | 78 | 7C |

Where a block lies further below its key's largest, the key is wide: all of its blocks are written
with shift 0, and a consumer that finds one in a tile computes its scores again, block by block in
fp32 (`finish_wide`). So a key loses nothing whatever its exponents are, and the bits of a score
depend on its own key. Keys of a model are hardly ever wide: their largest columns of two blocks
would lie 12 octaves apart.

An exponent of 255 is NaN, and so are all scores of its key.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openmla.kernels.gluon.barriers import barriers
from openmla.kernels.gluon.compat import reinterpret
from openmla.kernels.gluon.indexer_records import ScoresBarriers, SharedTiles, Window
from openmla.kernels.gluon.indexer_work import COLUMNS, ROWS, weights_of
from openmla.kernels.gluon.scores import opaque_zero
from openmla.kernels.hopper.indexer.records import Fp4Tiles

WARPS = gl.constexpr(4)
BLOCKS_OF_KEY = gl.constexpr(4)  # that have an exponent each
BLOCK = gl.constexpr(32)  # columns of one, and wgmma's K
CODE_BYTES = gl.constexpr(64)  # of a key
WORDS = gl.constexpr(4)  # of a block's codes, eight columns each
HIGHEST = gl.constexpr(6)  # shift of a key's largest exponent
LOWEST = gl.constexpr(-5)
EXPONENTS = gl.constexpr(255)  # a byte; as an exponent, NaN
SMALLEST = gl.constexpr(0x00400000)  # 2^-127 in fp32
QUIET_NAN = gl.constexpr(0x7FC00000)
MAGNITUDES = gl.constexpr(0x77777777)  # of eight codes, without their signs
# e4m3 of codes 0 … 3 and 4 … 7 with shift 0; and what a shift adds to each byte but that of 0.
LOW, LOW_STEP = gl.constexpr(0x3C383000), gl.constexpr(0x08080800)
HIGH, HIGH_STEP = gl.constexpr(0x4C484440), gl.constexpr(0x08080808)
LOOK_UP = gl.constexpr("prmt.b32 $0, $1, $2, $3;")  # byte i of $0 is the one that digit i names
SIGN = gl.constexpr(-0x7F7F7F80)  # 0x80808080
# Bytes of two words, of the second from 4 on, whose bit 7 is the sign of codes 0 … 3, and 4 … 7:
# those of odd columns are in the codes, those of even ones in the codes moved four bits.
SIGNS_LOW, SIGNS_HIGH = gl.constexpr(0x1504), gl.constexpr(0x3726)


@gluon.constexpr_function
def block_layout():
    """[keys, blocks, words]: a thread holds a block's codes, a warp eight keys."""
    return gl.BlockedLayout([1, 1, 4], [8, 4, 1], [4, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def swizzled(span, bits):
    """The layout of a tile whose rows of `span` bytes are swizzled, as elements of `bits` bits."""
    return gl.NVMMASharedLayout(swizzle_byte_width=span, element_bitwidth=bits, rank=2)


@gluon.jit
def allocate_codes(tiles, CFG: gl.constexpr):
    """Rings of codes and exponents of keys, as TMA loads them, and of what the converter finds.
    tiles: SharedTiles.k."""
    STAGES: gl.constexpr = CFG.key_stages * CFG.block_keys // ROWS
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    return Fp4Tiles(
        tiles=tiles,
        codes=gl.allocate_shared_memory(gl.uint8, [STAGES, ROWS, CODE_BYTES], swizzled(64, 8)),
        exponents=gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], LINEAR),
        wide=gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], LINEAR),
        any_wide=gl.allocate_shared_memory(gl.int32, [CFG.key_stages, WARPS], LINEAR),
    )


@gluon.jit
def loaded(smem, bars, fp4, CFG: gl.constexpr):
    """The rings and barriers of a producer that loads codes: (SharedTiles, ScoresBarriers)."""
    codes_ready = barriers(CFG.key_stages, 1)
    codes_empty = barriers(CFG.key_stages, 1)
    rings = SharedTiles(items=smem.items, q=smem.q, k=fp4.codes, scales=fp4.exponents)
    signals = ScoresBarriers(
        q_ready=bars.q_ready,
        q_empty=bars.q_empty,
        k_ready=codes_ready,
        k_empty=codes_empty,
        item_ready=bars.item_ready,
    )
    return rings, signals


@gluon.jit
def powers(exponents):
    """2^(exponent - 127) of stored exponents, fp32; NaN for 255."""
    bits = gl.where(exponents == 0, SMALLEST, exponents << 23)
    bits = gl.where(exponents == EXPONENTS, QUIET_NAN, bits)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def look_up(low, high, places):
    """Four bytes of eight: `places` has a digit for each in its lower half."""
    return gl.inline_asm_elementwise(
        LOOK_UP, "=r,r,r,r", [low, high, places], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def widened(words, low, high):
    """Columns 0 … 3 and 4 … 7 of words of codes, e4m3. low, high: magnitudes of codes 0 … 3 and
    4 … 7."""
    places = words & MAGNITUDES
    moved = words << 4
    first = look_up(low, high, places) | (look_up(words, moved, SIGNS_LOW) & SIGN)
    second = look_up(low, high, places >> 16) | (look_up(words, moved, SIGNS_HIGH) & SIGN)
    return first, second


@gluon.jit
def convert(words, stored):
    """Codes int32 [keys, blocks, words] and the exponents of keys -> (columns as words of four e4m3
    int32 [keys, 32], scales fp32 [keys], exponents of wide keys and 0 of the others [keys])."""
    L: gl.constexpr = words.type.layout
    block = gl.arange(0, BLOCKS_OF_KEY, gl.SliceLayout(0, gl.SliceLayout(2, L)))
    first, second = stored & EXPONENTS, (stored >> 8) & EXPONENTS
    third, fourth = (stored >> 16) & EXPONENTS, (stored >> 24) & EXPONENTS
    highest = gl.maximum(gl.maximum(first, second), gl.maximum(third, fourth))
    lowest = gl.minimum(gl.minimum(first, second), gl.minimum(third, fourth))
    is_wide = (highest - lowest > HIGHEST - LOWEST) & (highest != EXPONENTS)
    # A key without a number keeps within the table, whatever its columns are.
    shift = ((stored[:, None] >> (block * 8)[None, :]) & EXPONENTS) - highest[:, None] + HIGHEST
    shift = gl.where(is_wide[:, None], 0, gl.maximum(shift, LOWEST))
    words, low = gl.broadcast(words, (LOW + shift * LOW_STEP)[:, :, None])
    words, high = gl.broadcast(words, (HIGH + shift * HIGH_STEP)[:, :, None])
    first, second = widened(words, low, high)
    columns = gl.join(first, second).reshape([words.shape[0], COLUMNS // 4])
    scales = powers(highest) * 0.015625  # 2^-HIGHEST
    return columns, scales, gl.where(is_wide, stored, 0)


@gluon.jit
def convert_block(smem, fp4, stage, CFG: gl.constexpr):
    """Write the tiles, scales and wide keys of one stage. smem: SharedTiles; fp4: Fp4Tiles."""
    BN: gl.constexpr = CFG.block_keys
    ST: gl.constexpr = CFG.key_stages
    L: gl.constexpr = block_layout()
    KL: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))
    FLAT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    codes = reinterpret(fp4.codes, gl.int32, [ST, BN, BLOCKS_OF_KEY * WORDS], swizzled(64, 32))
    tiles = reinterpret(smem.k, gl.int32, [ST, BN, COLUMNS // 4], swizzled(128, 32))
    exponents = reinterpret(fp4.exponents, gl.int32, [ST, BN], LINEAR)
    scales = reinterpret(smem.scales, gl.float32, [ST, BN], LINEAR)
    wide = reinterpret(fp4.wide, gl.int32, [ST, BN], LINEAR)
    words = codes.index(stage).load(FLAT).reshape([BN, BLOCKS_OF_KEY, WORDS])
    words = gl.convert_layout(words, L, assert_trivial=True)
    columns, factors, found = convert(words, exponents.index(stage).load(KL))
    tiles.index(stage).store(columns)
    scales.index(stage).store(factors)
    wide.index(stage).store(found)
    # A warp has eight of every 32 keys.
    any_found = gl.max(gl.max((found != 0).to(gl.int32).reshape([BN // 32, WARPS, 8]), 0), 1)
    fp4.any_wide.index(stage).store(any_found)


@gluon.jit
def has_wide(fp4, stage):
    """Whether a stage has a wide key."""
    ALL: gl.constexpr = gl.BlockedLayout([WARPS], [32], [WARPS], [0])  # every thread has all
    return gl.max(fp4.any_wide.index(stage).load(ALL), 0) > 0


@gluon.jit
def convert_blocks(
    smem, fp4, bars, loads, it, blocks, WHO: gl.constexpr, OF: gl.constexpr, CFG: gl.constexpr
):
    """Convert every OF-th block of a work item, from block WHO on; blocks count through all work
    items of the program, and the first of this one is number `it`.

    smem: SharedTiles; fp4: Fp4Tiles; bars: ScoresBarriers of the tiles, and `loads` of the codes.
    """
    ST: gl.constexpr = CFG.key_stages
    for c in range((WHO + OF - it % OF) % OF, blocks, OF):
        stage = (it + c) % ST
        phase = ((it + c) // ST) & 1
        mbarrier.wait(bars.k_empty.index(stage), phase ^ 1)
        mbarrier.wait(loads.k_ready.index(stage), phase)
        convert_block(smem, fp4, stage, CFG)
        fence_async_shared()
        mbarrier.arrive(loads.k_empty.index(stage), count=1)
        mbarrier.arrive(bars.k_ready.index(stage), count=1)


@gluon.jit
def window_number(windows, number):
    """The Window of query `number` of TileWindows."""
    low = gl.where(number == 0, windows.first.low, windows.second.low)
    low = gl.where(number == 2, windows.third.low, low)
    low = gl.where(number == 3, windows.fourth.low, low)
    high = gl.where(number == 0, windows.first.high, windows.second.high)
    high = gl.where(number == 2, windows.third.high, high)
    high = gl.where(number == 3, windows.fourth.high, high)
    return Window(low, high)


@gluon.jit
def wide_sums(k, q, factors, weights, zero):
    """Sums over 32 heads of the weighted products of 64 keys, block by block. q: 32 of its rows;
    factors: of the four blocks; zero: [64, 32] of them."""
    S = zero
    for b in gl.static_range(BLOCKS_OF_KEY):
        columns = q.slice(b * BLOCK, BLOCK, dim=1).permute((1, 0))
        products = warpgroup_mma(
            k.slice(b * BLOCK, BLOCK, dim=1), columns, zero, use_acc=False, is_async=True
        )
        S += warpgroup_mma_wait(0, deps=(products,)) * factors[b][:, None]
    return gl.sum(gl.where(S < 0, 0.0, S) * weights[None, :], 1)


@gluon.jit
def finish_wide(
    k,
    q,
    stored,
    weights,
    query,
    total_q,
    out,
    key,
    windows,
    QUERIES: gl.constexpr,
    HEADS: gl.constexpr,
):
    """Scores of the wide keys of a tile, over what `finish` stored for them.

    k: 64 keys; q: the queries' [QUERIES * HEADS, 128]; stored: `Fp4Tiles.wide` of the tile;
    weights, out: Matrix; windows: TileWindows.
    """
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    RL: gl.constexpr = gl.SliceLayout(1, L)
    GROUPS: gl.constexpr = HEADS // BLOCK
    found = stored.load(RL)
    factors = ()
    for b in gl.static_range(BLOCKS_OF_KEY):
        factors += (powers((found >> (8 * b)) & EXPONENTS),)
    Q_LAYOUT: gl.constexpr = q.layout
    rows = reinterpret(q, q.dtype, [QUERIES * GROUPS, BLOCK, COLUMNS], Q_LAYOUT)
    nothing = gl.zeros([ROWS, BLOCK], gl.float32, L)
    head = gl.arange(0, BLOCK, gl.SliceLayout(0, L))
    keys = key + gl.arange(0, ROWS, RL)
    for n in range(opaque_zero(), QUERIES):
        scores = gl.zeros([ROWS], gl.float32, RL)
        for g in range(opaque_zero(), GROUPS):
            at, token = weights_of(weights, query + n, head + g * BLOCK, HEADS)
            of_heads = gl.load(at, mask=token < total_q, other=0.0)
            scores += wide_sums(k, rows.index(n * GROUPS + g), factors, of_heads, nothing)
        window = window_number(windows, n)
        inside = (found != 0) & (keys >= window.low) & (keys < window.high)
        row = out.ptr + (query + n).to(gl.int64) * out.row_stride
        gl.store(row + keys, scores, mask=inside)


@gluon.jit
def finish_wide_keys(
    fp4,
    stage,
    q,
    weights,
    query,
    total_q,
    out,
    key,
    windows,
    CFG: gl.constexpr,
    QUERIES: gl.constexpr,
    HEADS: gl.constexpr,
):
    """`finish_wide` for every tile of a stage, if it has a wide key. Loops are not unrolled, and
    nothing of them is computed in front: they hardly ever run. fp4: Fp4Tiles."""
    SUB: gl.constexpr = CFG.block_keys // ROWS
    if has_wide(fp4, stage):
        for j in range(opaque_zero(), SUB):
            tile = stage * SUB + j
            finish_wide(
                fp4.tiles.index(tile),
                q,
                fp4.wide.index(tile),
                weights,
                query,
                total_q,
                out,
                key + j * ROWS,
                windows,
                QUERIES,
                HEADS,
            )
