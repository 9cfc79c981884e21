"""Reading tiles of keys, values and cache rows, shared by all portable kernels.

| function | reads |
|---|---|
| load_tile | any tile, with or without masks; masked elements are 0 |
| upcast | an e4m3 tile as a wider type, by the hardware or, for uint8 tiles, by its bits |
| load_query | columns of a tile of queries, ready to be multiplied |
| load_query_tile | the QueryTile of rows in latent form: latent columns, rope columns |
| page_of | where the rows of a paged cache lie |
| e2m1, power_of_two, scaled | what FP4 codes, ue8m0 bytes and blocks with a scale stand for |
| read_columns | columns of cache rows in any cache format, dequantized |

ROW, a CacheRow, says what a cache row holds. The value of a column with a scale is
bf16(fp32(element) * scale).
"""

from __future__ import annotations

import triton
import triton.language as tl

from openmla.kernels.portable.records import QueryTile
from openmla.kernels.portable.tiles import cut


@triton.jit
def load_tile(pointers, row_ok, column_ok, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr):
    """A 2-d tile; what the masks exclude is never read and becomes 0."""
    if MASK_ROWS and MASK_COLUMNS:
        tile = tl.load(pointers, mask=row_ok[:, None] & column_ok[None, :], other=0.0)
    elif MASK_ROWS:
        tile = tl.load(pointers, mask=row_ok[:, None], other=0.0)
    elif MASK_COLUMNS:
        tile = tl.load(pointers, mask=column_ok[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def upcast(x, TYPE: tl.constexpr):
    """x as TYPE. A uint8 tile holds e4m3 bits, for GPUs whose Triton does not convert them.

    An e4m3 number, moved to the bits of an fp16, is 256 times too small, subnormals included.
    """
    if x.dtype == tl.uint8:
        bits = x.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        x = tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
    return x.to(TYPE)


@triton.jit
def two_terms(x, TYPE: tl.constexpr):
    """x as the sum of two TYPE values: an fp16 is exactly two bf16, an fp32 within 2^-17."""
    first = x.to(TYPE)
    rest = (x.to(tl.float32) - first.to(tl.float32)).to(TYPE)
    return first, rest


@triton.jit
def load_query(
    pointers,
    row_ok,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TYPE: tl.constexpr,
    SIGN: tl.constexpr,
    TWO_TERMS: tl.constexpr,
):
    """A tile of queries [BM, COLUMNS] as TYPE, and its second term (without one, itself)."""
    tile = load_tile(pointers, row_ok, tl.arange(0, COLUMNS) < WIDTH, True, COLUMNS != WIDTH)
    if SIGN != 1:
        tile = upcast(tile, tl.float32) * SIGN
    if TWO_TERMS:
        first, rest = two_terms(tile, TYPE)
    else:
        first = upcast(tile, TYPE)
        rest = first
    return first, rest


@triton.jit
def load_query_tile(
    q_row,
    row_ok,
    D_LATENT: tl.constexpr,
    D_ROPE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    TYPE: tl.constexpr,
    SIGN: tl.constexpr,
    TWO_TERMS: tl.constexpr,
):
    """The QueryTile of rows at q_row [BM, 1]: D_LATENT columns, then D_ROPE."""
    latent, latent_rest = load_query(
        q_row + tl.arange(0, LATENT)[None, :], row_ok, D_LATENT, LATENT, TYPE, SIGN, TWO_TERMS
    )
    rope = latent
    rope_rest = latent
    if ROPE > 0:
        rope_row = q_row + D_LATENT + tl.arange(0, ROPE)[None, :]
        rope, rope_rest = load_query(rope_row, row_ok, D_ROPE, ROPE, TYPE, SIGN, TWO_TERMS)
    return QueryTile(latent, latent_rest, rope, rope_rest)


@triton.jit
def page_of(line, keys, key_ok, PAGE: tl.constexpr, MASKED: tl.constexpr):
    """(page, row in the page) of the keys of a sequence; line: its TableLine.

    Entries of keys that are not ok are never read.
    """
    entry = line.ptr + tl.minimum(keys // PAGE, line.entries - 1)
    if MASKED:
        page = tl.load(entry, mask=key_ok, other=0)
    else:
        page = tl.load(entry)
    return cut(page, line.last_page).to(tl.int64), (keys % PAGE).to(tl.int64)


@triton.jit
def _load_bytes(pointers, row_ok, column_ok, BYTES: tl.constexpr, MASK_COLUMNS: tl.constexpr):
    """Little-endian words of BYTES bytes at any address, as uint32."""
    words = tl.zeros(pointers.shape, tl.uint32)
    for i in tl.static_range(BYTES):
        byte = load_tile(pointers + i, row_ok, column_ok, True, MASK_COLUMNS)
        words |= byte.to(tl.uint8, bitcast=True).to(tl.uint32) << (8 * i)
    return words


@triton.jit
def _bf16_columns(
    rows,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROW: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Columns FIRST … FIRST+WIDTH-1 of a RowBlock, as far as they are bf16 beside e4m3; others are
    0."""
    AT: tl.constexpr = ROW.quantized - FIRST  # the first bf16 column
    SOME: tl.constexpr = AT > 0 or COLUMNS != WIDTH
    column = tl.arange(0, COLUMNS)
    if ROW.is_unaligned:
        # Bytes side by side: read two apart, Triton 3.6.0 stores the tile transposed for wgmma, and
        # with fewer than 64 rows multiplies it wrongly (H200).
        byte = tl.arange(0, 2 * COLUMNS)
        start = rows.data_ptr + ROW.tail_at + rows.data_row[:, None]
        pointers = start + (byte - 2 * AT)[None, :]
        tile = load_tile(pointers, rows.ok, (byte >= 2 * AT) & (byte < 2 * WIDTH), True, SOME)
        words = tile.to(tl.uint8, bitcast=True).to(tl.uint16)
        low, high = tl.split(words.reshape(tile.shape[0], COLUMNS, 2))
        values = (low | high << 8).to(tl.bfloat16, bitcast=True)
    else:
        start = (rows.data_ptr + ROW.tail_at).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        pointers = start + (rows.data_row // 2)[:, None] + (column - AT)[None, :]
        values = load_tile(pointers, rows.ok, (column >= AT) & (column < WIDTH), MASKED, SOME)
    return values


@triton.jit
def power_of_two(exponent):
    """2^(exponent - 127), as fp32: 0 is a subnormal number, 255 NaN."""
    bits = tl.where(exponent == 0, 0x400000, exponent.to(tl.uint32) << 23)
    return tl.where(exponent == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def _load_scales(
    rows,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROW: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Scales of columns FIRST … FIRST+WIDTH-1 of a RowBlock, fp32 [rows, runs of columns that share
    one]."""
    BLOCK: tl.constexpr = ROW.scale_block
    # The widest runs of columns that share a scale, wherever FIRST lies in its block.
    RUN: tl.constexpr = (
        COLUMNS if FIRST + WIDTH <= BLOCK else BLOCK if FIRST % BLOCK == 0 else FIRST & -FIRST
    )
    RUNS: tl.constexpr = COLUMNS // RUN if COLUMNS > RUN else 1
    USED: tl.constexpr = (WIDTH + RUN - 1) // RUN
    LANES: tl.constexpr = ROW.scale_lanes
    run = tl.arange(0, RUNS)
    block = (FIRST + run * RUN) // BLOCK
    if LANES > 1:
        block = block % LANES * (ROW.quantized // BLOCK // LANES) + block // LANES
    if ROW.scales_at == 0:
        pointers = rows.scale_ptr + rows.scale_row[:, None] + block[None, :]
        scales = load_tile(pointers, rows.ok, run < USED, MASKED, RUNS != USED)
        if ROW.has_exponents:
            scales = power_of_two(scales)
        elif ROW.has_e4m3_scales:
            scales = upcast(scales, tl.float32)
    elif ROW.has_exponents or ROW.has_e4m3_scales:
        pointers = rows.data_ptr + ROW.scales_at + rows.data_row[:, None] + block[None, :]
        stored = load_tile(pointers, rows.ok, run < USED, MASKED, RUNS != USED)
        if ROW.has_exponents:
            scales = power_of_two(stored.to(tl.uint8, bitcast=True))
        else:
            scales = upcast(stored, tl.float32)
    elif ROW.is_unaligned:
        start = rows.data_ptr + ROW.scales_at + rows.data_row[:, None]
        pointers = start + (block * 4)[None, :]
        words = _load_bytes(pointers, rows.ok, run < USED, 4, RUNS != USED)
        scales = words.to(tl.float32, bitcast=True)
    else:
        start = (rows.data_ptr + ROW.scales_at).to(tl.pointer_type(tl.float32), bitcast=True)
        pointers = start + (rows.data_row // 4)[:, None] + block[None, :]
        scales = load_tile(pointers, rows.ok, run < USED, MASKED, RUNS != USED)
    return scales


@triton.jit
def scaled(x, scales):
    """x [rows, columns] times one scale per block of columns, scales [rows, blocks]."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    BLOCKS: tl.constexpr = scales.shape[1]
    grouped = x.reshape(ROWS, BLOCKS, COLUMNS // BLOCKS) * scales[:, :, None]
    return grouped.reshape(ROWS, COLUMNS)


@triton.jit
def e2m1(code):
    """The values of codes 0 to 15, fp32. Its bits, moved to those of an fp16, are 2^14 times too
    small, the subnormal 0.5 included."""
    bits = code.to(tl.uint16)
    half = ((bits & 8) << 12) | ((bits & 7) << 9)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def _fp4_columns(
    rows,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROW: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Columns FIRST … FIRST+WIDTH-1 of a RowBlock, e2m1 with scales, as bf16. Low and high halves
    of bytes are scaled apart: a block of columns is half as many of each."""
    tl.static_assert(FIRST % 2 == 0 and WIDTH % 2 == 0, "a byte holds two columns")
    byte = tl.arange(0, COLUMNS // 2)
    pointers = rows.data_ptr + rows.data_row[:, None] + (FIRST // 2 + byte)[None, :]
    packed = load_tile(pointers, rows.ok, byte < WIDTH // 2, MASKED, COLUMNS != WIDTH)
    scales = _load_scales(rows, FIRST, WIDTH, COLUMNS, ROW, MASKED)
    low = scaled(e2m1(packed & 15), scales).to(tl.bfloat16)
    high = scaled(e2m1(packed >> 4), scales).to(tl.bfloat16)
    return tl.join(low, high).reshape(packed.shape[0], COLUMNS)


@triton.jit
def _tail_columns(
    rows,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROW: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Columns FIRST … FIRST+WIDTH-1 of a RowBlock, all of them without scales, as bf16."""
    if ROW.has_e4m3_tail:
        column = tl.arange(0, COLUMNS)
        start = rows.data_ptr + ROW.tail_at + rows.data_row[:, None]
        pointers = start + (FIRST - ROW.quantized + column)[None, :]
        tile = load_tile(pointers, rows.ok, column < WIDTH, MASKED, COLUMNS != WIDTH)
        values = upcast(tile, tl.bfloat16)
    else:
        values = _bf16_columns(rows, FIRST, WIDTH, COLUMNS, ROW, MASKED)
    return values


@triton.jit
def read_columns(
    rows,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROW: tl.constexpr,
    TYPE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Columns FIRST … FIRST+WIDTH-1 of a RowBlock, padded to COLUMNS. MASKED: not all rows may be
    read."""
    column = tl.arange(0, COLUMNS)
    if ROW.quantized > 0 and ROW.quantized <= FIRST:
        tile = _tail_columns(rows, FIRST, WIDTH, COLUMNS, ROW, MASKED)
    elif ROW.is_fp4:
        tl.static_assert(ROW.quantized >= FIRST + WIDTH, "FP4 columns and others in one tile")
        tile = _fp4_columns(rows, FIRST, WIDTH, COLUMNS, ROW, MASKED)
    else:
        MIXED: tl.constexpr = ROW.quantized > 0 and ROW.quantized < FIRST + WIDTH
        ALIKE: tl.constexpr = ROW.quantized - FIRST if MIXED else WIDTH
        pointers = rows.data_ptr + rows.data_row[:, None] + (FIRST + column)[None, :]
        tile = load_tile(pointers, rows.ok, column < ALIKE, MASKED, COLUMNS != ALIKE)
        if ROW.quantized > 0:
            scales = _load_scales(rows, FIRST, ALIKE, COLUMNS, ROW, MASKED)
            tile = scaled(upcast(tile, tl.float32), scales).to(tl.bfloat16)
        if MIXED:
            rest = _bf16_columns(rows, FIRST, WIDTH, COLUMNS, ROW, MASKED)
            tile = tl.where((column < ALIKE)[None, :], tile, rest)
    return upcast(tile, TYPE)
