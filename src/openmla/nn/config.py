"""What an MLA layer is built from, read from a configuration of Transformers.

Transformers itself is not imported: any object with these attributes will do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openmla.errors import Unsupported
from openmla.indexer.problem import DIM
from openmla.nn.indexer import INTERLEAVED, IndexerConfig
from openmla.nn.rope import Rope
from openmla.planning.form import LayerDims

# Models whose attention is this layer, each compared with its module in the tests. Others have
# gates, sinks or scales of their own.
SERVED = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "youtu", "axk1")


@dataclass(frozen=True)
class MLAConfig:
    """Sizes of one layer, its rotary embedding and the scale of its scores."""

    hidden: int
    """Width of hidden states."""
    heads: int
    """Attention heads of the layer."""
    dims: LayerDims
    """Widths of a head and of a cached row."""
    q_lora: int
    """Width that queries are compressed to; 0 when they are not."""
    rope: Rope
    """The rotary embedding of queries and rows."""
    scale: float
    """A factor for all scores."""
    topk: int = 0
    """Keys that each query attends to; 0 when it attends to all."""
    bias: bool = False
    """Whether the projections from and to the hidden state have one."""
    indexer: IndexerConfig | None = None
    """The config of the layer's own indexer; None where it has none, or one that is not served."""
    invariant: bool = False
    """Always the latent form, with bits of attention that depend on a token and the keys it sees
    alone: serving and training then have the same. See docs/same-bits.md."""

    @staticmethod
    def of(config: Any) -> MLAConfig:
        """From the (text) configuration of a model in `SERVED`.

        Args:
            config: a configuration of Transformers, or an object with the same attributes.

        Raises:
            Unsupported: the model is none of these, or its rotary embedding is not served.
        """
        kind = getattr(config, "model_type", type(config).__name__)
        if kind not in SERVED:
            raise Unsupported(f"no MLA layer for {kind!r}", nearest="one of " + ", ".join(SERVED))
        dims = LayerDims(
            config.kv_lora_rank,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
        )
        rope = Rope.of(dims.rope, config)
        return MLAConfig(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            dims=dims,
            q_lora=config.q_lora_rank or 0,
            rope=rope,
            scale=(dims.nope + dims.rope) ** -0.5 * rope.score_factor,
            topk=getattr(config, "index_topk", 0),
            bias=config.attention_bias,
            indexer=IndexerConfig.of(config) if _indexer_served(config) else None,
        )


def _indexer_served(config: Any) -> bool:
    return config.model_type in INTERLEAVED and config.index_head_dim == DIM
