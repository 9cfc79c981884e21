"""LatentCache.append (quantize and scatter) and gather (dequantize) on a GPU, plain Triton.

| kernel | a program computes | reads | writes |
|---|---|---|---|
| append_kernel | one token | its latent and rope, its slot | one cache row and its scales |
| gather_kernel | ROWS rows | row numbers, cache rows, scales | bf16 [rows, width] |

Bit-equal to openmla.cache on the CPU: IEEE division, round to nearest even, e4m3 made from the bits
of the fp32. A slot outside the pool is skipped, a row outside it reads as zeros.
"""

# ruff: noqa: PLR0913

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.cache import LatentCache
from openmla.formats import LARGEST, Writer
from openmla.kernels.call import PLAIN_LAUNCH, WORKSPACE, Call, Sources
from openmla.kernels.portable.formats import (
    next_power_of_2,
    row_constants,
    row_strides,
    row_tensors,
)
from openmla.kernels.portable.plan import padded
from openmla.kernels.portable.records import RowBlock
from openmla.kernels.portable.rows import read_columns, upcast

E4M3_MAX = tl.constexpr(LARGEST["e4m3"])
LARGEST_E2M1 = tl.constexpr(LARGEST["e2m1"])
GATHER_ROWS = 16


@triton.jit
def e4m3_bits(x):
    """fp32 in ±448 (or NaN) -> e4m3 bits, uint8, rounded to nearest even."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Normal: keep 3 of 23 mantissa bits, move the exponent's bias from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the step is 2^-9, which is the step of an fp32 at 2^14.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    small = shifted.to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def to_e4m3_bits(x):
    """fp32 -> e4m3 bits, with ±448 at most; NaN stays."""
    clamped = tl.minimum(tl.maximum(x, -E4M3_MAX), E4M3_MAX)
    return e4m3_bits(tl.where(x != x, x, clamped))


@triton.jit
def e2m1_bits(x):
    """fp32 -> e2m1 codes, uint8: nearest, ties to the even code, ±6 at most; NaN is +6."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.uint32) + (size >= 0.75).to(tl.uint32)
    code += (size > 1.25).to(tl.uint32) + (size >= 1.75).to(tl.uint32)
    code += (size > 2.5).to(tl.uint32) + (size >= 3.5).to(tl.uint32) + (size > 5.0).to(tl.uint32)
    code |= (x.to(tl.uint32, bitcast=True) >> 28) & 8
    return tl.where(x != x, 7, code).to(tl.uint8)


@triton.jit
def _scales(amax, has_nan, ROW: tl.constexpr, RULE: tl.constexpr):
    """The scale of each block, fp32, by a writer's rule: openmla.formats.ScaleRule."""
    largest = tl.maximum(amax, RULE.least_amax)
    most = tl.full(amax.shape, LARGEST_E2M1 if ROW.is_fp4 else E4M3_MAX, tl.float32)
    scale = tl.maximum(tl.math.div_rn(largest, most), RULE.least)
    if ROW.has_e4m3_scales:
        bits = e4m3_bits(tl.where(has_nan, float("nan"), tl.minimum(scale, E4M3_MAX)))
        scale = upcast(bits, tl.float32)
    else:
        known = has_nan == 0
        if RULE.zero_is_one:
            known = known & (amax > 0.0)
        scale = tl.where(known, scale, 1.0)
        if RULE.powers_of_two:  # the mantissa carries into the exponent
            bits = (scale.to(tl.uint32, bitcast=True) + 0x7FFFFF) & 0x7F800000
            scale = bits.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _quantize(x, inside, ROW: tl.constexpr, RULE: tl.constexpr):
    """Blocks [blocks, columns] -> codes and one scale per block; `inside`: columns that exist."""
    magnitude = tl.where(inside, tl.abs(x), 0.0)
    amax = tl.max(magnitude, 1)
    has_nan = tl.max((magnitude != magnitude).to(tl.int32), 1) > 0
    scale = _scales(amax, has_nan, ROW, RULE)
    scaled = tl.math.div_rn(x, scale[:, None] + tl.zeros_like(x))
    if ROW.is_fp4:
        code = e2m1_bits(scaled)
    else:
        code = to_e4m3_bits(scaled)
    return code, scale


@triton.jit
def _load_columns(latent_row, rope_row, column, inside, D_LATENT: tl.constexpr):
    """Columns of a token's row, latent and then rope, as fp32."""
    x = tl.load(latent_row + column, mask=inside & (column < D_LATENT), other=0.0).to(tl.float32)
    if rope_row is not None:
        in_rope = inside & (column >= D_LATENT)
        rope = tl.load(rope_row + (column - D_LATENT), mask=in_rope, other=0.0).to(tl.float32)
        x = tl.where(in_rope, rope, x)
    return x


@triton.jit
def _store_bytes(pointers, words, inside, BYTES: tl.constexpr):
    """Little-endian words at any address: rows of bytes may begin anywhere."""
    for i in tl.static_range(BYTES):
        tl.store(pointers + i, (words >> (8 * i)).to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def append_kernel(
    latent_ptr,
    rope_ptr,
    slots_ptr,
    data_ptr,
    scale_ptr,
    rows,
    latent_stride,
    rope_stride,
    slots_stride,
    data_stride_page,
    data_stride_t,
    scale_stride_page,
    scale_stride_t,
    D_LATENT: tl.constexpr,
    D_ROPE: tl.constexpr,
    USED: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TAIL: tl.constexpr,
    ROW: tl.constexpr,
    RULE: tl.constexpr,
    PAGE: tl.constexpr,
):
    """USED blocks that share a scale, as a tile [BLOCKS, COLUMNS], and up to TAIL other columns."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token * slots_stride).to(tl.int64)
    if (slot < 0) | (slot >= rows):
        return
    data_row = data_ptr + slot // PAGE * data_stride_page + slot % PAGE * data_stride_t
    latent_row = latent_ptr + token * latent_stride
    rope_row = rope_ptr + token * rope_stride if D_ROPE > 0 else None
    QUANTIZED: tl.constexpr = ROW.quantized
    if QUANTIZED > 0:
        block = tl.arange(0, BLOCKS)
        place = tl.arange(0, COLUMNS)
        column = block[:, None] * ROW.scale_block + place[None, :]
        inside = (place < ROW.scale_block)[None, :] & (column < QUANTIZED)
        x = _load_columns(latent_row, rope_row, column, inside, D_LATENT)
        code, scale = _quantize(x, inside, ROW, RULE)
        if ROW.is_fp4:
            tl.static_assert(ROW.scale_block == COLUMNS, "a block of FP4 columns fills its tile")
            low, high = tl.split(code.reshape(BLOCKS, COLUMNS // 2, 2))
            byte = block[:, None] * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)[None, :]
            tl.store(data_row + byte, low | high << 4, mask=byte * 2 < QUANTIZED)
        else:
            tl.store(data_row + column, code, mask=inside)
        if ROW.has_exponents:
            scale = (scale.to(tl.uint32, bitcast=True) >> 23).to(tl.uint8)
        elif ROW.has_e4m3_scales:
            scale = e4m3_bits(scale)
        LANES: tl.constexpr = ROW.scale_lanes
        lies = block % LANES * (USED // LANES) + block // LANES
        if ROW.scales_at == 0:
            scales = scale_ptr + slot // PAGE * scale_stride_page + slot % PAGE * scale_stride_t
            tl.store(scales + lies, scale, mask=block < USED)
        elif ROW.has_exponents or ROW.has_e4m3_scales:
            tl.store(data_row + ROW.scales_at + lies, scale, mask=block < USED)
        else:
            words = scale.to(tl.uint32, bitcast=True)
            _store_bytes(data_row + ROW.scales_at + lies * 4, words, block < USED, 4)
    if QUANTIZED < D_LATENT + D_ROPE:
        place = tl.arange(0, TAIL)
        inside = place < D_LATENT + D_ROPE - QUANTIZED
        x = _load_columns(latent_row, rope_row, QUANTIZED + place, inside, D_LATENT)
        if QUANTIZED == 0:
            tl.store(data_row + place, x.to(tl.bfloat16), mask=inside)
        elif ROW.has_e4m3_tail:
            tl.store(data_row + ROW.tail_at + place, to_e4m3_bits(x), mask=inside)
        else:
            words = x.to(tl.bfloat16).to(tl.uint16, bitcast=True)
            _store_bytes(data_row + ROW.tail_at + place * 2, words, inside, 2)


@triton.jit(do_not_specialize=["rows", "count"])
def gather_kernel(
    data_ptr,
    scale_ptr,
    rows_ptr,
    out_ptr,
    rows,
    count,
    data_stride_page,
    data_stride_t,
    scale_stride_page,
    scale_stride_t,
    rows_stride,
    out_stride,
    D_LATENT: tl.constexpr,
    D_ROPE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    ROW: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS pool rows as bf16, into consecutive rows of out; without rows_ptr, all in order."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    listed = at < count
    if rows_ptr is None:
        row = tl.where(listed, at, -1)
    else:
        row = tl.load(rows_ptr + at * rows_stride, mask=listed, other=-1).to(tl.int64)
    ok = (row >= 0) & (row < rows)
    row = tl.where(ok, row, 0)
    data_row = row // PAGE * data_stride_page + row % PAGE * data_stride_t
    scale_row = row // PAGE * scale_stride_page + row % PAGE * scale_stride_t
    out_row = out_ptr + (at * out_stride)[:, None]
    column = tl.arange(0, LATENT)
    block = RowBlock(data_ptr, scale_ptr, data_row, scale_row, ok)
    latent = read_columns(block, 0, D_LATENT, LATENT, ROW, tl.bfloat16, True)
    tl.store(out_row + column[None, :], latent, mask=listed[:, None] & (column < D_LATENT)[None, :])
    if D_ROPE > 0:
        column = tl.arange(0, ROPE)
        rope = read_columns(block, D_LATENT, D_ROPE, ROPE, ROW, tl.bfloat16, True)
        inside = listed[:, None] & (column < D_ROPE)[None, :]
        tl.store(out_row + D_LATENT + column[None, :], rope, mask=inside)


def append(
    cache: LatentCache,
    latent: Tensor,
    rope: Tensor | None,
    slot_mapping: Tensor,
    writer: Writer = "openmla",
) -> None:
    """`LatentCache.append` for checked arguments on the cache's own device."""
    tokens = latent.shape[0]
    if not tokens:
        return
    layout = cache.layout
    data, scales = row_tensors(cache, native_e4m3=False)
    latent = _rows_contiguous(latent)
    rope = _rows_contiguous(rope) if rope is not None and cache.rope else None
    append_kernel[(tokens,)](
        latent_ptr=latent,
        rope_ptr=rope,
        slots_ptr=slot_mapping,
        data_ptr=data,
        scale_ptr=scales,
        rows=cache.rows,
        latent_stride=latent.stride(0),
        rope_stride=0 if rope is None else rope.stride(0),
        slots_stride=slot_mapping.stride(0),
        **row_strides(data, scales),
        D_LATENT=cache.latent,
        D_ROPE=cache.rope,
        USED=layout.blocks,
        BLOCKS=next_power_of_2(layout.blocks),
        COLUMNS=next_power_of_2(layout.block),
        TAIL=next_power_of_2(layout.width - layout.quantized),
        ROW=row_constants(cache),
        RULE=layout.format.scale_rule(writer),
        PAGE=cache.page_size,
        **PLAIN_LAUNCH,
    )


def gather(cache: LatentCache, rows: Tensor, out: Tensor) -> None:
    """`LatentCache.gather` into out, for checked row numbers on the cache's own device."""
    if rows.shape[0]:
        _gathering(cache, rows, out).run()


def dequantized(cache: LatentCache) -> tuple[LatentCache, Call]:
    """A bf16 cache with the same pages, and the launch that fills it with every row of `cache`."""
    shape = (cache.num_pages, cache.page_size, cache.width)
    out = torch.empty(shape, dtype=torch.bfloat16, device=cache.device)
    call = _gathering(cache, None, out.view(cache.rows, cache.width))
    return LatentCache(out, None, cache.latent, cache.rope, "bf16"), call


def _gathering(cache: LatentCache, rows: Tensor | None, out: Tensor) -> Call:
    data, scales = row_tensors(cache, native_e4m3=False)
    arguments = {
        "data_ptr": data,
        "scale_ptr": scales,
        "rows_ptr": rows,
        "out_ptr": out,
        "rows": cache.rows,
        "count": out.shape[0],
        **row_strides(data, scales),
        "rows_stride": 0 if rows is None else rows.stride(0),
        "out_stride": out.stride(0),
        "D_LATENT": cache.latent,
        "D_ROPE": cache.rope,
        "LATENT": padded(cache.latent),
        "ROPE": padded(cache.rope),
        "ROW": row_constants(cache),
        "PAGE": cache.page_size,
        "ROWS": GATHER_ROWS,
        **PLAIN_LAUNCH,
    }
    sources: Sources = {
        "data_ptr": ("kv", "cache_data"),
        "scale_ptr": "cache_scales",
        "out_ptr": WORKSPACE,
    }
    return Call(gather_kernel, -(-out.shape[0] // GATHER_ROWS), arguments, sources)


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
