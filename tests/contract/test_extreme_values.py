"""Finite in, finite out: values near the largest number of their dtype, in every form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import formula
import openmla

DTYPES = [torch.float32, torch.bfloat16]


def large(*shape: int, dtype: torch.dtype) -> Tensor:
    """Every column has one sign, so that nothing cancels and every sum would overflow."""
    top = torch.full(shape, torch.finfo(dtype).max, dtype=dtype)
    top[..., 1::2] *= -1
    return top


def assert_all_are(out: Tensor, value: Tensor) -> None:
    """An average of equal numbers is that number, but for the last bits of the weights: sums of up
    to 1300 of them, in two orders, each addition off by up to 2^-24."""
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out, value.expand_as(out), rtol=1e-5, atol=0.0)


def dense(v: Tensor, **options: object) -> Tensor:
    k_len, heads, _ = v.shape
    q = torch.randn(3, heads, 4).to(v.dtype)
    k = torch.randn(k_len, heads, 4).to(v.dtype)
    return openmla.mla_prefill(
        q,
        k,
        None,
        v,
        cu_seqlens_q=formula.cu_seqlens([3]),
        causal=False,
        cu_seqlens_k=formula.cu_seqlens([k_len]),
        **options,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", [2, 3, 700, 1300])  # one block of keys, then two and three
def test_dense(dtype: torch.dtype, keys: int):
    v = large(keys, 2, 6, dtype=dtype)
    assert_all_are(dense(v), v[0, 0])


@pytest.mark.parametrize("keys", [600, 1100])
def test_large_values_after_ordinary_ones(keys: int):
    v = torch.randn(keys, 1, 4)
    v[512:] = large(keys - 512, 1, 4, dtype=torch.float32)
    torch.manual_seed(0)
    got = dense(v)
    assert torch.isfinite(got).all()
    torch.manual_seed(0)
    want = dense(v * 2.0**-40).double() * 2.0**40
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0.0)


def test_a_sink_takes_its_share_of_large_values():
    v = large(600, 1, 4, dtype=torch.float32)
    torch.manual_seed(0)
    got = dense(v, sink=torch.tensor([7.0]))
    torch.manual_seed(0)
    small = dense(v * 2.0**-40, sink=torch.tensor([7.0]))
    torch.testing.assert_close(got.double(), small.double() * 2.0**40, rtol=1e-5, atol=0.0)
    assert (got.abs() < v[0].abs()).all()


def test_an_infinite_value_beside_large_ones_stays_where_it_is():
    v = large(600, 1, 4, dtype=torch.float32)
    v[3, 0, 2] = torch.inf
    got = dense(v)
    assert (got[..., 2] == torch.inf).all()
    assert_all_are(got[..., [0, 1, 3]], v[0, 0, [0, 1, 3]])


@pytest.mark.parametrize("format", ["bf16", "fp8_token"])
def test_latent(format: str):
    cache = openmla.LatentCache.allocate(num_pages=9, page_size=64, latent=6, rope=2, format=format)
    rows = large(576, 6, dtype=torch.bfloat16)
    cache.append(rows, torch.randn(576, 2), torch.arange(576))
    out = openmla.mla_prefill_latent(
        torch.zeros(2, 3, 8, dtype=torch.bfloat16),
        cache,
        torch.arange(9, dtype=torch.int32)[None],
        torch.tensor([570], dtype=torch.int32),
        cu_seqlens_q=formula.cu_seqlens([2]),
        scale=1.0,
    )
    assert_all_are(out, rows[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("topk", [3, 1500])
def test_sparse(dtype: torch.dtype, topk: int):
    rows = large(7, 6, dtype=dtype)
    out = openmla.mla_prefill_sparse(
        torch.zeros(2, 3, 6, dtype=dtype),
        rows,
        torch.randint(0, 7, (2, topk), dtype=torch.int32),
        scale=1.0,
        d_v=6,
    )
    assert_all_are(out, rows[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge(dtype: torch.dtype):
    out = large(1, 2, 4, dtype=dtype)
    merged, lse = openmla.merge_states(out, torch.zeros(1, 2), out, torch.zeros(1, 2))
    assert_all_are(merged, out[0, 0])
    assert torch.allclose(lse, torch.tensor(2.0).log())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_of_unequal_parts(dtype: torch.dtype):
    """Shares that are rounded may sum to a little more than 1."""
    out = large(200, 2, 4, dtype=dtype)
    merged, _ = openmla.merge_many([out] * 3, list(torch.randn(3, 200, 2)))
    assert_all_are(merged, out[0, 0])
