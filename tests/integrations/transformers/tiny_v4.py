"""A tiny random DeepSeek-V4: one layer of each kind, every parameter other than zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
SETTINGS: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", *RATES],
    "compress_rates": RATES,
    "sliding_window": 8,
    "num_attention_heads": 4,
    "head_dim": 32,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 48,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_topk": 4,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "hc_mult": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "factor": 16,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
}


def tiny_v4(dtype: torch.dtype = torch.float32, **more: Any) -> PreTrainedModel:
    """Ready for inference; skips where the installed Transformers has no DeepSeek-V4."""
    models: Any = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    settings = {"rope_parameters": dict(YARN), **SETTINGS, **more}
    config = models.DeepseekV4Config(**settings)
    torch.manual_seed(0)
    model: PreTrainedModel = models.DeepseekV4ForCausalLM._from_config(config, dtype=dtype)
    for name, parameter in model.named_parameters():
        if name.endswith(("sinks", "position_bias")):
            nn.init.normal_(parameter)
        elif "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval()
