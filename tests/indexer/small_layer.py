"""A DSA layer with random weights, small enough for Triton's interpreter."""

from __future__ import annotations

import torch

from openmla.nn import IndexerConfig, MLAAttention, MLAConfig
from openmla.nn.rope import Rope
from openmla.planning.form import LayerDims

HIDDEN = 64


def small_layer(seed: int = 0) -> MLAAttention:
    """The same weights for the same seed, in bf16."""
    torch.manual_seed(seed)
    rope = Rope(width=8, theta=10000.0)
    config = MLAConfig(
        hidden=HIDDEN,
        heads=4,
        dims=LayerDims(latent=32, nope=16, rope=8, v=16),
        q_lora=32,
        rope=rope,
        scale=24**-0.5,
        topk=4,
        indexer=IndexerConfig(hidden=HIDDEN, q_lora=32, heads=8, topk=4, rope=rope),
    )
    return MLAAttention(config).to(torch.bfloat16)
