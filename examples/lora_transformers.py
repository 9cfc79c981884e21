"""Fine-tune a tiny DeepSeek-V3 of Transformers with LoRA, on a CPU: it learns to count.

    pip install '.[transformers]' && python examples/lora_transformers.py

`optimize(model)` is all that openmla asks for. Adapters lie around the projections of attention,
that of keys and values among them, which openmla calls itself; other weights stay as they are.
"""

import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from openmla.integrations.transformers import optimize

WORDS, STEPS, RANK = 32, 40, 8
ADAPTED = ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


class LoRA(nn.Module):
    """A frozen projection, and a low-rank one beside it that begins as nothing."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(x))


def adapted() -> DeepseekV3ForCausalLM:
    """One layer of random weights, all frozen but for the adapters."""
    config = DeepseekV3Config(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        initializer_range=0.2,
    )
    model = DeepseekV3ForCausalLM(config).requires_grad_(False)
    for layer in model.model.layers:
        for name in ADAPTED:
            setattr(layer.self_attn, name, LoRA(getattr(layer.self_attn, name)))
    return model


def batch(lengths: list[int]) -> dict[str, torch.Tensor]:
    """Sequences that count from anywhere, in steps of 1, 2 or 3; 0 is padding."""
    place = torch.arange(max(lengths))
    first, step = torch.randint(1, WORDS, (2, len(lengths), 1))
    ids = 1 + (first + place * (1 + step % 3)) % (WORDS - 1)
    keep = (place < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * keep, "attention_mask": keep, "labels": ids.where(keep > 0, -100)}


def main() -> None:
    torch.manual_seed(0)
    model = optimize(adapted())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-2)
    for step in range(STEPS):
        loss = model(**batch([12, 20, 7, 16, 9, 20, 14, 18])).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")


if __name__ == "__main__":
    main()
