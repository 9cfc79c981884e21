"""IndexCache: the page's bytes, quantization, skipped slots, refusals."""

from __future__ import annotations

import doctest

import pytest
import torch

from openmla import IndexCache, InvalidArgument
from openmla.indexer import cache as module
from openmla.indexer.cache import LEAST_AMAX, quantize


def test_examples() -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("scales", ["ue8m0", "fp32"])
@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_a_page_is_all_values_then_all_scales(page_size: int, scales: str) -> None:
    cache = IndexCache.allocate(num_pages=3, page_size=page_size, scales=scales)
    k = torch.randn(3, 128)
    slots = torch.randperm(cache.rows)[:3] if page_size > 1 else torch.tensor([2, 0, 1])
    cache.append(k, slots)
    values, factors = quantize(k, scales)
    for i, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, page_size)
        row = cache.data[page, offset * 128 : offset * 128 + 128]
        assert torch.equal(row, values[i].view(torch.uint8))
        at = page_size * 128 + offset * 4
        assert cache.data[page, at : at + 4].view(torch.float32) == factors[i]
    got, got_scales = cache.gather(slots)
    assert torch.equal(got.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(got_scales, factors)


@pytest.mark.parametrize("scales", ["ue8m0", "fp32"])
def test_quantization_is_within_half_a_step(scales: str) -> None:
    k = torch.randn(64, 128) * torch.logspace(-8, 4, 64)[:, None]
    values, factors = quantize(k, scales)
    assert ((values.float() * factors[:, None] - k).abs().amax(1) <= 16.01 * factors).all()
    least = k.abs().amax(1).clamp_min(LEAST_AMAX) / 448
    if scales == "fp32":
        assert torch.equal(factors, least)
    else:
        assert (torch.frexp(factors).mantissa == 0.5).all()
        assert ((factors >= least) & (factors < 2 * least)).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("scales", ["ue8m0", "fp32"])
def test_a_broken_key_has_a_nan_scale(bad: float, scales: str) -> None:
    k = torch.randn(2, 128)
    k[1, 77] = bad
    assert quantize(k, scales)[1].isnan().tolist() == [False, True]


def test_negative_slots_are_skipped() -> None:
    cache = IndexCache.allocate(num_pages=2, page_size=4)
    before = cache.data.clone()
    cache.append(torch.randn(3, 128), torch.tensor([-1, -7, -1], dtype=torch.int32))
    assert torch.equal(cache.data, before)
    cache.append(torch.ones(2, 128), torch.tensor([-1, 6]))
    assert (cache.gather(torch.arange(8))[1] > 0).tolist() == [s == 6 for s in range(8)]


def test_a_cache_in_a_larger_pool_is_read_in_place() -> None:
    """Pages apart from each other, as where one allocation holds the pages of several layers."""
    pool = torch.full((2, 3, 4 * 132), 255, dtype=torch.uint8)
    cache = IndexCache(pool[:, 1], 4)
    cache.append(torch.ones(1, 128), torch.tensor([7]))
    values, scales = cache.gather(torch.tensor([7]))
    assert float(values[0, 5].float() * scales[0]) == 1.0
    assert (pool[:, 0] == 255).all() and (pool[:, 2] == 255).all()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: IndexCache(torch.zeros(2, 131, dtype=torch.uint8), 1), "data"),
        (lambda: IndexCache(torch.zeros(2, 132), 1), "data"),
        (lambda: IndexCache(torch.zeros(2, 133, dtype=torch.uint8)[:, 1:], 1), "data"),
        (lambda: IndexCache([1], 1), "data"),
        (lambda: IndexCache(torch.zeros(2, 132, dtype=torch.uint8), 0), "page_size"),
        (lambda: IndexCache.allocate(num_pages=2, scales="e8"), "scales"),
        (lambda: IndexCache.allocate(num_pages=-1), "num_pages"),
        (lambda: IndexCache.allocate(num_pages=1, page_size=0), "page_size"),
    ],
)
def test_malformed_caches_are_refused(make, name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name}: expected"):
        make()


@pytest.mark.parametrize(
    ("k", "slots", "name"),
    [
        (torch.zeros(2, 127), torch.tensor([0, 1]), "k"),
        (torch.zeros(2, 128).int(), torch.tensor([0, 1]), "k"),
        (torch.zeros(2, 128), torch.tensor([0]), "slot_mapping"),
        (torch.zeros(2, 128), torch.tensor([0.0, 1.0]), "slot_mapping"),
        (torch.zeros(2, 128), torch.tensor([0, 8]), "slot_mapping"),
        (torch.zeros(2, 128), [0, 1], "slot_mapping"),
    ],
)
def test_malformed_appends_write_nothing(k, slots, name: str) -> None:
    cache = IndexCache.allocate(num_pages=2, page_size=4)
    with pytest.raises(InvalidArgument, match=f"^{name}: expected"):
        cache.append(k, slots)
    assert not cache.data.any()


def test_rows_outside_the_pool_are_refused() -> None:
    cache = IndexCache.allocate(num_pages=2, page_size=4)
    for slots in (torch.tensor([8]), torch.tensor([-1])):
        with pytest.raises(InvalidArgument, match=r"^slots: expected"):
            cache.gather(slots)
