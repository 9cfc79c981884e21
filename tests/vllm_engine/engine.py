"""vLLM's real engine on a CPU with a tiny random DeepSeek-V3: what it generates, as JSON.

    python engine.py RESULT.json [--chunked] [--invariant [--alone] [--chunk TOKENS] [--ngram N]]

Which backends run is up to OPENMLA_VLLM_CPU. With --chunked, prompts are prefilled in chunks and
prefixes come from the cache, which vLLM turns off for MLA on CPUs without AMX, although its code
for CPUs can do it. --invariant is what VLLM_BATCH_INVARIANT=1 turns on in openmla, without vLLM's
own part of it, which is Triton's. With --ngram, N tokens are drafted from what a request has had.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, where calls are counted
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from vllm import LLM, SamplingParams
from vllm.platforms.cpu import CpuPlatform

import openmla

LONGEST = 512
CHUNK = 208  # tokens of one step: above and below the latent form's 170 per request
NEW_TOKENS = 8
LENGTHS = (37, 5, 130, 64)
LONG = 400  # two chunks of it are longer than 170 tokens


def make_model(folder: Path) -> DeepseekV3ForCausalLM:
    """Two dense layers with DeepSeek-V3's head widths; weights that make some scores stand out."""
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
        max_position_embeddings=2048,
        initializer_range=0.1,
    )
    model = DeepseekV3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return model.eval()


def prompts(lengths: tuple[int, ...], seed: int) -> list[dict[str, list[int]]]:
    """Token ids; the first prompts of a longer tuple are those of a shorter one."""
    draw = torch.Generator().manual_seed(seed)
    return [
        {"prompt_token_ids": torch.randint(5, 60, (n,), generator=draw).tolist()} for n in lengths
    ]


def drafted(ngram: int) -> dict[str, Any]:
    """The option of an engine that drafts so many tokens; nothing for none."""
    if not ngram:
        return {}
    wish = {"method": "ngram", "num_speculative_tokens": ngram}
    return {"speculative_config": {**wish, "prompt_lookup_max": 3, "prompt_lookup_min": 1}}


@contextmanager
def started(**options: Any) -> Iterator[tuple[LLM, DeepseekV3ForCausalLM]]:
    """An engine with that model, and the model in Transformers."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        llm = LLM(
            model=folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=LONGEST,
            dtype="bfloat16",
            max_num_seqs=4,
            block_size=16,
            # vLLM 0.32's own rope on a CPU is wrong for queries of several heads.
            compilation_config={"custom_ops": ["all", "-rotary_embedding"]},
            **options,
        )
        yield llm, model


def keep_chunked_prefill(chunk: int) -> None:
    """Undo what vLLM's CPU platform does to the configuration of an MLA model."""
    usual = CpuPlatform.check_and_update_config.__func__

    def check(cls: type, config: Any) -> None:
        usual(cls, config)
        config.scheduler_config.enable_chunked_prefill = True
        config.scheduler_config.max_num_batched_tokens = chunk
        config.cache_config.enable_prefix_caching = True

    CpuPlatform.check_and_update_config = classmethod(check)


def counted(name: str, calls: Counter[str]) -> Callable[..., Any]:
    """A public call of openmla that is counted wherever the integration has it under its name."""
    call = getattr(openmla, name)

    def count(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return call(*args, **kwargs)

    return count


def count_calls() -> Counter[str]:
    """Calls of openmla from now on."""
    import openmla.integrations.vllm.attention as attention
    import openmla.integrations.vllm.forward as forward
    import openmla.integrations.vllm.prefill as prefill

    calls: Counter[str] = Counter()
    for module in (attention, forward, prefill):
        for name in ("mla_prefill", "mla_prefill_latent", "merge_states"):
            if hasattr(module, name):
                setattr(module, name, counted(name, calls))
    return calls


def count_drafts(llm: LLM) -> Counter[str]:
    """Tokens that are drafted from now on, and those that the model would have generated too."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    usual, seen = scheduler.update_from_output, Counter[str]()

    def noted(scheduled: Any, ran: Any) -> Any:
        seen["drafted"] += sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
        seen["accepted"] += sum(max(len(tokens) - 1, 0) for tokens in ran.sampled_token_ids)
        return usual(scheduled, ran)

    scheduler.update_from_output = noted
    return seen


def generate(llm: LLM, batch: list[dict[str, list[int]]]) -> list[dict[str, Any]]:
    """Greedy tokens, and how likely the engine found the prompt's own tokens."""
    wanted = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, logprobs=2, detokenize=False)
    results = []
    for request in llm.generate(batch, wanted, use_tqdm=False):
        done = request.outputs[0]
        likely = [
            sorted((x.logprob for x in step.values()), reverse=True) for step in done.logprobs
        ]
        results.append(
            {
                "tokens": list(done.token_ids),
                "logprobs": likely,
                "cached": request.num_cached_tokens,
            }
        )
    return results


def kept(value: Any) -> Any:
    """Copies of all tensors: what the engine does next must not change them."""
    if isinstance(value, Tensor):
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {name: kept(part) for name, part in value.items()}
    return [kept(part) for part in value] if isinstance(value, list) else value


@torch.no_grad()
def from_transformers(
    model: DeepseekV3ForCausalLM,
    batch: list[dict[str, list[int]]],
    results: list[dict[str, Any]],
) -> float:
    """How far the two best log-probabilities of every token are from Transformers', at most."""
    worst = 0.0
    for prompt, result in zip(batch, results, strict=True):
        ids = prompt["prompt_token_ids"]
        whole = torch.tensor([[*ids, *result["tokens"]]])
        logits = model(whole).logits[0, len(ids) - 1 : -1].float()
        best = torch.log_softmax(logits, -1).topk(2).values
        found = torch.tensor([step[:2] for step in result["logprobs"]])
        worst = max(worst, (best - found).abs().max().item())
    return worst


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--chunked", action="store_true")
    parser.add_argument("--invariant", action="store_true")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--chunk", type=int, default=CHUNK)
    parser.add_argument("--ngram", type=int, default=0)
    options = parser.parse_args()
    if options.chunked:
        keep_chunked_prefill(options.chunk)
    calls = count_calls()
    if options.invariant:
        from openmla.integrations.vllm import attention

        attention.batch_invariant = lambda: True
    with started(**drafted(options.ngram)) as (llm, model):
        drafts = count_drafts(llm)
        batch = prompts(LENGTHS, seed=1)
        turns = [[prompt] for prompt in batch] if options.alone else [batch]
        results = [done for turn in turns for done in generate(llm, turn)]
        off = from_transformers(model, batch, results)
        if options.chunked:
            results += generate(llm, prompts((LONG,), seed=2))
            results += generate(llm, prompts(LENGTHS, seed=1))  # now from the cache
    found = {"results": results, "calls": calls, "off": off, "drafts": drafts}
    options.result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
