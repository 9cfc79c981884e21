"""What a type checker makes of the public calls. `make lint` checks this file; a test runs it."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import Tensor

import openmla
from openmla.distributed import prefill, split

CU = torch.tensor([0, 4], dtype=torch.int32)
Pair = tuple[Tensor, Tensor]


def dense(wanted: bool) -> None:
    q, k, v = torch.randn(4, 2, 24), torch.randn(4, 2, 16), torch.randn(4, 2, 16)
    rope = torch.randn(4, 8)
    plain = openmla.mla_prefill(q, k, rope, v, cu_seqlens_q=CU)
    assert_type(plain, Tensor)
    with_lse = openmla.mla_prefill(q, k, rope, v, cu_seqlens_q=CU, causal=False, return_lse=True)
    assert_type(with_lse, Pair)
    either = openmla.mla_prefill(q, k, rope, v, cu_seqlens_q=CU, return_lse=wanted)
    assert_type(either, Tensor | Pair)
    assert isinstance(plain, Tensor) and len(with_lse) == 2 and isinstance(either, tuple) == wanted


def latent() -> None:
    cache = torch.randn(1, 16, 24).bfloat16()
    q, table = torch.randn(4, 2, 24).bfloat16(), torch.tensor([[0]]).int()
    lengths = torch.tensor([4]).int()
    plain = openmla.mla_prefill_latent(q, cache, table, lengths, cu_seqlens_q=CU, scale=1.0, d_v=16)
    assert_type(plain, Tensor)
    with_lse = openmla.mla_prefill_latent(
        q, cache, table, lengths, cu_seqlens_q=CU, scale=1.0, d_v=16, return_lse=True
    )
    assert_type(with_lse, Pair)
    assert torch.equal(plain, with_lse[0])


def sparse() -> None:
    q, kv, indices = torch.randn(4, 2, 24), torch.randn(9, 24), torch.zeros(4, 3).int()
    plain = openmla.mla_prefill_sparse(q, kv, indices, scale=1.0, d_v=16)
    assert_type(plain, Tensor)
    lse = openmla.mla_prefill_sparse(q, kv, indices, scale=1.0, d_v=16, return_lse=True)
    assert_type(lse, Pair)
    most = openmla.mla_prefill_sparse(q, kv, indices, scale=1.0, d_v=16, return_max_logits=True)
    assert_type(most, Tensor | tuple[Tensor, ...])
    assert len(most) == 2 and torch.equal(plain, lse[0])


def on_ranks() -> None:
    shard = split([4], world=1, rank=0)
    rows, rope, q = (torch.randn(*s).bfloat16() for s in ((4, 16), (4, 8), (4, 2, 24)))

    def expand(latent: Tensor) -> Pair:
        k = latent[:, None].expand(-1, 2, -1)
        return k, k

    plain = prefill(q, rows, rope, expand, shard)
    assert_type(plain, Tensor)
    with_lse = prefill(q, rows, rope, expand, shard, overlap=True, return_lse=True)
    assert_type(with_lse, Pair)
    assert torch.equal(plain, with_lse[0])
