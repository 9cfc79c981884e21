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


@pytest.mark.parametrize("kind", ["fp8", "fp8 between other layers"])
def test_fp8_queries_are_multiplied_by_vllms_scale(kind: str):
    batch = selected.batch(kind).fp8_queries()
    out, lse = batch.attend()
    want = batch.exact()
    formula.assert_close(out, want.out, bound=BF16)
    formula.assert_close(lse, want.lse)


@pytest.mark.parametrize(
    ("cache", "asked", "offered"),
    [
        ("fp8", True, True),
        ("fp8", False, False),
        ("auto", True, False),
        ("fp8_ds_mla", True, False),
    ],
)
def test_queries_are_quantized_where_the_user_asked_for_it(
    cache: str, asked: bool, offered: bool, monkeypatch: pytest.MonkeyPatch
):
    wishes = fake_vllm.CONFIG.attention_config
    monkeypatch.setattr(wishes, "use_prefill_query_quantization", asked)
    with fake_vllm.installed():
        from openmla.integrations.vllm.sparse import OpenMLASparseImpl

        layer = OpenMLASparseImpl(kv_cache_dtype=cache, qk_rope_head_dim=64)
    assert layer.supports_quant_query_input is offered


@pytest.mark.parametrize("name", ["auto", "fp8", "fp8_e4m3"])
def test_on_a_cpu_rows_are_written_as_they_are_read(name: str):
    torch.manual_seed(0)
    fp8 = name.startswith("fp8")
    pages = torch.zeros(3, 16, 576, dtype=torch.uint8 if fp8 else torch.bfloat16)
    latent, rope = torch.randn(4, 512).bfloat16(), torch.randn(4, 1, 64).bfloat16()
    latent[0, 0] = 1e4  # saturates
    slots, scale = torch.tensor([40, -1, 3, 16]), torch.tensor(0.05)
    with fake_vllm.installed():
        from openmla.integrations.vllm.sparse import OpenMLASparseImpl

        layer = OpenMLASparseImpl(kv_cache_dtype=name, kv_lora_rank=512, qk_rope_head_dim=64)
    layer.do_kv_cache_update(latent, rope, pages, slots, name, scale)
    got = layer._cache(pages, scale).gather(slots[[0, 2, 3]])
    want = torch.cat([latent, rope[:, 0]], dim=-1)[[0, 2, 3]]
    if fp8:
        want = want.float().clamp(-448 * scale, 448 * scale)
        assert ((got.float() - want).abs() <= 2**-4 * want.abs() + 2**-10 * scale).all()
        assert got[0, 0] == torch.tensor(448 * 0.05).bfloat16()
    else:
        assert torch.equal(got, want)
    assert not pages.view(torch.uint8)[0, 0].any()


def test_drafted_tokens_find_their_requests_again():
    """A draft graph is captured with one batch and replayed for another, in the same buffers."""
    with fake_vllm.installed():
        from openmla.integrations.vllm.sparse import OpenMLASparseMetadataBuilder

        builder = OpenMLASparseMetadataBuilder()
        assert builder.supports_draft_decode_metadata_update
        parallel = SimpleNamespace(decode_context_parallel_size=1)
        config = SimpleNamespace(num_speculative_tokens=3, parallel_config=parallel)
        assert builder.get_varlen_cudagraph_max_query_len(config, None) == 4
        parallel.decode_context_parallel_size = 2  # where vLLM takes them for prefills
        assert builder.get_varlen_cudagraph_max_query_len(config, None) == 1
        builder.dcp_world_size = 2
        builder.__init__()  # type: ignore[misc]
        assert not builder.supports_draft_decode_metadata_update
    buffer = torch.full((8,), -1, dtype=torch.int32)
    starts = torch.zeros(6, dtype=torch.int32)
    metadata = SimpleNamespace(num_decode_tokens=5, req_id_per_token=buffer, query_start_loc=starts)
    for lengths in ([1, 1, 1, 1, 1], [2, 1, 2, 0, 0], [1, 1, 0, 0, 0]):
        starts[1:] = torch.tensor(lengths).cumsum(0)
        builder.update_draft_decode_metadata(metadata)
        real = sum(lengths)
        want = torch.arange(5).repeat_interleave(torch.tensor(lengths))
        assert buffer[:real].tolist() == want.tolist()
        assert ((buffer[:5] >= 0) & (buffer[:5] < 5)).all() and (buffer[5:] == -1).all()
    metadata.num_decode_tokens = 0
    builder.update_draft_decode_metadata(metadata)


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
    assert backend.supported_kv_cache_dtypes == [
        *("auto", "bfloat16", "fp8_ds_mla"),
        *("fp8", "fp8_e4m3"),
    ]
    assert backend.get_impl_cls().can_return_lse_for_decode
    assert backend.get_builder_cls()().reorder_batch_threshold == 1
    capable = backend.supports_compute_capability
    assert [capable(SimpleNamespace(major=major)) for major in (7, 8)] == [False, True]
