"""Record what vLLM's own MLA prefill on a CPU receives and answers, for tests/integrations/vllm.

    make record-vllm

A tiny model runs in vLLM's real engine; of its first layer, every prefill is kept: the arguments of
`forward_mha` with the cache pages they name, and each call of the prefill backend inside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine
import torch
from torch import Tensor
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend

FRESH = (23, 1, 5, 40)
BEFORE = (60, 30, 45)
AFTER = (60, 30, 45, 7)  # the first three again: their first pages come from the cache


class Recorder:
    """Prefills of the first layer that comes by, from now on."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.weight: Tensor | None = None
        self._layer: Any = None
        self._attention: list[dict[str, Any]] | None = None
        self._wrap(CPUMLAImpl, "forward_mha", self._step)
        self._wrap(CPUSDPAMLAPrefillBackend, "run_prefill_new_tokens", self._new_tokens)
        self._wrap(CPUSDPAMLAPrefillBackend, "run_prefill_context_chunk", self._context_chunk)

    def _wrap(self, owner: type, name: str, record: Callable[..., Any]) -> None:
        usual = getattr(owner, name)

        def recorded(this: Any, *args: Any, **kwargs: Any) -> Any:
            return record(usual, this, *args, **kwargs)

        setattr(owner, name, recorded)

    def _step(
        self,
        usual: Any,
        layer: Any,
        q: Tensor,
        kv_c: Tensor,
        k_pe: Tensor,
        cache: Tensor,
        metadata: Any,
        k_scale: Tensor,
        output: Tensor,
        output_scale: None = None,
    ) -> None:
        self._layer = self._layer or layer
        self._attention = [] if layer is self._layer else None
        usual(layer, q, kv_c, k_pe, cache, metadata, k_scale, output, output_scale)
        if self._attention is None:
            return
        self.weight = layer.kv_b_proj.weight.detach().clone()
        step = {
            "q": q,
            "kv_c": kv_c,
            "k_pe": k_pe,
            "scale": layer.scale,
            "output": output,
            "offsets": metadata.prefill.query_start_loc,
            "attention": self._attention,
        }
        context = metadata.prefill.chunked_context
        if context is not None:
            lengths = context.context_lens
            used = -(-int(lengths.max()) // cache.shape[1])
            pages, table = metadata.prefill.block_table[:, :used].unique(return_inverse=True)
            step |= {"lengths": lengths, "pages": cache[pages.long()], "block_table": table.int()}
        self.steps.append(engine.kept(step))

    def _new_tokens(
        self,
        usual: Any,
        backend: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: None = None,
        output_scale: None = None,
    ) -> Any:
        result = usual(backend, q, k, v, return_softmax_lse)
        offsets = backend._prefill_metadata.query_start_loc
        self._attended(q, k, v, (offsets, offsets), True, result)
        return result

    def _context_chunk(
        self,
        usual: Any,
        backend: Any,
        chunk: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: None = None,
    ) -> Any:
        result = usual(backend, chunk, q, k, v)
        self._attended(q, k, v, (chunk.query_start_loc, chunk.cu_seq_lens), False, result)
        return result

    def _attended(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: Any, causal: bool, result: Any
    ) -> None:
        if self._attention is None:
            return
        out, lse = result if isinstance(result, tuple) else (result, None)
        named = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "causal": causal}
        self._attention.append({**named, "offsets_q": offsets[0], "offsets_k": offsets[1]})


def main() -> None:
    """Record three batches to the file named on the command line."""
    engine.keep_chunked_prefill(engine.CHUNK)
    with engine.started() as (llm, _):
        engine.generate(llm, engine.prompts(BEFORE, seed=2))
        recorder = Recorder()
        engine.generate(llm, engine.prompts(FRESH, seed=3))
        engine.generate(llm, engine.prompts(AFTER, seed=2))
    torch.save({"weight": recorder.weight, "steps": recorder.steps}, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
