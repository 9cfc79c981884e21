"""Generate with a tiny DeepSeek-V3 of random weights, on its own attention and on openmla.

    pip install '.[transformers]' && python examples/transformers_generate.py

A real model differs in one line: AutoModelForCausalLM.from_pretrained(name) instead of `tiny`.
"""

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from openmla.integrations.transformers import optimize, restore


def tiny() -> DeepseekV3ForCausalLM:
    """Two layers, the first dense and the second of experts."""
    config = DeepseekV3Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=64,
        kv_lora_rank=128,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return DeepseekV3ForCausalLM(config).eval()


def main() -> None:
    model = tiny()
    # Two prompts, the first shorter and padded on the left.
    prompts = torch.randint(2, 256, (2, 24))
    mask = torch.ones_like(prompts)
    mask[0, :9] = 0

    def generate() -> torch.Tensor:
        return model.generate(
            prompts, attention_mask=mask, max_new_tokens=16, do_sample=False, pad_token_id=0
        )

    expected = generate()
    model = optimize(model)  # every MLA layer now attends to its cached rows with openmla
    tokens = generate()
    restore(model)
    print(tokens[:, prompts.shape[1] :].tolist())
    print("the same tokens as without openmla:", torch.equal(tokens, expected))


if __name__ == "__main__":
    main()
