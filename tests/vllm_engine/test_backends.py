"""openmla's backends on vLLM's own classes: what no engine on a CPU can run."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import custom_op
from vllm.model_executor.layers import sparse_attn_indexer
from vllm.model_executor.layers.attention import mla_attention, sparse_mla_attention
from vllm.model_executor.layers.quantization.utils import fp8_utils
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models import deepseek_v2
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.utils import deep_gemm
from vllm.v1.attention import backend
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend

import formula
from integrations.vllm import fake_vllm, selected
from openmla import IndexCache
from openmla.integrations.vllm import attention, indexer, prefill, queries, register, slots, sparse
from openmla.integrations.vllm.registration import MODELS, SEAMS, _registry

HEADS, LATENT, NOPE, ROPE, V, PAGE, SCALE = 8, 512, 128, 64, 128, 16, 192**-0.5
CONTEXT, NEW = (40, 0, 100), (7, 12, 33)


@pytest.mark.parametrize("name", SEAMS)
def test_vllms_registries_have_the_backends(name: str):
    register()
    register()
    seam = SEAMS[name]
    member = _registry(seam)[0][seam.name]
    found = member.get_class()
    assert f"{found.__module__}.{found.__qualname__}" == seam.backend
    assert found.get_name() == seam.name


def test_no_abstract_method_is_left():
    classes = (
        prefill.OpenMLAPrefillBackend,
        attention.OpenMLABackend,
        attention.OpenMLAImpl,
        sparse.OpenMLASparseBackend,
        sparse.OpenMLASparseMetadataBuilder,
        sparse.OpenMLASparseImpl,
        indexer.OpenMLAIndexBackend,
        indexer.OpenMLAIndexMetadataBuilder,
        indexer.OpenMLAIndexer,
    )
    assert [c.__name__ for c in classes if getattr(c, "__abstractmethods__", ())] == []


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (attention.OpenMLAImpl.forward_mha, mla_attention.MLACommonBaseImpl.forward_mha),
        (sparse.OpenMLASparseImpl.forward_mqa, mla_attention.MLACommonImpl.forward_mqa),
        (
            prefill.OpenMLAPrefillBackend.run_prefill_new_tokens,
            MLAPrefillBackend.run_prefill_new_tokens,
        ),
        (
            prefill.OpenMLAPrefillBackend.run_prefill_context_chunk,
            MLAPrefillBackend.run_prefill_context_chunk,
        ),
        *(
            (
                getattr(sparse.OpenMLASparseMetadataBuilder, name),
                getattr(backend.AttentionMetadataBuilder, name),
            )
            for name in ("get_varlen_cudagraph_max_query_len", "update_draft_decode_metadata")
        ),
    ],
    ids=lambda f: f.__name__,
)
def test_overridden_methods_take_what_vllm_passes(ours: Any, theirs: Any):
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


def test_the_sparse_metadata_has_what_is_read_of_it():
    fields = set(sparse_mla_attention.SparseMLACommonMetadata.__dataclass_fields__)
    used = {"block_size", "req_id_per_token", "block_table", "cp_kv_cache_interleave_size"}
    assert used <= fields


def test_on_a_gpu_models_that_select_have_the_indexers_op(monkeypatch: pytest.MonkeyPatch):
    """vLLM finds its classes for other platforms, and in them openmla's indexer."""
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(custom_op, "op_registry_oot", {})
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    monkeypatch.setenv("OPENMLA_VLLM_INDEXER", "1")
    register()
    for name, path in MODELS.items():
        found = ModelRegistry.models[name].load_model_cls()
        assert f"{found.__module__}:{found.__name__}" == path
    assert custom_op.op_registry_oot == {"SparseAttnIndexer": indexer.OpenMLAIndexer}
    own = indexer.OpenMLAIndexer.forward_cuda
    assert own is indexer.OpenMLAIndexer.select
    theirs = inspect.signature(indexer.OpenMLAIndexer.__base__.forward_cuda)
    assert len(inspect.signature(own).parameters) == len(theirs.parameters)


def test_on_a_gpu_the_op_is_made_without_deepgemm_and_without_vllms_warm_up(
    monkeypatch: pytest.MonkeyPatch,
):
    """vLLM's own is neither; a kernel that it compiles before it serves has e4m3, which Triton
    does not convert to before SM89."""
    config = VllmConfig()
    config.model_config = SimpleNamespace(enforce_eager=True)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    before_sm89 = classmethod(lambda cls, device_id=0: DeviceCapability(8, 0))
    monkeypatch.setattr(type(current_platform), "get_device_capability", before_sm89)
    for name in ("fused_indexer_q_rope_quant", "per_token_group_quant_fp8"):
        monkeypatch.setattr(deepseek_v2, name, getattr(deepseek_v2, name))  # put back afterwards
    has_deep_gemm = {"there": lambda: True, "missing": lambda: False}
    registered = {}
    for op in (indexer.OpenMLAIndexer, indexer.OpenMLAIndexer.__base__):
        for state, function in has_deep_gemm.items():
            monkeypatch.setattr(sparse_attn_indexer, "has_deep_gemm", function)
            registry = JitWarmupRegistry(config)
            arguments = SimpleNamespace(), 128, "ue8m0", 32, 128, 512, 512, torch.zeros(4, 32)
            with set_current_vllm_config(config), registry.activate():
                try:
                    op(*arguments)
                except RuntimeError as error:
                    assert "requires DeepGEMM" in str(error)
                    registered[op.__name__, state] = -1
                else:
                    registered[op.__name__, state] = len(registry)
            assert sparse_attn_indexer.has_deep_gemm is function
    assert config.kernel_config.enable_jit_warmup
    ours, theirs = "OpenMLAIndexer", "SparseAttnIndexer"
    assert registered[ours, "there"] == registered[ours, "missing"] == 0
    assert registered[theirs, "there"] > 0 > registered[theirs, "missing"]
    assert deepseek_v2.fused_indexer_q_rope_quant is queries.rotate_and_quantize


@pytest.mark.parametrize("is_neox", [False, True])
def test_queries_are_rotated_as_by_vllms_rotary_embedding(is_neox: bool):
    """Where the model has no kernel for both: rotated first, then quantized."""
    torch.manual_seed(0)
    with set_current_vllm_config(VllmConfig()):
        usual = {"rope_type": "default", "rope_theta": 10000.0}
        rope = get_rope(64, 512, is_neox_style=is_neox, rope_parameters=usual)
    positions = torch.randint(0, 512, (9,))
    q, weights = torch.randn(9, 4, 128).bfloat16(), torch.rand(9, 4)
    turned, _ = rope.forward_native(positions, q[..., :64].clone(), q[:, :1, :64].clone())
    want = torch.cat([turned.view(9, 4, 64), q[..., 64:]], -1).float()
    found, factors = queries.rotate_and_quantize(
        positions, q, rope.cos_sin_cache, weights, 1.0, 1.0, rope.is_neox_style
    )
    off = (found.float() * (factors / weights)[..., None] - want).abs()
    assert (off <= 2**-4 * want.abs() + 2**-6).all()  # a step of e4m3, one of vLLM's bf16


def test_functions_in_the_places_of_triton_kernels_take_what_these_do():
    for ours, theirs in (
        (queries.rotate_and_quantize, sparse_attn_indexer.fused_indexer_q_rope_quant),
        (queries.quantize_queries, fp8_utils.per_token_group_quant_fp8),
    ):
        assert list(inspect.signature(ours).parameters) == list(
            inspect.signature(theirs).parameters
        )


def test_the_indexers_op_has_what_decides_whether_it_is_served():
    source = inspect.getsource(indexer.OpenMLAIndexer.__base__.__init__)
    read = inspect.getsource(indexer.why_not)
    names = set(re.findall(r"op\.(\w+)", read))
    assert len(names) == 5 and all(f"self.{name} = " in source for name in names)


@pytest.mark.parametrize("kind", selected.FORMATS)
def test_selected_rows_of_every_cache(kind: str):
    batch = selected.batch(kind)
    layer = object.__new__(sparse.OpenMLASparseImpl)
    vars(layer).update(
        scale=selected.SCALE,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        kv_cache_dtype=batch.kv_cache_dtype,
        _topk_indices_buffer=batch.tokens,
    )
    layer.dcp_world_size, layer.dcp_rank = 1, 0
    metadata = SimpleNamespace(
        block_size=selected.PAGE,
        req_id_per_token=batch.requests,
        block_table=batch.table,
        cp_kv_cache_interleave_size=1,
    )
    out, lse = layer.forward_mqa(batch.q, batch.pages, metadata, batch.scales)
    want = batch.exact()
    formula.assert_close(out, want.out, bound=2.0**-8)
    formula.assert_close(lse, want.lse)


def test_vllms_wrappers_call_what_is_in_the_slots(monkeypatch: pytest.MonkeyPatch):
    """vLLM's own functions for index scores, on a chip that DeepGEMM does not serve."""
    for name in slots.SLOTS:  # back to what they were, afterwards
        monkeypatch.setattr(deep_gemm, name, None)
    assert not slots.fill(deep_gemm, fake_vllm.Platform((9, 0)))
    assert deep_gemm._fp8_fp4_mqa_logits_impl is None
    assert slots.fill(deep_gemm, fake_vllm.Platform((8, 9)))
    torch.manual_seed(0)
    cache = IndexCache.allocate(num_pages=9, page_size=64)
    cache.append(torch.randn(cache.rows, 128), torch.arange(cache.rows))
    values, scales = cache.gather(torch.arange(cache.rows))
    q = torch.randn(6, 32, 128).to(torch.float8_e4m3fn)
    weights = torch.rand(6, 32)
    right = torch.relu(torch.einsum("thd,nd->thn", q.double(), values.double()))
    right = (right * weights.double()[..., None]).sum(1) * scales.double()
    starts, ends = torch.zeros(6).int(), torch.tensor([1, 90, 300, 17, 576, 64]).int()
    outside = torch.arange(cache.rows) >= ends[:, None]
    ragged = deep_gemm.fp8_fp4_mqa_logits(
        (q, None), (values, scales), weights, starts, ends, clean_logits=True
    )
    table = torch.arange(9).int().expand(3, 9).contiguous()
    lens = ends.view(3, 2)
    paged = deep_gemm.fp8_fp4_paged_mqa_logits(
        (q.view(3, 2, 32, 128), None),
        cache.data.view(9, 64, 1, 132),
        weights,
        lens,
        table,
        deep_gemm.get_paged_mqa_logits_metadata(lens, 64, 108),
        max_model_len=cache.rows,
        clean_logits=True,
    )
    for logits in (ragged, paged):
        assert (logits[outside] == -torch.inf).all()
        off = (logits.double() - right).masked_fill(outside, 0).abs().max()
        assert off <= 2e-6 * right.abs().max()


def vllms_prefill(backend_class: Any, dtype: torch.dtype, workspace_rows: int) -> torch.Tensor:
    """vLLM's forward_mha, its gather, projection and merge, with one prefill backend."""
    torch.manual_seed(0)
    new = torch.tensor(NEW)
    offsets = formula.cu_seqlens(list(NEW))
    cache = torch.randn(40, PAGE, LATENT + ROPE).to(dtype)
    table = torch.randperm(40)[:30].view(3, 10).int()
    weight = torch.randn(HEADS * (NOPE + V), LATENT).to(dtype) * LATENT**-0.5
    q = torch.randn(int(new.sum()), HEADS, NOPE + ROPE).to(dtype)
    kv_c, k_pe = torch.randn(len(q), LATENT).to(dtype), torch.randn(len(q), 1, ROPE).to(dtype)
    backend = backend_class(HEADS, SCALE, LATENT, NOPE, ROPE, V, None)
    context = mla_attention.build_mla_chunked_context_metadata(
        context_lens_cpu=torch.tensor(CONTEXT),
        prefill_query_start_loc_cpu=offsets,
        chunked_prefill_workspace=torch.empty(workspace_rows, LATENT + ROPE, dtype=dtype),
        chunked_prefill_workspace_size=workspace_rows,
        block_size=PAGE,
        align_chunk_to_block=True,
        device=torch.device("cpu"),
        dcp_world_size=1,
        dcp_local_block_size=1,
        dcp_virtual_block_size=1,
    )
    assert len(context.chunks) == (2 if workspace_rows > sum(CONTEXT) else 4)
    metadata = mla_attention.MLACommonPrefillMetadata(
        block_table=table,
        query_start_loc=offsets,
        max_query_len=max(NEW),
        chunked_context=context,
        q_data_type=dtype,
        prefill_backend=backend,
    )
    backend.prepare_metadata(metadata)

    class Layer(mla_attention.MLACommonBaseImpl):
        forward_mqa = None

    Layer.__abstractmethods__ = frozenset()

    def kv_b_proj(rows: torch.Tensor) -> tuple[torch.Tensor]:
        return (rows @ weight.T,)

    kv_b_proj.weight = weight
    layer = Layer(
        HEADS, LATENT + ROPE, SCALE, 1, "auto", LATENT, NOPE, ROPE, NOPE + ROPE, V, kv_b_proj
    )
    layer._use_flashinfer_concat_mla_k = False
    layer.dcp_world_size = 1
    out = torch.empty(len(q), HEADS * V, dtype=dtype)
    layer.forward_mha(q, kv_c, k_pe, cache, SimpleNamespace(prefill=metadata), torch.ones(1), out)
    return out.float()


@pytest.mark.parametrize(
    "workspace_rows", [48, 1024], ids=["chunks of 48 rows", "a chunk per request"]
)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-6), (torch.bfloat16, 1e-2)])
def test_chunks_of_context_as_vllm_cuts_them(workspace_rows: int, dtype: torch.dtype, bound: float):
    ours, theirs = (
        vllms_prefill(backend, dtype, workspace_rows)
        for backend in (prefill.OpenMLAPrefillBackend, CPUSDPAMLAPrefillBackend)
    )
    assert (ours - theirs).abs().max() <= bound
