"""SGLang's real engine on a CPU with a tiny random DeepSeek-V3: what it generates, as JSON.

    PYTHONPATH=stubs python engine.py RESULT.json [--alone] [--chunk N] [--page N]

There is no build of sglang-kernel for CPUs and no torchvision that fits: `stubs` has modules in
their places, of which nothing is ever called. OPENMLA_SGLANG and OPENMLA_CHECKS are for the
plug-ins, which SGLang loads in each of its processes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

LONGEST = 1024
NEW_TOKENS = 8
LENGTHS = (37, 5, 130, 64, 300)


def make_model(folder: Path) -> DeepseekV3ForCausalLM:
    """Two dense layers with DeepSeek-V3's head widths; SGLang on a CPU asks for yarn."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        q_lora_rank=64,
        kv_lora_rank=512,
        max_position_embeddings=4096,
        initializer_range=0.1,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 1024,
        },
    )
    model = DeepseekV3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    written = folder / "config.json"
    written.write_text(json.dumps(json.loads(written.read_text()) | {"moe_layer_freq": 1}))
    return model.eval()


def prompts() -> list[list[int]]:
    """Token ids."""
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(5, 60, (n,), generator=draw).tolist() for n in LENGTHS]


@torch.no_grad()
def from_transformers(
    model: DeepseekV3ForCausalLM, batch: list[list[int]], results: list[dict[str, Any]]
) -> float:
    """How far the two best log-probabilities of every token are from Transformers', at most."""
    worst = 0.0
    for ids, result in zip(batch, results, strict=True):
        whole = torch.tensor([[*ids, *result["tokens"]]])
        logits = model(whole).logits[0, len(ids) - 1 : -1].float()
        best = torch.log_softmax(logits, -1).topk(2).values
        found = torch.tensor([step[:2] for step in result["logprobs"]])
        worst = max(worst, (best - found).abs().max().item())
    return worst


def generate(engine: Any, batch: list[list[int]]) -> list[dict[str, Any]]:
    """Greedy tokens, their two best log-probabilities, and how much came from the radix cache."""
    done = engine.generate(
        input_ids=batch,
        sampling_params={"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        return_logprob=True,
        top_logprobs_num=2,
    )
    return [
        {
            "tokens": request["output_ids"],
            "cached": request["meta_info"]["cached_tokens"],
            "logprobs": [
                sorted((entry[0] for entry in step), reverse=True)
                for step in request["meta_info"]["output_top_logprobs"]
            ],
        }
        for request in done
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--chunk", type=int, default=160)
    parser.add_argument("--page", type=int, default=16)
    options = parser.parse_args()
    import sglang

    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        engine = sglang.Engine(
            model_path=folder,
            device="cpu",
            attention_backend="openmla",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            page_size=options.page,
            # Much more than it takes: what other processes take while it starts counts, too.
            mem_fraction_static=0.5,
            max_total_tokens=8192,
            max_running_requests=4,
            disable_overlap_schedule=True,
            log_level="warning",
            context_length=LONGEST,
            chunked_prefill_size=options.chunk,
        )
        batch = prompts()
        turns = [[prompt] for prompt in batch] if options.alone else [batch, batch]
        results = [done for turn in turns for done in generate(engine, turn)]
        engine.shutdown()
        off = from_transformers(model, batch, results[: len(batch)])
    options.result.write_text(json.dumps({"results": results, "from_transformers": off}))


if __name__ == "__main__":
    main()
