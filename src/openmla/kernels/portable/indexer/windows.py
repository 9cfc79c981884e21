"""Windows of queries over a paged cache, and new keys for it, plain Triton.

| kernel | a program computes | reads | writes |
|---|---|---|---|
| windows_kernel | QUERIES queries | cu_seqlens_q, cache_lengths | windows, sequences, the longest |
| append_kernel | one token | its key and slot | a row of a page and its scale |
| append_fp4_kernel | one token | its key and slot | 64 bytes of a page and 4 exponents |

Results have the bits of openmla.indexer.windows and IndexCache.write, which run on the CPU.
"""

# Device code: Triton gives its values their types.
# ruff: noqa: PLR0913

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.indexer.cache import LEAST_AMAX, LEAST_AMAX_FP4, MXFP4, MXFP4_BLOCK, IndexCache
from openmla.indexer.operands import FoundWindows, Requests, Windows
from openmla.indexer.problem import DIM
from openmla.kernels.call import PLAIN_LAUNCH, WORKSPACE, Call, vector
from openmla.kernels.portable.cache_ops import E4M3_MAX, LARGEST_E2M1, e2m1_bits, e4m3_bits

QUERIES, SEQUENCES = 64, 128
_LEAST_AMAX = tl.constexpr(LEAST_AMAX)
_LEAST_AMAX_FP4 = tl.constexpr(LEAST_AMAX_FP4)
_BLOCK = tl.constexpr(MXFP4_BLOCK)
_BLOCKS = tl.constexpr(DIM // MXFP4_BLOCK)


@triton.jit(do_not_specialize=["total_q", "batch", "width", "least"])
def windows_kernel(
    cu_ptr,
    lengths_ptr,
    starts_ptr,
    ends_ptr,
    scored_ptr,
    sequences_ptr,
    longest_ptr,
    total_q,
    batch,
    width,
    least,
    QUERIES: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """A window begins at column 0. With lengths it ends at the query's own key, otherwise at width.

    A query's sequence is the number of sequences that end before it or at it.
    """
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    inside = query < total_q
    if starts_ptr is not None:
        tl.store(starts_ptr + query, tl.zeros([QUERIES], tl.int32), mask=inside)
    if lengths_ptr is None and ends_ptr is not None:
        tl.store(ends_ptr + query, tl.zeros([QUERIES], tl.int32) + width, mask=inside)
    if cu_ptr is not None:
        place = tl.zeros([QUERIES], tl.int32)
        longest = tl.zeros([SEQUENCES], tl.int32)
        for first in tl.range(0, batch, SEQUENCES):
            b = first + tl.arange(0, SEQUENCES)
            stop = tl.load(cu_ptr + b + 1, mask=b < batch, other=0x7FFFFFFF)
            place += tl.sum((stop[None, :] <= query[:, None]).to(tl.int32), 1)
            if lengths_ptr is not None:
                longest = tl.maximum(longest, tl.load(lengths_ptr + b, mask=b < batch, other=0))
        owned = (place < batch) & inside
        tl.store(sequences_ptr + query, tl.where(owned, place, 0), mask=inside)
        if lengths_ptr is not None:
            stop = tl.load(cu_ptr + place + 1, mask=owned, other=0)
            length = tl.load(lengths_ptr + place, mask=owned, other=0)
            end = tl.where(owned, tl.maximum(length - stop + query + 1, 0), 0)
            tl.store(ends_ptr + query, end, mask=inside)
            if scored_ptr is not None:
                tl.store(scored_ptr + query, tl.where(end > least, end, 0), mask=inside)
            if tl.program_id(0) == 0:
                tl.store(longest_ptr, tl.max(longest, 0))


def paged_windows(
    cu_seqlens_q: Tensor, cache_lengths: Tensor, total_q: int, least: int = 0
) -> FoundWindows:
    """Windows over a cache, bottom-right causal; those of at most `least` keys need no scores."""
    device = cu_seqlens_q.device
    starts, ends, scored, sequences = (_ints(total_q, device) for _ in range(4))
    requests = Requests(cu_seqlens_q, cache_lengths)
    seen = Windows(starts, ends, sequences, _ints(1, device), requests)
    written = {
        "starts_ptr": starts,
        "ends_ptr": ends,
        "scored_ptr": scored,
        "sequences_ptr": sequences,
        "longest_ptr": seen.longest,
    }
    found = replace(seen, ends=scored, requests=replace(requests, least=least))
    call = _writing(written, total_q, cu_seqlens_q, cache_lengths, least=least)
    return FoundWindows(seen, found, call)


def given_windows(
    starts: Tensor | None,
    ends: Tensor | None,
    total_q: int,
    width: int,
    device: torch.device,
    cu_seqlens_q: Tensor | None = None,
) -> FoundWindows:
    """Windows of the caller, from the first column to the last where there are none; with
    `cu_seqlens_q`, the sequences that queries are of."""
    written = {
        "starts_ptr": None if starts is not None else _ints(total_q, device),
        "ends_ptr": None if ends is not None else _ints(total_q, device),
        "sequences_ptr": None if cu_seqlens_q is None else _ints(total_q, device),
    }
    first = written["starts_ptr"] if starts is None else starts
    last = written["ends_ptr"] if ends is None else ends
    assert first is not None and last is not None
    found = Windows(first, last, written["sequences_ptr"])
    missing = any(x is not None for x in written.values())
    call = _writing(written, total_q, cu_seqlens_q, width=width) if missing else None
    return FoundWindows(found, found, call)


def _ints(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.int32, device=device)


def _writing(
    written: Mapping[str, Tensor | None],
    total_q: int,
    cu_seqlens_q: Tensor | None,
    cache_lengths: Tensor | None = None,
    width: int = 0,
    least: int = 0,
) -> Call:
    """The one launch; nothing waits for it."""
    arguments = {
        "cu_ptr": vector(cu_seqlens_q),
        "lengths_ptr": vector(cache_lengths),
        "scored_ptr": None,
        "longest_ptr": None,
        **written,
        "total_q": total_q,
        "batch": 0 if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1,
        "width": width,
        "least": least,
        "QUERIES": QUERIES,
        "SEQUENCES": SEQUENCES,
        **PLAIN_LAUNCH,
    }
    sources = {"cu_ptr": "cu_seqlens_q", "lengths_ptr": "cache_lengths"}
    sources |= dict.fromkeys(written, WORKSPACE)
    return Call(windows_kernel, max(-(-total_q // QUERIES), 1), arguments, sources)


@triton.jit(do_not_specialize=["rows"])
def append_kernel(
    k_ptr,
    slots_ptr,
    values_ptr,
    scales_ptr,
    rows,
    k_stride,
    values_stride,
    scales_stride,
    PAGE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Quantize one key; a slot outside the pool is skipped."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if (slot < 0) | (slot >= rows):
        return
    column = tl.arange(0, 128)
    x = tl.load(k_ptr + token * k_stride + column).to(tl.float32)
    broken = (x != x) | (tl.abs(x) == float("inf"))
    amax = tl.maximum(tl.max(tl.where(broken, 0.0, tl.abs(x)), 0), _LEAST_AMAX)
    scale = tl.math.div_rn(amax, tl.zeros_like(amax) + E4M3_MAX)
    if POWER_OF_TWO:  # up to the next one: the mantissa carries into the exponent
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = bits.to(tl.float32, bitcast=True)
    scale = tl.where(tl.max(broken.to(tl.int32), 0) > 0, float("nan"), scale)
    scaled = tl.math.div_rn(x, scale + tl.zeros_like(x))
    clamped = tl.minimum(tl.maximum(scaled, -E4M3_MAX), E4M3_MAX)
    code = e4m3_bits(tl.where(scaled != scaled, scaled, clamped))
    page = slot // PAGE
    tl.store(values_ptr + page * values_stride + slot % PAGE * 128 + column, code)
    tl.store(scales_ptr + page * scales_stride + slot % PAGE, scale)


@triton.jit(do_not_specialize=["rows"])
def append_fp4_kernel(
    k_ptr,
    slots_ptr,
    codes_ptr,
    exponents_ptr,
    rows,
    k_stride,
    codes_stride,
    exponents_stride,
    PAGE: tl.constexpr,
):
    """Quantize one key to e2m1, 32 columns with an exponent; a slot outside the pool is skipped."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if (slot < 0) | (slot >= rows):
        return
    block = tl.arange(0, _BLOCKS)
    column = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    x = tl.load(k_ptr + token * k_stride + column).to(tl.float32)
    broken = tl.max(((x != x) | (tl.abs(x) == float("inf"))).to(tl.int32), 1) > 0
    x = tl.where(broken[:, None], 0.0, x)
    largest = tl.maximum(tl.max(tl.abs(x), 1), _LEAST_AMAX_FP4)
    scale = tl.math.div_rn(largest, tl.zeros_like(largest) + LARGEST_E2M1)
    # Up to the next power of two: the mantissa carries into the exponent.
    power = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    scale = power.to(tl.float32, bitcast=True)
    code = e2m1_bits(tl.math.div_rn(x, scale[:, None] + tl.zeros_like(x)))
    low, high = tl.split(code.reshape(_BLOCKS, _BLOCK // 2, 2))
    byte = block[:, None] * (_BLOCK // 2) + tl.arange(0, _BLOCK // 2)[None, :]
    page, place = slot // PAGE, slot % PAGE
    row = codes_ptr + page * codes_stride + place * (_BLOCKS * _BLOCK // 2)
    tl.store(row + byte, low | high << 4)
    exponent = tl.where(broken, 255, power >> 23).to(tl.uint8)
    tl.store(exponents_ptr + page * exponents_stride + place * _BLOCKS + block, exponent)


def append(cache: IndexCache, k: Tensor, slots: Tensor) -> None:
    """`IndexCache.append` for checked arguments on the cache's own device."""
    if not k.shape[0] or not cache.rows:
        return
    k = k if k.stride(1) == 1 else k.contiguous()
    if cache.scales == MXFP4:
        codes, exponents = cache.codes_view, cache.exponents_view
        append_fp4_kernel[(k.shape[0],)](
            k,
            vector(slots),
            codes,
            exponents,
            cache.rows,
            k.stride(0),
            codes.stride(0),
            exponents.stride(0),
            PAGE=cache.page_size,
            **PLAIN_LAUNCH,
        )
        return
    values, scales = cache.values_view.view(torch.uint8), cache.scales_view
    append_kernel[(k.shape[0],)](
        k,
        vector(slots),
        values,
        scales,
        cache.rows,
        k.stride(0),
        values.stride(0),
        scales.stride(0),
        PAGE=cache.page_size,
        POWER_OF_TWO=cache.scales == "ue8m0",
        **PLAIN_LAUNCH,
    )
