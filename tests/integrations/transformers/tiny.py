"""Tiny random models, one of every MLA kind that the installed Transformers has."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel


def settings(**values: Any) -> dict[str, Any]:
    return values


COMMON = settings(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_shared_experts=1,
    n_routed_experts=4,
    num_local_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    q_lora_rank=48,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=24,
    head_dim=16,
    max_position_embeddings=512,
    initializer_range=0.05,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
INDEXER = settings(index_topk=12, index_n_heads=16, index_head_dim=32)
HYBRID = settings(layer_types=["linear_attention", "full_attention"])
LINEAR = settings(linear_head_dim=16, linear_num_heads=4)
# Where a model's own config names differ from COMMON.
EXTRA: dict[str, dict[str, Any]] = {
    "axk2": INDEXER,
    "bailing_hybrid": settings(**HYBRID, num_mtp_layers=0),
    "deepseek_v32": INDEXER,
    "glm5_next": settings(
        **INDEXER, **LINEAR, num_hidden_layers=4, qk_rope_head_dim=0, head_dim=0, index_kpool=4
    ),
    "glm_moe_dsa": INDEXER,
    "hy_v4": INDEXER,
    "kimi_linear": HYBRID | LINEAR,
    "longcat_flash": settings(
        num_layers=1, ffn_hidden_size=96, expert_ffn_hidden_size=32, moe_topk=2, zero_expert_num=2
    ),
    "minicpm3": settings(scale_emb=1, dim_model_base=64),
    "mistral4": settings(head_dim=48),
    "mistral_large4": settings(**INDEXER, num_hidden_layers=4),
    "youtu": settings(embedding_initializer_range=0.05),
}
# Models with eyes: their language model is the part with MLA, and only text is given to them.
EYES: dict[str, dict[str, Any]] = {
    "glm5_next": settings(
        depth=1,
        hidden_size=32,
        num_heads=2,
        intermediate_size=32,
        out_hidden_size=64,
        projection_intermediate_size=32,
    ),
    "kimi_k25": settings(
        num_hidden_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=32,
    ),
    "mistral_large4": settings(
        num_hidden_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        head_dim=16,
        intermediate_size=32,
    ),
}


def kinds() -> list[str]:
    """Folders of transformers.models whose attention has `expand_kv`, and Kimi-K2.5 around one."""
    files = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    found = [f.parent.name for f in files if "def expand_kv(" in f.read_text()]
    return sorted([*found, "kimi_k25"])


def selects_keys(kind: str) -> bool:
    return "index_topk" in EXTRA.get(kind, {})


@cache
def tiny(kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model with random weights, ready for inference. One per kind: leave it as you found it."""
    config = _named(kind, "configuration", "Config")
    text: dict[str, Any] = COMMON | EXTRA.get(kind, {})
    if kind in EYES:
        parts = config(text_config=text, vision_config=EYES[kind])
        model = _named(kind, "modeling", "ForConditionalGeneration")
    else:
        parts, model = config(**text), _named(kind, "modeling", "ForCausalLM")
    torch.manual_seed(0)
    return model._from_config(parts, dtype=dtype).eval()


def _named(kind: str, file: str, end: str) -> Any:
    """The one class of a model's file whose name ends so, parts such as TextConfig aside."""
    module = import_module(f"transformers.models.{kind}.{file}_{kind}")
    parts = ("Text", "Vision")
    names = [n for n in module.__all__ if n.endswith(end) and not any(p in n for p in parts)]
    (name,) = names
    return getattr(module, name)


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention of the language model alone."""
    model.get_decoder().set_attn_implementation(name)


@torch.no_grad()
def logits(
    model: PreTrainedModel, ids: Tensor, chunks: tuple[int, ...] = (), **more: Any
) -> Tensor:
    """Logits of a prompt, whole or in chunks over a cache."""
    if not chunks:
        return model(ids, **more).logits
    cache, parts = None, []
    for part in ids.split(chunks, dim=1):
        out = model(part, past_key_values=cache, use_cache=True, **more)
        cache = out.past_key_values
        parts.append(out.logits)
    return torch.cat(parts, dim=1)
