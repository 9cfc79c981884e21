"""`forward` of DeepSeek-V3's attention module with half of its launches.

What a module of Transformers does around attention is many small operations: on a GPU, launching
those of a short prompt takes longer than running them. Here queries and keys are turned in place,
in three operations for twelve, and queries are not put together anew. What is cached is the same.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from openmla.integrations.transformers.attention import attention

# Classes with this forward, word for word, each compared in the tests; Kimi-K2 is of the first.
CLASSES = ("DeepseekV3Attention", "Glm4MoeLiteAttention", "YoutuAttention")
ARGUMENTS = (
    "self",
    "hidden_states",
    "position_embeddings",
    "attention_mask",
    "past_key_values",
    "kwargs",
)
_TURN = "openmla_turn"


def serves(layer: Any) -> bool:
    """Whether `forward` does what the module's own does, in this version of Transformers too."""
    own = tuple(inspect.signature(type(layer).forward).parameters)
    return type(layer).__name__ in CLASSES and own == ARGUMENTS


def forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """[B, S, hidden] -> [B, S, hidden], of a module without gradients."""
    batch, tokens, _ = hidden_states.shape
    if self.q_lora_rank is None:
        q = self.q_proj(hidden_states)
    else:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
    q = q.view(batch, tokens, -1, self.qk_head_dim)
    latent, rope = self.kv_a_proj_with_mqa(hidden_states).split_with_sizes(
        (self.kv_lora_rank, self.qk_rope_head_dim), -1
    )
    latent, rope = self.kv_a_layernorm(latent)[:, None], rope[:, None]
    if self.qk_rope_head_dim:
        turns = _turns(*position_embeddings)
        interleaved = self.config.rope_interleave
        turn_(q[..., self.qk_nope_head_dim :], turns[:, :, None], interleaved)
        turn_(rope, turns[:, None], interleaved)
    if past_key_values is not None:
        latent, rope = past_key_values.update(latent, rope, self.layer_idx)
    dropout = self.attention_dropout if self.training else 0.0
    out, _ = attention(
        self, q.transpose(1, 2), latent, rope, attention_mask, self.scaling, dropout, **kwargs
    )
    projected: Tensor = self.o_proj(out.reshape(batch, tokens, -1))
    return projected, None


def turn_(x: Tensor, turns: Tensor, interleaved: bool) -> None:
    """Rotary embedding of x [..., width] in place, by complex numbers [..., width / 2].

    Pairs are columns (0, 1), (2, 3), ... or (0, width/2), (1, width/2 + 1), ...; either way they
    come out in halves, as Transformers has them.
    """
    *shape, width = x.shape
    halves = x.view(*shape, 2, width // 2).transpose(-1, -2)
    pairs = x.view(*shape, width // 2, 2) if interleaved else halves
    turned = torch.view_as_complex(pairs.float().contiguous()) * turns
    halves.copy_(torch.view_as_real(turned))


def _turns(cos: Tensor, sin: Tensor) -> Tensor:
    """complex [B, S, width / 2] of what the model made for all layers; kept there for the next."""
    found: Tensor | None = getattr(cos, _TURN, None)
    if found is None:
        half = cos.shape[-1] // 2
        found = torch.complex(cos[..., :half].float(), sin[..., :half].float())
        setattr(cos, _TURN, found)
    return found
