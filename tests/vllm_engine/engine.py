"""vLLM's real engine on a CPU with a tiny random DeepSeek-V3: what it generates, as JSON.

    python engine.py RESULT.json [--chunked] [--invariant [--alone] [--chunk TOKENS] [--ngram N]
        [--blocks N]]

Which backends run is up to OPENMLA_VLLM_CPU. With --chunked, prompts are prefilled in chunks and
prefixes come from the cache, which vLLM turns off for MLA on CPUs without AMX, although its code
for CPUs can do it. --invariant is what VLLM_BATCH_INVARIANT=1 turns on in openmla, without vLLM's
own part of it, which is Triton's. With --ngram, N tokens are drafted from what a request has had.
With --blocks, a cache of so few blocks has requests preempted, and one is aborted beside them.
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
from vllm.sampling_params import RequestOutputKind

import openmla

LONGEST = 512
CHUNK = 208  # tokens of one step: above and below the latent form's 170 per request
NEW_TOKENS = 8
LENGTHS = (37, 5, 130, 64)
ABORTED_AFTER = 6  # steps of an engine
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


def scarce(blocks: int) -> dict[str, Any]:
    """The options of an engine with so few blocks that requests wait and are preempted."""
    return {"num_gpu_blocks_override": blocks, "max_model_len": LONGEST // 2} if blocks else {}


def drafted(ngram: int) -> dict[str, Any]:
    """The option of an engine that drafts so many tokens; nothing for none."""
    if not ngram:
        return {}
    wish = {"method": "ngram", "num_speculative_tokens": ngram}
    return {"speculative_config": {**wish, "prompt_lookup_max": 3, "prompt_lookup_min": 1}}


@contextmanager
def started(**options: Any) -> Iterator[tuple[LLM, DeepseekV3ForCausalLM]]:
    """An engine with that model, and the model in Transformers."""
    usual: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": LONGEST,
        "dtype": "bfloat16",
        "max_num_seqs": 4,
        "block_size": 16,
        # vLLM 0.32's own rope on a CPU is wrong for queries of several heads.
        "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
    }
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        yield LLM(model=folder, **(usual | options)), model


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
    """Tokens that are drafted from now on, and those that the model would have generated too; and
    how often a request was preempted."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    usual, preempt, seen = scheduler.update_from_output, scheduler._preempt_request, Counter[str]()

    def preempted(*args: Any, **kwargs: Any) -> Any:
        seen["preempted"] += 1
        return preempt(*args, **kwargs)

    def noted(scheduled: Any, ran: Any) -> Any:
        seen["drafted"] += sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
        seen["accepted"] += sum(max(len(tokens) - 1, 0) for tokens in ran.sampled_token_ids)
        return usual(scheduled, ran)

    scheduler.update_from_output, scheduler._preempt_request = noted, preempted
    return seen


def wanted(tokens: int) -> SamplingParams:
    """Greedy tokens, and how likely the two best were."""
    final = RequestOutputKind.FINAL_ONLY
    return SamplingParams(
        max_tokens=tokens, temperature=0, logprobs=2, detokenize=False, output_kind=final
    )


def generate(llm: LLM, batch: list[dict[str, list[int]]]) -> list[dict[str, Any]]:
    """What was generated, and how much of a prompt came from the prefix cache."""
    return [answer(request) for request in llm.generate(batch, wanted(NEW_TOKENS), use_tqdm=False)]


def disturbed(llm: LLM, batch: list[dict[str, list[int]]]) -> list[dict[str, Any]]:
    """The same beside a request that wants more, comes first, and is aborted while it decodes."""
    engine, done, steps = llm.llm_engine, {}, 0
    engine.add_request("gone", batch[-1], wanted(LONGEST // 8))
    for number, prompt in enumerate(batch):
        engine.add_request(str(number), prompt, wanted(NEW_TOKENS))
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
        steps += 1
        if steps == ABORTED_AFTER:
            assert "gone" not in done
            engine.abort_request(["gone"])
    return [answer(done[str(number)]) for number in range(len(batch))]


def answer(request: Any) -> dict[str, Any]:
    """Tokens and log-probabilities, digit for digit."""
    done = request.outputs[0]
    likely = [sorted((x.logprob for x in step.values()), reverse=True) for step in done.logprobs]
    return {
        "tokens": list(done.token_ids),
        "logprobs": likely,
        "cached": request.num_cached_tokens,
    }


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
    parser.add_argument("--blocks", type=int, default=0)
    options = parser.parse_args()
    if options.chunked:
        keep_chunked_prefill(options.chunk)
    calls = count_calls()
    if options.invariant:
        from openmla.integrations.vllm import attention

        attention.batch_invariant = lambda: True
    with started(**drafted(options.ngram), **scarce(options.blocks)) as (llm, model):
        drafts = count_drafts(llm)
        batch = prompts(LENGTHS, seed=1)
        turns = [[prompt] for prompt in batch] if options.alone else [batch]
        serve = disturbed if options.blocks else generate
        results = [done for turn in turns for done in serve(llm, turn)]
        off = from_transformers(model, batch, results)
        if options.chunked and not options.blocks:
            results += generate(llm, prompts((LONG,), seed=2))
            results += generate(llm, prompts(LENGTHS, seed=1))  # now from the cache
    found = {"results": results, "calls": calls, "off": off, "drafts": drafts}
    options.result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
