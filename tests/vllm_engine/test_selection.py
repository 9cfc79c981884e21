"""What is written on vLLM's command line reaches openmla's backends, past vLLM's own checks."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
import vllm.v1.attention.ops.flashmla as flashmla
from vllm.config import AttentionConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8StaticTensorSym,
    kNvfp4Dynamic,
)
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.utils.argparse_utils import FlexibleArgumentParser

from openmla.integrations.vllm import attention, prefill, sparse

H200 = DeviceCapability(9, 0)


def problems(backend: Any, dtype: torch.dtype, cache: str, **asked: bool) -> list[str]:
    """What vLLM finds wrong with a backend on an H200, for rows of 576 in pages of 64."""
    usual = {"use_mla": True, "has_sink": False, "use_mm_prefix": False}
    usual |= {"use_sparse": backend.is_sparse(), "use_per_head_quant_scales": False}
    found: list[str] = backend.validate_configuration(
        576, dtype, cache, 64, device_capability=H200, attn_type="decoder", **usual, **asked
    )
    return found


@pytest.fixture(params=["FlashMLA", "TritonMLA"])
def backend_on_cuda(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """The backend as it is put together where vLLM finds a GPU, with or without FlashMLA."""
    with monkeypatch.context() as patch:
        patch.setattr(type(current_platform), "is_cpu", lambda self: False)
        patch.setattr(type(current_platform), "is_cuda", lambda self: True)
        has_flashmla = request.param == "FlashMLA"
        patch.setattr(flashmla, "is_flashmla_dense_supported", lambda: (has_flashmla, None))
        changed = importlib.reload(attention)
        assert changed.OpenMLABackend.__base__.__name__ == f"{request.param}Backend"
        yield changed.OpenMLABackend
    importlib.reload(attention)


def test_the_command_line_takes_the_names():
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    line = "--model x -ac.mla_prefill_backend=OPENMLA --attention-backend OPENMLA_SPARSE"
    options = parser.parse_args([*line.split(), "--kv-cache-dtype", "fp8_ds_mla"])
    assert options.attention_config.mla_prefill_backend.name == "OPENMLA"
    config = AttentionConfig(backend=options.attention_backend)
    assert config.backend.get_class() is sparse.OpenMLASparseBackend


def test_the_dense_backend_on_a_gpu(backend_on_cuda: Any):
    bf16 = torch.bfloat16
    assert backend_on_cuda.get_impl_cls().__abstractmethods__ == frozenset()
    for cache in ("auto", "bfloat16", "fp8", "fp8_e4m3"):
        assert problems(backend_on_cuda, bf16, cache) == []
    assert problems(backend_on_cuda, torch.float16, "auto") == ["dtype not supported"]
    assert problems(backend_on_cuda, bf16, "fp8_e5m2") == ["kv_cache_dtype not supported"]
    parallel = problems(backend_on_cuda, bf16, "auto", use_pcp=True, use_dcp=True)
    assert parallel == ["PCP not supported", "DCP not supported"]
    assert problems(backend_on_cuda, bf16, "auto", use_batch_invariant=True) == []


def test_a_quantized_output_is_declined_where_vllm_asks(backend_on_cuda: Any):
    """Its fusion pass asks the layer, and the layer its prefill backend; vLLM's own layer fuses."""
    own, asked = backend_on_cuda.get_impl_cls(), []
    for key in (kFp8StaticTensorSym, kNvfp4Dynamic, kFp8Dynamic128Sym):
        asked.append(own.__base__.fused_output_quant_supported(None, key))
        assert not own.fused_output_quant_supported(None, key)
        assert not prefill.OpenMLAPrefillBackend.supports_quant_output(None, key)
    assert all(asked)
    fusion = Path(vllm.__file__).parent / "compilation/passes/fusion/mla_attn_quant_fusion.py"
    assert "impl.fused_output_quant_supported" in fusion.read_text()  # its import needs CUDA
    assert "prefill_backend.supports_quant_output" in inspect.getsource(mla_attention)


def test_the_sparse_backend_on_a_gpu():
    backend, bf16 = sparse.OpenMLASparseBackend, torch.bfloat16
    for cache in ("auto", "bfloat16", "fp8_ds_mla", "fp8", "fp8_e4m3"):
        assert problems(backend, bf16, cache, use_dcp=True) == []
    assert problems(backend, torch.float16, "auto") == ["dtype not supported"]
    assert problems(backend, bf16, "fp8_e5m2") == ["kv_cache_dtype not supported"]
    assert problems(backend, bf16, "auto", use_pcp=True) == ["PCP not supported"]
