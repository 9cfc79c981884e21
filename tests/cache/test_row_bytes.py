"""V3.2 without rope, V4.1 and NVFP4: every byte is what the formats' publishers write.

`row_bytes` writes the same rows in plain Python.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import calls
import formula
from cache import row_bytes
from openmla import (
    InvalidArgument,
    LatentCache,
    Listed,
    Span,
    mla_attend,
    mla_prefill_latent,
    mla_prefill_sparse,
)
from openmla.formats import FORMATS, WRITERS, Writer

FORMATS_HERE = [*row_bytes.ROW_BYTES]
FP4 = [name for name in FORMATS_HERE if "fp4" in name]


def width_of(format: str) -> int:
    return sum(FORMATS[format].widths[0])


def pool_of(format: str, page_size: int, pages: int = 3, gap: int = 48) -> Tensor:
    """Pages of bytes as engines keep them, with other bytes between."""
    stride = row_bytes.page_stride(format, page_size)
    return torch.full((pages, stride + gap), 0xEE, dtype=torch.uint8)


def wrapped(pool: Tensor, format: str, page_size: int) -> LatentCache:
    return LatentCache.from_pages(pool, page_size=page_size, format=format)


def allocated(format: str, rows: int) -> LatentCache:
    rope = width_of(format) - 512
    return LatentCache.allocate(num_pages=1, page_size=rows, rope=rope, format=format)


def write(cache: LatentCache, rows: Tensor, slots: list[int], writer: Writer = "openmla") -> None:
    rope = rows[:, cache.latent :] if cache.rope else None
    cache.append(rows[:, : cache.latent], rope, torch.tensor(slots), writer=writer)


def expected(
    pool: Tensor, format: str, page_size: int, rows: Tensor, slots: list[int], by: str
) -> Tensor:
    """The bytes of the whole pool after the rows were written."""
    pool = pool.clone()
    flat = pool.view(-1)
    for row, slot in zip(rows.tolist(), slots, strict=True):
        at, behind = row_bytes.place(format, page_size, slot, pool.stride(0))
        for start, part in zip((at, behind), row_bytes.encode(row, format, by), strict=True):
            flat[start : start + len(part)] = torch.tensor([*part], dtype=torch.uint8)
    return pool


def drawn(format: str) -> Tensor:
    """Rows whose blocks cover ordinary, tiny, huge and awkward numbers."""
    width = width_of(format)
    rows = calls.numbers(12, width)
    rows[1] = 0
    rows[2] *= torch.logspace(-8, 3, width)
    rows[3] *= 1e-5
    rows[4] *= 1e-39  # subnormal numbers, and scales that would be
    rows[5] *= 1e4  # FP4 saturates
    rows[6] = 2.0 ** (torch.arange(width) // 16 % 40 - 20)  # amax is a power of two
    rows[7] = torch.where(torch.arange(width) % 16 == 0, 1.0, 1 / 3) * 448 * 2.0**-9
    rows[8] = (torch.arange(width) % 16 - 8) * 0.375  # ties of e2m1, at many scales
    rows[8] *= 2.0 ** (torch.arange(width) // 32 % 7 - 3)
    rows[9] = -0.0
    rows[9, ::3] = 6 * 2.0**-9  # the least scale of FP4
    rows[10] = torch.nextafter(rows[6], torch.tensor(torch.inf))
    rows[11] = torch.nextafter(rows[6], torch.tensor(0.0))
    return rows


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("format", FORMATS_HERE)
def test_bytes_are_those_of_a_plain_writer(format: str, writer: Writer):
    rows, slots = drawn(format), [14, 0, 7, 3, 9, 1, 12, 5, 11, 2, 8, 6]
    before = pool_of(format, page_size=5)
    pool = before.clone()
    write(wrapped(pool, format, 5), rows, slots, writer)
    wanted = expected(before, format, 5, rows, slots, writer)
    assert torch.equal(pool, wanted)


@pytest.mark.parametrize("format", FORMATS_HERE)
def test_values_are_those_of_a_plain_reader(format: str):
    """Random bytes; NaN aside, and scales that leave fp32."""
    page_size, generator = 4, torch.Generator().manual_seed(3)
    pool = torch.randint(0, 256, pool_of(format, page_size).shape, generator=generator)
    pool = pool.to(torch.uint8)
    pool[(pool & 0x7F) == 0x7F] = 0x10
    if "fp4" in format:
        pool &= 0x7F  # scales have no sign
    cache, wanted = wrapped(pool, format, page_size), []
    scales = cache.field("scales")
    assert scales is not None
    if format == "fp8_528_v32":
        scales.copy_(calls.numbers(3, page_size, 4).abs())
    elif format.startswith("fp8"):
        scales.copy_(torch.randint(30, 200, scales.shape, generator=generator))
    flat = pool.reshape(-1).tolist()
    each = row_bytes.ROW_BYTES[format] - row_bytes.BEHIND.get(format, 0)
    for row in range(cache.rows):
        at, behind = row_bytes.place(format, page_size, row, pool.stride(0))
        tail = flat[behind : behind + row_bytes.BEHIND.get(format, 0)]
        wanted.append(row_bytes.decode(bytes(flat[at : at + each]), bytes(tail), format))
    got = cache.gather(torch.arange(cache.rows))
    assert formula.same_bits(got, torch.tensor(wanted).bfloat16())


@pytest.mark.parametrize("format", [f for f in FORMATS_HERE if f != "fp8_528_v32"])
def test_what_was_read_is_written_back_unchanged(format: str):
    """Quantizing dequantized rows moves no value, as their products are exact in bf16."""
    cache = allocated(format, 12)
    slots = [*range(12)]
    write(cache, drawn(format), slots)
    once = cache.gather(torch.arange(12))
    write(cache, once, slots)
    assert formula.same_bits(cache.gather(torch.arange(12)), once)


@pytest.mark.parametrize("format", FP4)
def test_fp4_stays_within_the_error_of_the_format(format: str):
    """From 0.5 scales on, a number is at most a fifth of itself from the nearest (2.5 and 5 are
    halfway); below, a quarter of the scale, which is at most 2^-4 above amax/6."""
    rows = calls.numbers(8, width_of(format)) * torch.logspace(0, 2, 8)[:, None]
    cache = allocated(format, 8)
    write(cache, rows, [*range(8)])
    back = cache.gather(torch.arange(8)).float()
    amax = rows[:, :512].unflatten(1, (32, 16)).abs().amax(2).repeat_interleave(16, 1)
    bound = torch.maximum(rows[:, :512].abs() / 5, amax / 6 * 17 / 16 / 4)
    assert ((back - rows)[:, :512].abs() <= bound).all()
    if cache.rope:  # e4m3 without a scale
        rope = rows[:, 512:]
        bound = (rope.abs() / 16).clamp_min(2.0**-10)
        assert ((back[:, 512:] - rope).abs() <= bound).all()


@pytest.mark.parametrize("format", FP4)
def test_fp4_saturates_and_keeps_nan_in_its_block(format: str):
    width = width_of(format)
    rows = torch.ones(2, width)
    rows[0, 3], rows[0, 20] = torch.nan, torch.inf
    rows[1, 40], rows[1, 60] = 3000.0, -torch.inf
    if width > 512:
        rows[:, 512:516] = torch.tensor([1e6, -torch.inf, torch.nan, 500.0])
    cache = allocated(format, 2)
    write(cache, rows, [0, 1])
    got = cache.gather(torch.arange(2)).float()
    assert got[0, :16].isnan().all() and not got[:, 16:512].isnan().any()
    assert got[0, 20] == 2688 and got[1, 40] == 2688 and got[1, 60] == -2688
    if cache.rope:
        assert got[1, 512:514].tolist() == [448.0, -448.0]
        assert got[1, 514].isnan() and got[1, 515] == 448


@pytest.mark.parametrize("format", ["fp8_528_v32", "fp8_528_v41", "fp8_528_v41_split"])
def test_fp8_keeps_nan_where_it_is(format: str):
    rows = torch.ones(1, 512)
    rows[0, 5], rows[0, 200] = torch.nan, torch.inf
    for writer in WRITERS:
        cache = allocated(format, 1)
        write(cache, rows, [0], writer)
        got = cache.gather(torch.arange(1))[0].float()
        block = 128 if format == "fp8_528_v32" else 32
        first = 200 // block * block
        assert got[5].isnan() and (got[:5] == 1).all() and (got[6:block] == 1).all()
        rest = torch.cat([got[block:first], got[first + block :]])
        assert not got[first : first + block].isfinite().all() and (rest == 1).all()


@pytest.mark.parametrize("format", FORMATS_HERE)
def test_rows_past_two_gibibytes(format: str):
    stride = 2**31 + 16
    pool = torch.empty(stride + 4096, dtype=torch.uint8).as_strided((2, 4096), (stride, 1))
    near, row = pool_of(format, 4, gap=4096), calls.numbers(1, width_of(format))
    for pages in (pool, near):
        pages[1] = 0xEE
        write(wrapped(pages, format, 4), row, [6])
    assert torch.equal(pool[1], near[1, :4096])
    got = [wrapped(pages, format, 4).gather(torch.tensor([6])) for pages in (pool, near)]
    assert formula.same_bits(*got)


def plain_copy(cache: LatentCache) -> LatentCache:
    """The same rows as bf16; what `gather` returns is compared with the plain reader above."""
    rows = cache.gather(torch.arange(cache.rows))
    data = rows.view(cache.num_pages, cache.page_size, cache.width).clone()
    return LatentCache(data, None, cache.latent, cache.rope, "bf16")


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("format", FORMATS_HERE)
def test_attention_has_the_bits_of_the_same_rows_as_bf16(format: str, backend: str):
    page_size, width = 4, width_of(format)
    pool = pool_of(format, page_size)
    cache = wrapped(pool, format, page_size)
    write(cache, calls.numbers(12, width), [*range(12)])
    plain = plain_copy(cache)
    q = calls.numbers(3, 2, width, seed=5).bfloat16()
    lists = torch.tensor([[0, 11, -1], [5, 5, 7], [12, 2, 9]], dtype=torch.int32)
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    i32 = {"dtype": torch.int32}

    def results(rows: LatentCache) -> list[Any]:
        span = Span(
            rows,
            table,
            torch.zeros(3, **i32),
            torch.tensor([0, 2, 5], **i32),
            torch.tensor([3, 9, 12], **i32),
        )
        options: dict[str, Any] = {"scale": 0.05, "return_lse": True, "backend": backend}
        lengths = {"cu_seqlens_q": torch.tensor([0, 3], **i32), "causal": True}
        return [
            *mla_prefill_sparse(q, rows, lists, **options),
            *mla_prefill_latent(q, rows, table, torch.tensor([11], **i32), **lengths, **options),
            *mla_attend(q, [span, Listed(rows, lists)], **options),
        ]

    for one, other in zip(results(cache), results(plain), strict=True):
        assert formula.same_bits(one, other)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("pages", {"pages": [1, 2]}),
        ("pages", {"pages": torch.zeros(2, 2048)}),
        ("pages", {"pages": torch.zeros(2, 4 * 528 - 1, dtype=torch.uint8)}),
        ("pages", {"pages": torch.zeros(2, 4, 528, dtype=torch.uint8)}),
        ("pages", {"pages": torch.zeros(4224, 2, dtype=torch.uint8).t()}),
        ("page_size", {"page_size": 0}),
        ("page_size", {"page_size": 4.0}),
        ("format", {"format": "fp8_528"}),
        ("format", {"format": "fp8_token"}),
        ("format", {"rope": 64}),
        ("format", {"latent": 256}),
    ],
)
def test_wrong_pools_are_refused(name: str, changes: dict[str, Any]):
    good: dict[str, Any] = {
        "pages": torch.zeros(2, 4224, dtype=torch.uint8),
        "page_size": 4,
        "format": "fp8_528_v41",
    }
    assert LatentCache.from_pages(**good).rows == 8
    with pytest.raises(InvalidArgument) as caught:
        LatentCache.from_pages(**good | changes)
    assert caught.value.name == name


def test_bf16_pages_at_odd_bytes_are_refused():
    pages = torch.zeros(2 * 4609, dtype=torch.uint8).as_strided((2, 4608), (4609, 1))
    with pytest.raises(InvalidArgument, match="pages"):
        LatentCache.from_pages(pages, page_size=4, format="bf16")
    assert LatentCache.from_pages(pages[:, :4608].clone(), page_size=4, format="bf16").rows == 8


def test_an_unknown_writer_is_refused_and_writes_nothing():
    cache = allocated("fp4_288", 1)
    with pytest.raises(InvalidArgument, match="writer: expected one of openmla, flash_mla, vllm"):
        cache.append(torch.ones(1, 512), None, torch.tensor([0]), writer="sglang")  # type: ignore[arg-type]
    assert not cache.data.any()


@pytest.mark.parametrize(
    ("format", "page_size", "stride"),
    [
        ("fp8_584", 2, 1728),
        ("fp8_584", 64, 37440),
        ("fp8_584", 256, 149760),
        ("fp8_528_v41_split", 32, 16896),
        ("fp8_528_v41_split", 5, 3072),
        ("fp8_528_v41", 5, 2640),
        ("fp4_288_split", 128, 36864),
        ("fp4_288_split", 5, 1536),
        ("fp4_288", 5, 1440),
        ("nvfp4_352", 64, 22528),
    ],
)
def test_bytes_from_page_to_page(format: str, page_size: int, stride: int):
    layout = FORMATS[format].layout(*FORMATS[format].widths[0])
    assert layout.page_bytes(page_size) == stride
