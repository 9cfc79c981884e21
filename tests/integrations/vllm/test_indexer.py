"""The indexer's op, the platform and the quantizer on stand-ins for vLLM's classes."""

from __future__ import annotations

import doctest
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from integrations.vllm import fake_vllm
from openmla import IndexCache, Unsupported
from openmla.integrations.vllm import queries

HEADS, TOPK, PAGE = 8, 4, 16
NEW, LENGTHS = (3, 1), (20, 33)
OP = "vllm.model_executor.layers.sparse_attn_indexer"


def test_the_op_writes_keys_and_selects_per_request(monkeypatch: pytest.MonkeyPatch):
    """Keys of both requests are in pages already, but for the new ones, which the op writes."""
    torch.manual_seed(0)
    with fake_vllm.installed():
        from openmla.integrations.vllm import indexer

        pages = torch.zeros(9, PAGE, indexer.ROW_BYTES, dtype=torch.uint8)[::2]  # apart
        table = torch.tensor([[3, 0, 9], [1, 4, 2]])  # no third page of the first: out of range
        buffer = torch.full((8, TOPK), -7, dtype=torch.int32)
        k_cache = SimpleNamespace(kv_cache=pages, prefix="layer.indexer")
        op = indexer.OpenMLAIndexer(k_cache, "ue8m0", TOPK, buffer)
        assert k_cache.get_attn_backend() is indexer.OpenMLAIndexBackend
        slots = [
            [int(t[i // PAGE]) * PAGE + i % PAGE for i in range(n)]
            for t, n in zip(table, LENGTHS, strict=True)
        ]
        keys = [torch.randn(n, 128).bfloat16() for n in LENGTHS]
        for key, slot, n in zip(keys, slots, NEW, strict=True):
            op._cache().append(key[:-n], torch.tensor(slot[:-n]))
        q = torch.randn(6, HEADS, 128).to(torch.float8_e4m3fn)  # two queries fill up the batch
        weights = torch.rand(6, HEADS)
        batch = indexer.IndexMetadata(
            torch.tensor([0, 3, 4], dtype=torch.int32),
            torch.tensor(LENGTHS, dtype=torch.int32),
            table,
            torch.tensor([*slots[0][-3:], *slots[1][-1:], -1, -1]),
            max(LENGTHS),
            4,
        )
        context = SimpleNamespace(attn_metadata=None)
        monkeypatch.setattr(indexer, "get_forward_context", lambda: context)
        new = torch.cat([k[-n:] for k, n in zip(keys, NEW, strict=True)])
        new = torch.cat([new, new[:2]])
        assert op.forward_cpu(None, q, new, weights) is buffer and (buffer == -7).all()
        context.attn_metadata = {"layer.indexer": batch}
        op.forward_oot(None, q, new, weights)
        cache: IndexCache = op._cache()
        for t, (request, sees) in enumerate([(0, 18), (0, 19), (0, 20), (1, 33)]):
            values, scales = cache.gather(torch.tensor(slots[request][:sees]))
            dots = torch.relu(q[t].double() @ values.double().T)
            score = (dots * weights[t][:, None].double()).sum(0) * scales.double()
            assert sorted(score.topk(TOPK).indices.tolist()) == buffer[t].tolist()
        assert (buffer[4:] == -7).all()


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"use_fp4_cache": True}, "index keys of MXFP4"),
        ({"compress_ratio": 4}, "one key for several tokens"),
        ({"candidate_blocks": torch.zeros(1)}, "candidate blocks"),
        ({"dcp_world_size": 2}, "decode context parallelism"),
        ({"use_pcp": True}, "prefill context parallelism"),
    ],
)
def test_other_indexers_of_the_same_op_are_refused_when_the_layer_is_made(
    more: dict[str, Any], reason: str
):
    k_cache = SimpleNamespace(kv_cache=torch.zeros(0), prefix="layer")
    with fake_vllm.installed():
        from openmla.integrations.vllm.indexer import OpenMLAIndexer

        with pytest.raises(Unsupported, match=reason):
            OpenMLAIndexer(k_cache, "ue8m0", TOPK, torch.zeros(0), **more)
    assert not hasattr(k_cache, "get_attn_backend")


def configuration(cache_dtype: str = "auto", **model: Any) -> SimpleNamespace:
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            enable_prefix_caching=True,
            block_size=32,
            user_specified_block_size=True,
            cache_dtype=cache_dtype,
        ),
        attention_config=SimpleNamespace(sparse_mla_force_mqa=False),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True, max_num_batched_tokens=96),
        model_config=SimpleNamespace(use_mla=True, hf_config=SimpleNamespace(**model)),
    )


def test_the_platform_changes_models_that_select_alone():
    with fake_vllm.installed():
        from openmla.integrations.vllm.cpu import SPARSE, OpenMLACpuPlatform

        for sparse in (False, True):
            asked = SimpleNamespace(use_mla=True, use_sparse=sparse)
            want = SPARSE if sparse else "vllm.CPU_MLA"
            assert OpenMLACpuPlatform.get_attn_backend_cls(None, asked) == want
        selecting, plain = configuration(index_topk=8), configuration()
        for config in (selecting, plain):
            OpenMLACpuPlatform.check_and_update_config(config)
    assert vars(selecting.scheduler_config) == vars(configuration().scheduler_config)
    assert selecting.cache_config.enable_prefix_caching and selecting.cache_config.block_size == 32
    assert not plain.cache_config.enable_prefix_caching and plain.cache_config.block_size == 128


@pytest.mark.parametrize(
    ("name", "forced"),
    [("auto", False), ("bfloat16", False), ("fp8", True), ("fp8_e4m3", True), ("fp8_ds_mla", True)],
)
def test_fp8_pages_are_read_as_selected_rows_alone(name: str, forced: bool):
    """vLLM's dense prefill of short prompts would gather cached prefixes by CUDA's kernels."""
    with fake_vllm.installed():
        from openmla.integrations.vllm.cpu import OpenMLACpuPlatform

        selecting, plain = configuration(name, index_topk=8), configuration(name)
        for config in (selecting, plain):
            OpenMLACpuPlatform.check_and_update_config(config)
    assert selecting.attention_config.sparse_mla_force_mqa is forced
    assert not plain.attention_config.sparse_mla_force_mqa


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0)], ids=str)
def test_on_a_gpu_layers_of_eager_models_are_made(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    """Before SM89 with queries that torch quantizes: vLLM's kernel for them does not compile.

    vLLM's own op is not made without DeepGEMM, and is made with kernels that do not compile there.
    """
    with fake_vllm.installed(capability=capability):
        from openmla.integrations.vllm.indexer import MODEL, OpenMLAIndexer

        model = sys.modules[MODEL]
        for eager in (False, True):
            monkeypatch.setattr(fake_vllm.CONFIG.model_config, "enforce_eager", eager)
            k_cache = SimpleNamespace(kv_cache=torch.zeros(0), prefix="layer")
            arguments = (k_cache, "ue8m0", TOPK, torch.zeros(0))
            if not eager:
                with pytest.raises(Unsupported, match="--enforce-eager"):
                    OpenMLAIndexer(*arguments)
                continue
            OpenMLAIndexer(*arguments)
            assert fake_vllm.WARMED_UP == []  # e4m3, which Triton has not before SM89
            assert fake_vllm.CONFIG.kernel_config.enable_jit_warmup
            assert not sys.modules[OP].has_deep_gemm()
            ours = queries.rotate_and_quantize if capability < (8, 9) else None
            assert model.fused_indexer_q_rope_quant is ours
            assert model.per_token_group_quant_fp8 is None
        if capability < (8, 9):
            del model.fused_indexer_q_rope_quant
            with pytest.raises(Unsupported, match="has no fused_indexer_q_rope_quant"):
                OpenMLAIndexer(*arguments)


@pytest.mark.parametrize("ue8m0", [False, True])
def test_queries_are_quantized_as_near_as_e4m3_is(ue8m0: bool):
    x = torch.randn(5, 3, 256) * torch.logspace(-8, 8, 5)[:, None, None]
    q, scale = queries.quantize_queries(x, 128, use_ue8m0=ue8m0)
    assert q.shape == x.shape and scale.shape == (5, 3, 2)
    back = q.float().view(5, 3, 2, 128) * scale[..., None]
    largest = x.view(5, 3, 2, 128).abs().amax(-1, keepdim=True)
    assert ((back.flatten(-2) - x).abs().view(5, 3, 2, 128) <= largest * 2**-4).all()
    assert not ue8m0 or (torch.frexp(scale).mantissa == 0.5).all()


def test_no_query_is_quantized_to_none():
    q, scale = queries.quantize_queries(torch.empty(0, 3, 256), 128)
    assert q.shape == (0, 3, 256) and scale.shape == (0, 3, 2)


@pytest.mark.parametrize("is_neox", [False, True])
def test_queries_are_rotated_by_their_positions(is_neox: bool):
    """Scores of quantized queries with their weights are those of a complex rotation in float64."""
    tokens, width = 9, 64
    positions = torch.randint(0, 300, (tokens,))
    angles = torch.outer(torch.arange(300.0), 10000 ** (-torch.arange(0, width, 2) / width))
    q = (torch.randn(tokens, HEADS, 128) * torch.logspace(-3, 3, HEADS)[:, None]).bfloat16()
    weights = torch.rand(tokens, HEADS)
    got, factors = queries.rotate_and_quantize(
        positions, q, torch.cat((angles.cos(), angles.sin()), -1), weights, 0.25, 0.5, is_neox
    )
    head = q[..., :width].double()
    pairs = head.unflatten(-1, (2, -1)).mT if is_neox else head.unflatten(-1, (-1, 2))
    turn = torch.polar(torch.ones(()).double(), angles[positions].double())[:, None]
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    turned = (turned.mT if is_neox else turned).flatten(-2)
    want = torch.cat([turned, q[..., width:].double()], -1)
    back = got.double() * (factors / weights / 0.125)[..., None].double()
    largest = want.abs().amax(-1, keepdim=True)
    assert got.dtype == torch.float8_e4m3fn and ((back - want).abs() <= largest * 2**-4).all()
    assert (torch.frexp(factors / weights).mantissa - 0.5).abs().max() < 1e-6


def test_the_examples_in_the_docstrings_are_true():
    assert doctest.testmod(queries).attempted > 3 and not doctest.testmod(queries).failed


def test_invariance_needs_every_query_over_selected_rows(monkeypatch: pytest.MonkeyPatch):
    with fake_vllm.installed() as vllm:
        from openmla.integrations.vllm import sparse

        assert sparse.OpenMLASparseBackend.supports_batch_invariance()
        made = {"kv_cache_dtype": "auto", "qk_rope_head_dim": 64}
        sparse.OpenMLASparseImpl(**made)
        monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_BATCH_INVARIANT", True)
        with pytest.raises(Unsupported, match="sparse_mla_force_mqa=true"):
            sparse.OpenMLASparseImpl(**made)
        config = vllm["vllm.config"]["get_current_vllm_config"]().attention_config
        monkeypatch.setattr(config, "sparse_mla_force_mqa", True)
        sparse.OpenMLASparseImpl(**made)
