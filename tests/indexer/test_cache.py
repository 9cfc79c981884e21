"""IndexCache: the page's bytes, quantization, skipped slots, refusals."""

from __future__ import annotations

import doctest
from dataclasses import replace

import pytest
import torch

import openmla
from openmla import IndexCache, InvalidArgument
from openmla.indexer import cache as module
from openmla.indexer.cache import LEAST_AMAX, quantize
from openmla.indexer.problem import IndexProblem


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


VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nearest_e2m1(x: float) -> float:
    """The nearest value; of two that are as near, the one whose code is even."""
    size = min(VALUES, key=lambda v: (abs(abs(x) - v), VALUES.index(v) % 2))
    return -size if x < 0 else size


def test_fp4_keys_are_rounded_block_by_block() -> None:
    """32 columns share the least power of two that brings them within 6; ties to even codes."""
    torch.manual_seed(0)
    k = torch.randn(5, 128) * torch.logspace(-4, 4, 5)[:, None]
    k[0, :32] = torch.arange(32) * 0.25 - 4.0  # every tie of e2m1 but one, signs included
    k[0, 0], k[1, :32], k[2, 32:64] = 6.0, 0.0, 1e-45
    k[0, 33] = 5.0 * float(k[0, 32:64].abs().amax())
    slots = torch.tensor([9, 0, 3, 4, 11])
    cache = IndexCache.allocate(num_pages=3, page_size=4, scales="mxfp4")
    assert cache.data.shape == (3, 4 * 68) and cache.key_dtype == "e2m1"
    cache.append(k, slots)
    got, scales = cache.gather(slots)
    assert got.dtype == torch.float32 and torch.equal(scales, torch.ones(5))
    for row in range(5):
        for first in range(0, 128, 32):
            block = k[row, first : first + 32].double()
            power = 2.0**-126
            while float(block.abs().amax()) > 6 * power:
                power *= 2
            expected = [nearest_e2m1(x / power) * power for x in block.tolist()]
            assert got[row, first : first + 32].tolist() == expected


def test_a_page_of_fp4_keys_is_all_codes_then_all_exponents() -> None:
    cache = IndexCache.allocate(num_pages=2, page_size=4, scales="mxfp4")
    k = torch.zeros(1, 128)
    k[0, :4], k[0, 127] = torch.tensor([1.0, -1.0, 6.0, 0.5]), 24.0
    cache.append(k, torch.tensor([6]))
    page = cache.data[1]
    assert page[128:130].tolist() == [0xA2, 0x17] and page[191] == 0x70
    assert page[4 * 64 + 8 : 4 * 64 + 12].tolist() == [127, 1, 1, 129]
    assert not cache.data[0].any() and not page[:128].any() and not page[192:256].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_fp4_block_is_nan(bad: float) -> None:
    k = torch.ones(1, 128)
    k[0, 40] = bad
    cache = IndexCache.allocate(num_pages=1, page_size=1, scales="mxfp4")
    cache.append(k, torch.tensor([0]))
    got = cache.gather(torch.tensor([0]))[0][0]
    assert got[32:64].isnan().all() and (got[:32] == 1).all() and (got[64:] == 1).all()


def test_fp4_keys_in_a_larger_pool() -> None:
    pool = torch.full((2, 3, 4 * 68), 255, dtype=torch.uint8)
    cache = IndexCache(pool[:, 1], 4, "mxfp4")
    cache.append(torch.ones(1, 128), torch.tensor([7]))
    assert (cache.gather(torch.tensor([7]))[0] == 1).all()
    assert (pool[:, 0] == 255).all() and (pool[:, 2] == 255).all()
    with pytest.raises(InvalidArgument, match=r"data: expected .*\[pages, 528\]"):
        IndexCache(pool[:, 1], 4)


def test_fp4_keys_have_hoppers_kernel_and_a_portable_one() -> None:
    problem = IndexProblem(
        form="scores", heads=32, page_size=64, total_q=4, width=256, key_dtype="e2m1"
    )
    assert "e2m1 keys" in str(problem)
    assert openmla.plan(problem, "cpu").backend == "cpu"
    chosen = openmla.plan(problem, "h200")
    assert chosen.backend == "hopper" and chosen.config.fp4
    for target, family in (("b200", "blackwell"), ("mi355x", "cdna4")):
        chosen = openmla.plan(problem, target)
        assert chosen.backend == "portable" and not chosen.config.native_products
        with pytest.raises(openmla.Unsupported, match="key_dtype e2m1: e4m3"):
            openmla.plan(problem, target, family)
    with pytest.raises(InvalidArgument, match="key_dtype: expected one of e4m3, e2m1"):
        replace(problem, key_dtype="int4")
    with pytest.raises(InvalidArgument, match="key_dtype: expected e4m3 without pages, got e2m1"):
        replace(problem, page_size=0)
