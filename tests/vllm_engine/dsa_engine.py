"""vLLM's real engine on a CPU with a tiny random DSA model: what it generates, as JSON.

    OPENMLA_VLLM_CPU=sparse python dsa_engine.py RESULT.json --model v32 [--kv fp8_ds_mla] ...

Every call of the indexer is compared with a loop over queries in torch, every call of the sparse
attention with float64 over the rows that were selected; the result has the worst of both. With
--all-keys a selection is every key, and what is generated is compared with Transformers: its
indexer does not quantize, so that it selects others, and none is comparable otherwise. With --dense
vLLM may prefill prompts of fewer keys than are selected by its dense prefill. With --fused the
model quantizes queries where it does on a GPU, by openmla's function for SM80 and SM86. With
--blocks, a cache of so few blocks has requests preempted, and one is aborted beside them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engine  # sets the environment before vLLM is imported
import torch
from torch import Tensor
from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
)
from vllm import LLM

TOPK = 32
CHUNK = 96  # tokens of one step
LENGTHS = (37, 5, 130, 64, 200)
COMMON = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
}


def make_model(kind: str, folder: str, topk: int) -> Any:
    """Dense layers with the head widths of DeepSeek-V3.2 or of GLM-5."""
    torch.manual_seed(0)
    common = {**COMMON, "index_topk": topk}
    if kind == "v32":
        config = DeepseekV32Config(
            **common, num_hidden_layers=2, first_k_dense_replace=2, n_group=2, topk_group=1
        )
        model = DeepseekV32ForCausalLM._from_config(config, dtype=torch.bfloat16)
    else:
        config = GlmMoeDsaConfig(
            **common,
            num_hidden_layers=2,
            first_k_dense_replace=2,
            mlp_layer_types=["dense"] * 2,
            n_group=1,
            topk_group=1,
            qk_nope_head_dim=192,
            qk_rope_head_dim=64,
            v_head_dim=256,
        )
        model = GlmMoeDsaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return model.eval()


class Checked:
    """Calls of the indexer and of the sparse attention from now on, each compared."""

    def __init__(self) -> None:
        from openmla.integrations.vllm import indexer, sparse

        self.seen: Counter[str] = Counter()
        self.out = self.lse = 0.0
        self._topk, indexer.index_topk = indexer.index_topk, self._index
        attend = sparse.OpenMLASparseImpl.forward_mqa
        sparse.OpenMLASparseImpl.forward_mqa = self._wrapped(attend)

    def _index(self, q: Tensor, cache: Any, weights: Tensor, topk: int, **options: Any) -> Tensor:
        found: Tensor = self._topk(q, cache, weights, topk, **options)
        starts, lengths = options["cu_seqlens_q"].tolist(), options["cache_lengths"].tolist()
        for request, length in enumerate(lengths):
            rows = options["block_table"][request].long()[:, None] * cache.page_size
            rows = (rows + torch.arange(cache.page_size)).flatten()[:length]
            values, scales = cache.gather(rows)
            for t in range(starts[request], starts[request + 1]):
                sees = length - (starts[request + 1] - t) + 1
                dots = torch.relu(q[t].float() @ values[:sees].float().T)
                score = (dots * weights[t][:, None]).sum(0) * scales[:sees]
                best = score.sort(descending=True, stable=True).indices[:topk].sort().values
                mine = found[t][found[t] >= 0]
                self.seen["queries"] += 1
                self.seen["queries that select"] += sees > topk
                self.seen["selections that differ"] += mine.tolist() != best.tolist()
        return found

    def _wrapped(self, attend: Any) -> Any:
        def forward_mqa(layer: Any, q: Any, pages: Tensor, metadata: Any, of: Any) -> Any:
            out, lse = attend(layer, q, pages, metadata, of)
            q = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
            if q.dtype == torch.float8_e4m3fn:
                q = q.double() * of._q_scale.double()
                self.seen["FP8 queries"] += len(q)
            cache, size = layer._cache(pages, of._k_scale), metadata.block_size
            for t in range(len(q)):
                chosen = layer.topk_indices_buffer[t]
                chosen = chosen[chosen >= 0].long()
                table = metadata.block_table[metadata.req_id_per_token[t].long()].long()
                rows = cache.gather(table[chosen // size] * size + chosen % size).double()
                score = q[t].double() @ rows.T * layer.scale
                want = torch.softmax(score, -1) @ rows[:, : layer.kv_lora_rank]
                self.out = max(self.out, (out[t].double() - want).abs().max().item())
                off = (lse[t].double() - torch.logsumexp(score, -1)).abs().max().item()
                self.lse = max(self.lse, off)
            self.seen["attention calls"] += 1
            return out, lse

        return forward_mqa


def fuse_queries() -> None:
    """Let models that are made from now on take the way that they take on a GPU."""
    from vllm.model_executor.models import deepseek_v2

    from openmla.integrations.vllm import queries

    make = deepseek_v2.Indexer.__init__

    def made(indexer: Any, *args: Any, **kwargs: Any) -> None:
        make(indexer, *args, **kwargs)
        indexer.use_fused_indexer_q = True

    deepseek_v2.Indexer.__init__ = made
    deepseek_v2.fused_indexer_q_rope_quant = queries.rotate_and_quantize


@contextmanager
def started(kind: str, topk: int, **options: Any) -> Iterator[tuple[LLM, Any]]:
    """An engine with such a model, and the model in Transformers."""
    usual: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": engine.LONGEST,
        "dtype": "bfloat16",
        "max_num_seqs": 4,
        "block_size": 64,
        "max_num_batched_tokens": CHUNK,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        # Short prompts as selected rows too: rounding does not depend on a chunk's length then.
        "attention_config": {"sparse_mla_force_mqa": True},
        # vLLM 0.32's own rope on a CPU is wrong for queries of several heads.
        "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
    }
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(kind, folder, topk)
        yield LLM(model=folder, **(usual | options)), model


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--model", choices=("v32", "glm5"), default="v32")
    parser.add_argument("--kv", default="auto")
    parser.add_argument("--chunk", type=int, default=CHUNK)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--ngram", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=0)
    parser.add_argument("--unchecked", action="store_true")
    parser.add_argument("--fp8-queries", action="store_true")
    parser.add_argument("--all-keys", action="store_true")
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--dense", action="store_true")
    options = parser.parse_args()
    topk = engine.LONGEST if options.all_keys else TOPK
    if options.fused:
        fuse_queries()
    asked = {
        "kv_cache_dtype": options.kv,
        "max_num_batched_tokens": options.chunk,
        "attention_config": {
            "sparse_mla_force_mqa": not options.dense,
            "use_prefill_query_quantization": options.fp8_queries,
        },
        **engine.drafted(options.ngram),
        **engine.scarce(options.blocks),
    }
    with started(options.model, topk, **asked) as (llm, model):
        checked = None if options.unchecked else Checked()
        drafts = engine.count_drafts(llm)
        batch = engine.prompts(LENGTHS, seed=1)
        turns = [[prompt] for prompt in batch] if options.alone else [batch, batch]
        serve = engine.disturbed if options.blocks else engine.generate
        results = [done for turn in turns for done in serve(llm, turn)]
        found: dict[str, Any] = {"results": results, "drafts": drafts}
        if options.all_keys:
            found["off"] = engine.from_transformers(model, batch, results[: len(batch)])
    if checked is not None:
        found |= {"seen": checked.seen, "out": checked.out, "lse": checked.lse}
    options.result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
