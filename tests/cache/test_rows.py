"""LatentCache: what is written comes back, in every format; wrong writes change nothing.

The bound of a round trip. e4m3 keeps 3 bits after the leading one, so a value of 2^-6 or more in
units of the scale moves by at most 2^-4 of itself, a smaller one by at most 2^-10 of the scale.
With scale = amax/448, or the next power of two, and bf16's own 2^-9 on top (2^-8 is generous):

    |back - x| <= max(|x| * 2^-4, scale * 2^-10) + |x| * 2^-8
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import calls
import formula
from openmla import InvalidArgument, LatentCache, Unsupported
from openmla.problem import CACHE_FORMATS

FP8_FORMATS = [name for name in CACHE_FORMATS if name.startswith("fp8")]
BLOCKS = {
    "fp8_656": 128,
    "fp8_block32": 32,
    "fp8_block64": 64,
    "fp8_block128": 128,
    "fp8_584": 64,
    "fp8_528_v32": 128,
    "fp8_528_v41": 32,
    "fp8_528_v41_split": 32,
}


def allocate(format: str, pages: int = 3, page_size: int = 4) -> LatentCache:
    latent, rope = calls.widths_of(format)
    return LatentCache.allocate(
        num_pages=pages, page_size=page_size, latent=latent, rope=rope, format=format
    )


def write(cache: LatentCache, values: Tensor, slots: Tensor) -> None:
    cache.append(values[:, : cache.latent], values[:, cache.latent :], slots)


def raw(cache: LatentCache) -> list[Tensor]:
    tensors = [cache.data] if cache.scales is None else [cache.data, cache.scales]
    return [formula.bits(t).clone() for t in tensors]


def round_trip_bound(values: Tensor, block: int, most: float) -> Tensor:
    bound = torch.empty_like(values)
    for first in range(0, values.shape[1], block):
        part = values[:, first : first + block].abs()
        scale = part.amax(1, keepdim=True) / 448 * most
        bound[:, first : first + block] = torch.maximum(part * 2**-4, scale * 2**-10) + part * 2**-8
    return bound


@pytest.mark.parametrize("spread", [1.0, 1e-30, 1e30], ids=["unit", "tiny", "huge"])
@pytest.mark.parametrize("format", FP8_FORMATS)
def test_fp8_round_trip_stays_within_the_error_of_the_format(format: str, spread: float):
    cache = allocate(format)
    values = calls.numbers(6, cache.width) * spread
    values[:, ::7] *= 1e-3  # a wide range inside every block
    slots = torch.tensor([11, 0, 5, 3, 7, 8])
    write(cache, values, slots)
    back = cache.gather(slots)
    powers_of_two = format in ("fp8_584", "fp8_528_v41", "fp8_528_v41_split")
    most = 2.0 if powers_of_two else 1.0  # less than twice amax/448
    bound = round_trip_bound(values, BLOCKS.get(format, cache.width), most)
    if format in ("fp8_656", "fp8_584"):  # their rope is plain bf16
        rope = slice(cache.latent, None)
        assert formula.same_bits(back[:, rope], values[:, rope].to(torch.bfloat16))
    assert ((back.double() - values.double()).abs() <= bound.double()).all()


def test_bf16_round_trip_is_one_rounding():
    values, slots = calls.numbers(6, 576), torch.tensor([11, 0, 5, 3, 7, 8])
    cache = allocate("bf16")
    write(cache, values, slots)
    assert formula.same_bits(cache.gather(slots), values.to(torch.bfloat16))


@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_only_the_named_rows_change(format: str):
    cache = allocate(format)
    write(cache, calls.numbers(12, cache.width), torch.arange(12))
    before = cache.gather(torch.arange(12))
    write(cache, calls.numbers(2, cache.width, seed=1), torch.tensor([9, 2]))
    after = cache.gather(torch.arange(12))
    changed = [i for i in range(12) if not formula.same_bits(before[i], after[i])]
    assert changed == [2, 9]


@pytest.mark.parametrize("format", FP8_FORMATS)
def test_largest_element_of_a_block_comes_back_exactly_and_zeros_stay_zero(format: str):
    cache = allocate(format)
    values = torch.zeros(1, cache.width)
    values[0, 5] = -448 * 0.25
    values[0, 6] = 1.0
    write(cache, values, torch.tensor([6]))
    assert formula.same_bits(cache.gather(torch.tensor([6])), values.to(torch.bfloat16))


@pytest.mark.parametrize("amax", [1e-45, 1e-43, 1e-40, 1e-38], ids=str)
def test_a_block_of_denormals_gives_no_nan(amax: float):
    values = torch.zeros(1, 12)
    values[0, 3] = amax
    cache = LatentCache.allocate(num_pages=1, page_size=1, latent=8, rope=4, format="fp8_token")
    write(cache, values, torch.tensor([0]))
    back = cache.gather(torch.tensor([0])).float()
    assert (back >= 0).all() and (back <= 2 * amax + 1e-40).all()


@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_a_pool_with_gaps_works_and_the_gaps_stay_untouched(format: str):
    plain = allocate(format)
    wide = torch.full((3, 4, 2, plain.data.shape[2]), 7.0).to(plain.data.dtype)
    scales = None
    if plain.scales is not None:
        scales = torch.full((3, 6, plain.scales.shape[2]), 5.0).to(plain.scales.dtype)[:, 1:5]
    gapped = LatentCache(wide[:, :, 0], scales, plain.latent, plain.rope, format)
    values, slots = calls.numbers(12, plain.width), torch.randperm(12)
    write(plain, values, slots)
    write(gapped, values, slots)
    assert not gapped.data.is_contiguous()
    assert formula.same_bits(gapped.gather(slots), plain.gather(slots))
    assert (wide[:, :, 1].float() == 7).all()


def test_wrapped_tensors_are_used_where_they_are():
    data = calls.numbers(2, 3, 12, dtype=torch.bfloat16)
    cache = LatentCache(data, None, 8, 4, "bf16")
    assert (cache.num_pages, cache.page_size, cache.rows, cache.width) == (2, 3, 6, 12)
    assert cache.nbytes == 2 * 3 * 12 * 2
    assert formula.same_bits(cache.gather(torch.tensor([4])), data[1, 1][None])
    cache.append(torch.ones(1, 8), torch.zeros(1, 4), torch.tensor([0]))
    assert data[0, 0].tolist() == [1.0] * 8 + [0.0] * 4


@pytest.mark.parametrize(
    ("format", "bytes_per_token"),
    [
        ("bf16", 1152),
        ("fp8_656", 656),
        ("fp8_block32", 648),
        ("fp8_block64", 612),
        ("fp8_block128", 596),
        ("fp8_token", 580),
        ("fp8_584", 584),
        ("fp8_528_v32", 528),
        ("fp8_528_v41", 528),
        ("fp8_528_v41_split", 528),
        ("fp4_288", 288),
        ("fp4_288_split", 288),
        ("nvfp4_352", 352),
    ],
)
def test_bytes_per_token(format: str, bytes_per_token: int):
    assert allocate(format, pages=5, page_size=64).nbytes == 5 * 64 * bytes_per_token


def test_the_656_byte_row_has_the_layout_that_other_readers_expect():
    cache = allocate("fp8_656")
    values = calls.numbers(1, cache.width)
    write(cache, values, torch.tensor([6]))
    row = cache.data[1, 2]
    scales = row[512:528].clone().view(torch.float32)
    expected = values[0, :512].view(4, 128).abs().amax(1) / 448
    assert torch.equal(scales, expected)
    stored = row[:512].clone().view(torch.float8_e4m3fn)
    wanted = (values[0, :512].view(4, 128) / expected[:, None]).clamp(-448, 448).flatten()
    assert formula.same_bits(stored, wanted.to(torch.float8_e4m3fn))
    assert formula.same_bits(
        row[528:].clone().view(torch.bfloat16), values[0, 512:].to(torch.bfloat16)
    )


def test_the_584_byte_row_has_the_layout_that_other_readers_expect():
    """Engines keep a page as its rows of 576 bytes, then their scales, then padding."""
    page_size, values = 5, calls.numbers(3, 512)
    pages = torch.full((2, 6 * 576), 255, dtype=torch.uint8)  # a scale of 255 is NaN
    rows = pages[:, : page_size * 576].unflatten(1, (page_size, 576))
    behind = pages[:, page_size * 576 : page_size * 584].unflatten(1, (page_size, 8))
    cache = LatentCache(rows, behind, 512, 0, "fp8_584")
    cache.append(values, None, torch.tensor([7, 0, 4]))
    exponents = torch.ceil(torch.log2(values[0, :448].double().view(7, 64).abs().amax(1) / 448))
    start = page_size * 576 + 2 * 8  # row 7 is row 2 of page 1
    assert pages[1, start : start + 8].tolist() == [*(exponents.int() + 127).tolist(), 255]
    scaled = values[0, :448].view(7, 64) / torch.exp2(exponents).float()[:, None]
    row = pages[1, 2 * 576 : 3 * 576].clone()
    wanted = scaled.flatten().to(torch.float8_e4m3fn)
    assert formula.same_bits(row[:448].view(torch.float8_e4m3fn), wanted)
    assert formula.same_bits(row[448:].view(torch.bfloat16), values[0, 448:].to(torch.bfloat16))
    back = (wanted.float().view(7, 64) * torch.exp2(exponents).float()[:, None]).flatten()
    want = torch.cat([back, values[0, 448:]]).to(torch.bfloat16)
    assert formula.same_bits(cache.gather(torch.tensor([7])), want[None])
    assert (pages[:, page_size * 584 :] == 255).all() and (rows[0, 1:4] == 255).all()


def test_every_exponent_is_its_power_of_two():
    cache = LatentCache.allocate(num_pages=1, page_size=256, latent=512, rope=0, format="fp8_584")
    cache.data.view(torch.uint8)[..., :448] = 0x38  # 1.0
    assert cache.scales is not None
    cache.scales[0, :, :7] = torch.arange(256, dtype=torch.uint8)[:, None]
    got = cache.gather(torch.arange(256))[:, :448].double()
    want = torch.exp2(torch.arange(-127, 128, dtype=torch.float64))
    assert torch.equal(got[:255], want[:, None].expand(255, 448))
    assert got[255].isnan().all()


def test_a_cache_without_rope_takes_none():
    cache = LatentCache.allocate(num_pages=1, page_size=2, latent=8, rope=0)
    cache.append(torch.ones(1, 8), None, torch.tensor([1]))
    assert cache.gather(torch.tensor([0, 1])).tolist() == [[0.0] * 8, [1.0] * 8]


@pytest.mark.parametrize("format", CACHE_FORMATS)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("latent", {"latent": torch.ones(2, 577)}),
        ("latent", {"latent": lambda latent: latent.int()}),
        ("rope", {"rope": lambda rope: rope[:1] if rope.shape[1] == 0 else None}),
        ("rope", {"rope": torch.ones(1, 64)}),
        ("slot_mapping", {"slot_mapping": torch.tensor([0, 12])}),
        ("slot_mapping", {"slot_mapping": torch.tensor([-1, 0])}),
        ("slot_mapping", {"slot_mapping": torch.tensor([0])}),
        ("slot_mapping", {"slot_mapping": torch.tensor([0.0, 1.0])}),
    ],
    ids=["width", "dtype", "no-rope", "rope-tokens", "past-end", "negative", "count", "float"],
)
def test_a_wrong_append_writes_nothing(format: str, name: str, change: dict[str, Any]):
    cache = allocate(format)
    write(cache, calls.numbers(12, cache.width), torch.arange(12))
    before = raw(cache)
    good = {
        "latent": torch.ones(2, cache.latent),
        "rope": torch.ones(2, cache.rope),
        "slot_mapping": torch.tensor([1, 0]),
    }
    if callable(change.get(name)):
        change = {name: change[name](good[name])}
    with pytest.raises(InvalidArgument) as caught:
        cache.append(**{**good, **change})
    assert caught.value.name == name
    assert all(torch.equal(a, b) for a, b in zip(before, raw(cache), strict=True))


def test_an_append_that_would_need_a_gradient_is_refused():
    cache = allocate("bf16")
    before = raw(cache)
    with pytest.raises(Unsupported, match="latent requires a gradient"):
        cache.append(torch.ones(1, 512, requires_grad=True), torch.ones(1, 64), torch.tensor([0]))
    assert torch.equal(before[0], raw(cache)[0]) and not cache.data.requires_grad


@pytest.mark.parametrize("rows", [[12], [-1, 0]], ids=["past-end", "negative"])
def test_gather_checks_its_rows(rows: list[int]):
    with pytest.raises(InvalidArgument, match="rows: expected rows 0 to 11"):
        allocate("bf16").gather(torch.tensor(rows))
