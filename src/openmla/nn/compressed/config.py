"""What a layer of DeepSeek-V4 is built from, read from a configuration of Transformers."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from openmla.errors import InvalidArgument, Unsupported
from openmla.indexer.problem import DIM
from openmla.nn.rope import Rope

SERVED = "deepseek_v4"
WINDOW, SELECTED, ALL = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)


@dataclass(frozen=True)
class CompressedConfig:
    """Sizes of one layer, its rotary embedding and its ratio."""

    hidden: int
    """Width of hidden states."""
    heads: int
    """Attention heads of the layer."""
    width: int
    """Columns of a row, which is K and V of all heads; the last `rope.width` of them turn."""
    q_lora: int
    """Width that queries are compressed to."""
    o_groups: int
    """Groups of heads that the output projection keeps apart."""
    o_lora: int
    """Width that each group is projected to."""
    window: int
    """Tokens that a query sees as they are, itself included."""
    rope: Rope
    """The rotary embedding of the last columns."""
    ratio: int = 0
    """Tokens per compressed row; 0 for a layer that sees the window alone."""
    index_heads: int = 0
    """Heads of the indexer; 0 where every compressed row is attended to."""
    topk: int = 0
    """Compressed rows that the indexer selects for each query; 0 without one."""
    eps: float = 1e-6
    """Epsilon of all norms."""

    @property
    def overlap(self) -> bool:
        """Whether a row is made of its own tokens and of those of the row before."""
        return self.index_heads > 0

    @property
    def norms_heads(self) -> bool:
        """Whether every head of a query is normed before it is turned."""
        return True

    @property
    def writes_rows(self) -> bool:
        """Whether the layer makes compressed rows."""
        return self.ratio > 0

    @property
    def kept(self) -> tuple[str, ...]:
        """Which fields of a CompressedCache a layer of a ratio above 0 reads or writes."""
        return "rows", "state", *(("keys", "key_state") if self.index_heads else ())

    @staticmethod
    def of(config: Any, layer: int) -> CompressedConfig:
        """Layer number `layer` of a model of type deepseek_v4.

        Args:
            config: a configuration of Transformers of type deepseek_v4, or an object with the same
                attributes.
            layer: which layer, from 0; layers differ in their ratio.

        Raises:
            InvalidArgument: there is no such layer.
            Unsupported: the model is another, or the layer's type, indexer or rotary embedding is
                not served.
        """
        kind = getattr(config, "model_type", type(config).__name__)
        if kind != SERVED:
            raise Unsupported(f"no layer of compressed rows for {kind!r}", nearest=SERVED)
        if not 0 <= layer < len(config.layer_types):
            raise InvalidArgument("layer", f"0 to {len(config.layer_types) - 1}", layer)
        of_layer = config.layer_types[layer]
        if of_layer not in (WINDOW, SELECTED, ALL):
            raise Unsupported(f"a layer of type {of_layer!r}", nearest=", ".join((WINDOW, ALL)))
        selects = of_layer == SELECTED
        if selects and config.index_head_dim != DIM:
            raise Unsupported(f"an indexer {config.index_head_dim} wide", nearest=f"{DIM} columns")
        given = config.rope_parameters["main" if of_layer == WINDOW else "compress"]
        turned = int(config.head_dim * given.get("partial_rotary_factor", 1.0))
        length = config.max_position_embeddings
        flat = SimpleNamespace(rope_parameters=given, max_position_embeddings=length)
        return CompressedConfig(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            width=config.head_dim,
            q_lora=config.q_lora_rank,
            o_groups=config.o_groups,
            o_lora=config.o_lora_rank,
            window=config.sliding_window,
            rope=Rope.of(turned, flat, interleaved=True),
            ratio=0 if of_layer == WINDOW else config.compress_rates[of_layer],
            index_heads=config.index_n_heads if selects else 0,
            topk=config.index_topk if selects else 0,
            eps=config.rms_norm_eps,
        )
