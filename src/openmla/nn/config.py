"""What an MLA layer is built from, read from a configuration of Transformers.

Transformers itself is not imported: any object with these attributes will do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openmla.errors import Unsupported
from openmla.indexer.problem import DIM
from openmla.nn.indexer import INTERLEAVED, IndexerConfig
from openmla.nn.pooled import POOLED, PoolIndexerConfig
from openmla.nn.rope import Rope
from openmla.planning.form import LayerDims

# Models whose attention is this layer, each compared with its module in the tests, or with a
# definition where Transformers has none. Others have sinks or scales of their own.
TURNED = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "youtu", "axk1")
UNTURNED = ("glm5_next_text", "kimi_linear", "kimi_k3")  # positions are nowhere in a row
SERVED = (*TURNED, *UNTURNED)
EPS = 1e-6  # of both norms in most models, whatever rms_norm_eps says


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
    rope: Rope | None
    """The rotary embedding of queries and rows; None where no column is turned."""
    scale: float
    """A factor for all scores."""
    topk: int = 0
    """Keys that each query attends to; 0 when it attends to all."""
    bias: bool = False
    """Whether the projections from and to the hidden state have one."""
    indexer: IndexerConfig | PoolIndexerConfig | None = None
    """The config of the layer's own indexer; None where it has none, or one that is not served."""
    eps: float = EPS
    """Epsilon of both norms."""
    gate: bool = False
    """Whether the result is multiplied by the sigmoid of a projection of the hidden state before it
    goes through o_proj, as in Kimi-K3."""
    invariant: bool = False
    """Always the latent form, with bits of attention that depend on a token and the keys it sees
    alone: serving and training then have the same. See docs/same-bits.md."""
    range_keys: int | None = None
    """`range_keys` of the layer's calls in latent form, which openmla.mla_prefill_latent has: for a
    server whose batches are always small. None: the plan of a call decides."""

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
        rope = None if kind in UNTURNED else Rope.of(dims.rope, config)
        if not getattr(config, "mla_use_nope", True):
            raise Unsupported("mla_use_nope=False", nearest="a model whose columns are not turned")
        pool = getattr(config, "index_kpool", 1)
        gate = bool(getattr(config, "mla_use_output_gate", False))
        return MLAConfig(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            dims=dims,
            q_lora=config.q_lora_rank or 0,
            rope=rope,
            scale=(dims.nope + dims.rope) ** -0.5 * (rope.score_factor if rope else 1.0),
            # The tokens of an unfinished pool come on top of those that an indexer selected.
            topk=config.index_topk + pool - 1 if hasattr(config, "index_topk") else 0,
            bias=getattr(config, "attention_bias", False),
            indexer=_indexer_of(config),
            eps=config.rms_norm_eps if kind == POOLED or gate else EPS,
            gate=gate,
        )


def _indexer_of(config: Any) -> IndexerConfig | PoolIndexerConfig | None:
    """The indexer's config; None where there is none, or one that is not served."""
    if getattr(config, "index_head_dim", DIM) != DIM:
        return None
    if config.model_type == POOLED:
        return PoolIndexerConfig.of(config)
    return IndexerConfig.of(config) if config.model_type in INTERLEAVED else None
