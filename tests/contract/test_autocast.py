"""A caller's autocast changes no bit: kernels choose the types of their products."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import openmla

E4M3 = torch.float8_e4m3fn


def dense_gradients() -> list[Tensor]:
    q, k, v = (torch.randn(9, 2, width, requires_grad=True) for width in (24, 16, 16))
    rope = torch.randn(9, 8, requires_grad=True)
    cu = torch.tensor([0, 9], dtype=torch.int32)
    out = openmla.mla_prefill(q, k, rope, v, cu_seqlens_q=cu)
    return [out, *torch.autograd.grad(out, (q, k, rope, v), torch.ones_like(out))]


def sparse_gradients() -> list[Tensor]:
    q, kv = torch.randn(4, 4, 96, requires_grad=True), torch.randn(64, 96, requires_grad=True)
    lists = torch.randint(0, 64, (4, 32), dtype=torch.int32)
    out = openmla.mla_prefill_sparse(q, kv, lists, scale=0.1, d_v=64)
    return [out, *torch.autograd.grad(out, (q, kv), torch.ones_like(out))]


def scores() -> list[Tensor]:
    q, weights = torch.randn(5, 4, 128).to(E4M3), torch.rand(5, 4)
    keys = torch.randn(40, 128).to(E4M3), torch.rand(40)
    return [openmla.indexer_scores(q, keys, weights)]


def loss() -> list[Tensor]:
    q, k, rope = torch.randn(9, 2, 24), torch.randn(9, 2, 16), torch.randn(9, 8)
    cu = torch.tensor([0, 9], dtype=torch.int32)
    _, lse = openmla.mla_prefill(q, k, rope, k, cu_seqlens_q=cu, return_lse=True)
    index_q = torch.randn(9, 4, 128, requires_grad=True)
    given = index_q, torch.randn(9, 128), torch.ones(9, 4)
    found = openmla.indexer_loss(*given, q, k, rope, lse, cu_seqlens_q=cu)
    return [found, *torch.autograd.grad(found.sum(), [index_q])]


@pytest.mark.parametrize("call", [dense_gradients, sparse_gradients, scores, loss])
def test_autocast_changes_no_bit(call: Callable[[], list[Tensor]]) -> None:
    torch.manual_seed(3)
    want = call()
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16):
        got = call()
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)
