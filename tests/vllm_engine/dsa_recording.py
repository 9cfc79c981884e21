"""Record what vLLM hands to openmla's indexer and sparse attention, for tests/integrations/vllm.

    make record-vllm

A tiny DeepSeek-V3.2 runs in vLLM's real engine on a CPU, over pages of fp8_ds_mla. Of its first
layer two steps are kept: one that prefills, after a cached prefix and without one, and one that
checks drafted tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import dsa_engine
import engine
import torch
from torch import Tensor

BEFORE = (66, 20)
AFTER = (66, 20, 10)  # the first one again: its first page comes from the cache
DRAFTED = 3


class Recorder:
    """Steps of the first layer from now on: two of them are kept."""

    def __init__(self, model: Any) -> None:
        from openmla.integrations.vllm import indexer, sparse

        self.steps: dict[str, dict[str, Any]] = {}
        self._step: dict[str, Any] = {}
        self._layer: Any = None
        self._metadata = lambda prefix: indexer.get_forward_context().attn_metadata[prefix]
        op = next(m for m in model.modules() if isinstance(m, indexer.OpenMLAIndexer))
        select, op._forward_method = op._forward_method, self._selecting(op)
        self._select = select
        self._attend = sparse.OpenMLASparseImpl.forward_mqa
        sparse.OpenMLASparseImpl.forward_mqa = self._attending()

    def _selecting(self, op: Any) -> Any:
        def select(hidden_states: Tensor, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
            buffer: Tensor = self._select(hidden_states, q, k, weights)
            batch, pages = self._metadata(op.k_cache.prefix), op.k_cache.kv_cache
            n = batch.tokens
            named, table = used(batch.block_table, batch.max_seq_len, pages.shape[1])
            slots = batch.slot_mapping[:n]
            number = (named[:, None] == slots // pages.shape[1]).int().argmax(0)
            self._step = {
                "q": q[:n],
                "k": k[:n],
                "weights": weights[:n],
                "starts": batch.query_start_loc,
                "lengths": batch.seq_lens,
                "index_pages": pages[named],
                "index_table": table,
                "index_slots": number * pages.shape[1] + slots % pages.shape[1],
                "scale_format": op.scale_fmt,
                "selected": buffer[:n],
            }
            return buffer

        return select

    def _attending(self) -> Any:
        def forward_mqa(layer: Any, q: Any, pages: Tensor, metadata: Any, of: Any) -> Any:
            out, lse = self._attend(layer, q, pages, metadata, of)
            self._layer = self._layer or layer
            name = kind_of(self._step)
            if layer is not self._layer or not name or name in self.steps:
                return out, lse
            longest = int(self._step["lengths"].max())
            named, table = used(metadata.block_table, longest, metadata.block_size)
            more = {
                "absorbed": torch.cat(q, dim=-1) if isinstance(q, tuple) else q,
                "pages": pages[named],
                "table": table[: len(self._step["lengths"])],
                "requests": metadata.req_id_per_token[: len(out)],
                "kv_cache_dtype": layer.kv_cache_dtype,
                "scale": layer.scale,
                "out": out,
                "lse": lse,
            }
            self.steps[name] = engine.kept({**self._step, **more})
            return out, lse

        return forward_mqa


def used(table: Tensor, longest: int, size: int) -> tuple[Tensor, Tensor]:
    """Which pages a batch's table names, and the table of their numbers among these."""
    named, numbers = table[:, : -(-longest // size)].unique(return_inverse=True)
    return named.long(), numbers.int()


def kind_of(step: dict[str, Any]) -> str:
    """What a step is kept as; "" for one that is not."""
    new = step["starts"].diff()
    context = step["lengths"] - new
    if (context == 0).any() and (context > 0).any():
        return "prefill"
    return "drafted" if new.max() > 1 and context.all() and len(new) > 1 else ""


def main() -> None:
    """Record both steps to the file named on the command line."""
    more = engine.drafted(DRAFTED)
    with dsa_engine.started("v32", dsa_engine.TOPK, kv_cache_dtype="fp8_ds_mla", **more) as (
        llm,
        _,
    ):
        engine.generate(llm, engine.prompts(BEFORE, seed=2))
        [recorder] = llm.apply_model(Recorder)
        engine.generate(llm, engine.prompts(AFTER, seed=2))
    torch.save(recorder.steps, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
