"""The sparse backend on vLLM's tensors: caches, head counts, shards, empty rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import formula
from integrations.vllm import fake_vllm, selected
from openmla import Unsupported, merge_many
from openmla.integrations.vllm.forward import Shard

BF16 = 2.0**-8


@pytest.mark.parametrize("kind", selected.FORMATS)
@pytest.mark.parametrize("heads", [1, 12])
def test_every_cache_any_head_count(kind: str, heads: int):
    batch = selected.batch(kind, heads)
    out, lse = batch.attend()
    want = batch.exact()
    formula.assert_close(out, want.out, bound=BF16)
    formula.assert_close(lse, want.lse)
    assert not out[7].any()


def test_queries_may_come_in_one_piece():
    batch = selected.batch("bf16")
    parts = batch.attend()
    whole = torch.cat(batch.q, dim=-1)
    object.__setattr__(batch, "q", whole)
    assert all(formula.same_bits(a, b) for a, b in zip(parts, batch.attend(), strict=True))


def test_the_ranks_of_a_shard_merge_to_the_whole():
    """Decode context parallelism: rank r holds every second token, in pages of its own."""
    batch, ranks = selected.batch("bf16"), 2
    want = batch.exact()
    parts = []
    for rank in range(ranks):
        pages = torch.full_like(batch.pages, torch.nan)
        for request, length in enumerate(selected.LENGTHS):
            token = torch.arange(rank, length, ranks)
            local, table = torch.arange(len(token)), batch.table[request].long()
            row = batch.values[
                table[token // selected.PAGE] * selected.PAGE + token % selected.PAGE
            ]
            pages[table[local // selected.PAGE], local % selected.PAGE] = row
        mine = selected.Batch(
            batch.q, pages, batch.values, batch.tokens, batch.requests, batch.table, "auto"
        )
        parts.append(mine.attend(Shard(ranks, rank)))
    out, lse = merge_many([p[0] for p in parts], [p[1] for p in parts])
    formula.assert_close(out, want.out, bound=2 * BF16)
    formula.assert_close(lse, want.lse)


def test_what_has_no_kernel_is_refused_when_the_layer_is_made():
    with fake_vllm.installed() as vllm:
        from openmla.integrations.vllm.sparse import OpenMLASparseImpl

        hisparse = vllm["vllm.v1.attention.backends.mla.index_group"]["HiSparseMLAIndexGroup"]
        with pytest.raises(Unsupported, match="HiSparse"):
            OpenMLASparseImpl(index_group=hisparse())
        with pytest.raises(Unsupported, match="without rope"):
            OpenMLASparseImpl(kv_cache_dtype="fp8_ds_mla", qk_rope_head_dim=0)


def test_what_the_backend_says_to_vllm():
    with fake_vllm.installed():
        from openmla.integrations.vllm import sparse
    backend = sparse.OpenMLASparseBackend
    assert backend.get_name() == "OPENMLA_SPARSE"
    assert backend.is_mla() and backend.is_sparse()
    assert backend.supported_kv_cache_dtypes == ["auto", "bfloat16", "fp8_ds_mla"]
    assert backend.get_impl_cls().can_return_lse_for_decode
    assert backend.get_builder_cls()().reorder_batch_threshold == 1
    capable = backend.supports_compute_capability
    assert [capable(SimpleNamespace(major=major)) for major in (7, 8)] == [False, True]
