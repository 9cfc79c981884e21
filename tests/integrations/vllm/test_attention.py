"""The backend that replaces `forward_mha`: what it leaves to vLLM, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from integrations.vllm import fake_vllm, replay
from openmla import InvalidArgument, Unsupported


def test_a_long_chunk_has_its_context_attended_to_by_vllm():
    step, weight = replay.recorded("context")
    layer, metadata = replay.layer(weight, step["scale"]), replay.metadata(step)
    limit = layer._projection.most_latent_tokens(replay.ROPE)
    for tokens, way in ((limit, ""), (limit + 1, "context")):
        layer.went_vllms_way = ""
        metadata.prefill.max_query_len = tokens
        output = torch.full_like(step["output"], torch.nan)
        layer.forward_mha(
            step["q"], step["kv_c"], step["k_pe"], step["pages"], metadata, None, output
        )
        assert layer.went_vllms_way == way
        assert output.isfinite().all()
    # The stand-in for vLLM saw no context, and merging lets the new tokens through unchanged.
    new = next(call["out"] for call in step["attention"] if call["causal"])
    assert torch.allclose(output.view_as(new), new, atol=2**-6)


def fused_scale(layer: Any, prefill: Any) -> torch.Tensor | None:
    """The `output_scale` of a prefill, as vLLM's fusion pass and its layer decide it."""
    fused = layer.fused_output_quant_supported("fp8") and prefill.supports_quant_output("fp8")
    return torch.ones(1) if fused else None


def test_a_quantized_output_is_declined_before_the_first_request():
    """Whatever prefill backend was chosen, new tokens stay openmla's and no forward pass fails."""
    step, weight = replay.recorded("fresh")
    layer, plain = replay.layer(weight, step["scale"]), fake_vllm.Impl()
    with fake_vllm.installed():
        from openmla.integrations.vllm.prefill import OpenMLAPrefillBackend
    for prefill, fuses in ((fake_vllm.MLAPrefillBackend(), True), (OpenMLAPrefillBackend(), False)):
        assert (fused_scale(plain, prefill) is not None) == fuses  # vLLM's own layer
        assert fused_scale(layer, prefill) is None
    arguments = (step["q"], step["kv_c"], step["k_pe"], None, replay.metadata(step), None)
    with pytest.raises(Unsupported, match="quantized on the way"):
        layer.forward_mha(*arguments, torch.empty_like(step["output"]), torch.ones(1))
    assert not hasattr(layer, "went_vllms_way")


def test_a_request_with_context_takes_pages_of_bf16_only():
    step, weight = replay.recorded("context")
    step["pages"] = step["pages"].to(torch.float8_e4m3fn)
    with pytest.raises(InvalidArgument, match=r"data: expected torch\.bfloat16"):
        replay.run_layer(step, weight)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_a_context_of_one_scale_is_attended_to_where_it_lies(name: str):
    step, weight = replay.recorded("context")
    k_scale = torch.tensor([0.0211])
    rows = (step["pages"].float() / k_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    got = replay.run_layer({**step, "pages": rows}, weight, name, k_scale)
    step["pages"] = (rows.float() * k_scale).bfloat16()
    want = replay.exact_step(step, weight)
    assert replay.error(got, want) <= 2 * 2.0**-8
    assert torch.equal(got, replay.run_layer(step, weight))  # the bits of bf16 rows


def test_caches_are_those_that_decoding_reads_too(monkeypatch: pytest.MonkeyPatch):
    for names, fp8 in ((["auto"], []), (["auto", "fp8", "fp8_e4m3"], ["fp8", "fp8_e4m3"])):
        monkeypatch.setattr(fake_vllm.Backend, "supported_kv_cache_dtypes", names)
        with fake_vllm.installed():
            from openmla.integrations.vllm.attention import OpenMLABackend
        assert OpenMLABackend.supported_kv_cache_dtypes == ["auto", "bfloat16", *fp8]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes_are_refused_before_the_first_request(dtype: torch.dtype):
    _, weight = replay.recorded("fresh")
    with pytest.raises(Unsupported, match="--dtype bfloat16"):
        replay.layer(weight.to(dtype), 1.0)


def test_quantized_output_is_refused_by_the_prefill_backend():
    with fake_vllm.installed():
        from openmla.integrations.vllm.prefill import OpenMLAPrefillBackend

        backend = OpenMLAPrefillBackend(scale=1.0, qk_nope_head_dim=128)
    with pytest.raises(Unsupported, match="does not quantize"):
        backend.run_prefill_new_tokens(None, None, None, False, output_scale=torch.ones(1))


def test_what_the_backends_say_to_vllm():
    with fake_vllm.installed():
        from openmla.integrations.vllm.attention import OpenMLABackend, OpenMLAImpl
        from openmla.integrations.vllm.prefill import OpenMLAPrefillBackend
    assert OpenMLABackend.get_name() == OpenMLAPrefillBackend.get_name() == "OPENMLA"
    assert OpenMLABackend.get_impl_cls() is OpenMLAImpl
    assert OpenMLABackend.supported_dtypes == [torch.bfloat16]
    assert OpenMLABackend.supports_batch_invariance()
    assert not OpenMLABackend.supports_non_causal()
    capable = OpenMLAPrefillBackend.supports_compute_capability
    assert [capable(SimpleNamespace(major=major)) for major in (7, 8, 12)] == [False, True, True]
    assert capable(None)
