"""Continuous batching of a model of Transformers on a GPU, in bf16 and with real widths."""

from __future__ import annotations

import pytest
import torch

from gpu.on_device import DEVICE, on_gpu

transformers = pytest.importorskip("transformers", minversion="5.17")
from integrations.transformers import served  # noqa: E402
from openmla.integrations.transformers import optimize, restore  # noqa: E402

pytestmark = on_gpu


@pytest.mark.parametrize("heads", [16, 128])
def test_attention_of_every_layer_is_float64s_and_waits_for_nothing(heads: int):
    """Once to compile, then under torch's check that the host waits nowhere."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=128,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        initializer_range=0.05,
        max_position_embeddings=512,
        pad_token_id=0,
    )
    model = transformers.DeepseekV3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model = optimize(model.eval().to(DEVICE))
    try:
        served.check(model, may_wait=True)
        served.check(model)
    finally:
        restore(model)
