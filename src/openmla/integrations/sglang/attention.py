"""`--attention-backend openmla`: MLA over SGLang's pool of latent rows.

Decoding, chunks, cached prefixes and the check of speculated tokens are one call: their rows are
written, then `mla_prefill_latent` attends to all rows of each request where they lie. Batches of
fresh prompts come from SGLang in expanded form, as they do for its Triton backend, and go through
`mla_prefill`, which needs less arithmetic there. That choice is made for a whole batch, so the bits
of a request may depend on its neighbors; with --enable-deterministic-inference, or with
OPENMLA_SGLANG=latent, every batch is in latent form, by calls whose bits for a token depend on it
and on the rows that it sees: not on neighbors, nor on where chunks and cached prefixes end.

In a CUDA graph, all that a batch needs is computed on the GPU from the runner's buffers, inside the
graph: nothing has to be prepared before a replay.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
from torch import Tensor

from openmla import Unsupported
from openmla.integrations.sglang.forward import Requests, attend_fresh, attend_latent, requests_of
from openmla.integrations.sglang.registration import LATENT, range_keys, wishes


class OpenMLABackend(AttentionBackend):
    """A runner's attention: what its batches are, and all its layers' calls."""

    forward_metadata: Requests

    def __init__(self, runner: Any) -> None:
        super().__init__()
        why = why_not(runner, get_parallel(), get_spec())
        if why:
            raise Unsupported(f"openmla in SGLang: {why[0]}", nearest=why[1])
        self.page_size: int = runner.page_size
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.slots: Tensor = runner.req_to_token_pool.req_to_token
        self.draft_tokens: int = get_spec().speculative_num_draft_tokens or 0
        self.d_nope: int = runner.model_config.qk_nope_head_dim
        self.latent: int = runner.model_config.kv_lora_rank
        deterministic = get_exec().deterministic.enable_deterministic_inference
        self.invariant: bool = bool(deterministic) or LATENT in wishes()
        self.range_keys = range_keys()

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """The requests of a batch that runs without a graph; a table no wider than it needs."""
        if forward_batch.forward_mode.is_idle():
            return
        longest = self.slots.shape[1]
        if forward_batch.seq_lens_cpu is not None:
            most = int(forward_batch.seq_lens_cpu.max()) + self.draft_tokens
            longest = min(longest, most)
        self.forward_metadata = self._requests(forward_batch, self.slots[:, :longest])

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing is kept between replays, so that there is nothing to allocate."""

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Nothing is prepared before a replay: `init_forward_metadata_in_graph` is in the graph."""

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """The requests of a captured batch, recorded: a replay finds them in the same buffers."""
        if not forward_batch.forward_mode.is_idle():
            self.forward_metadata = self._requests(forward_batch, self.slots)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of requests that fill up a captured batch."""
        return 1

    def _requests(self, forward_batch: Any, slots: Tensor) -> Requests:
        """Whose tokens a batch of any mode has; computed where its tensors are, without waiting."""
        mode, lengths = forward_batch.forward_mode, forward_batch.seq_lens
        new_tokens: Tensor | int
        if mode.is_decode():
            new_tokens = 1
        elif mode.is_target_verify():  # not in the lengths yet
            self._check_drafted(forward_batch.spec_info)
            new_tokens, lengths = self.draft_tokens, lengths + self.draft_tokens
        elif mode.is_draft_extend_v2() or mode.is_dllm_extend():
            raise Unsupported(f"openmla in SGLang: batches of mode {mode.name}")
        else:
            new_tokens = forward_batch.extend_seq_lens
        return requests_of(
            new_tokens, lengths, slots, forward_batch.req_pool_indices, self.page_size
        )

    def _ranges_of(self, mode: Any) -> int | None:
        """Keys of a range: as the user said of batches of few tokens, and of all where a token's
        bits may not follow from its batch. Prompts cost more the shorter their ranges are."""
        few = mode.is_decode() or mode.is_target_verify()
        return self.range_keys if few or self.invariant else None

    def _check_drafted(self, speculation: Any) -> None:
        """Every request of a batch has as many drafted tokens to be checked, one after the other.

        DSpark may draft more for one request than for another (SGLANG_RAGGED_VERIFY_MODE).
        """
        several = getattr(speculation, "ragged_verify_layout", None) is not None
        if several or getattr(speculation, "draft_token_num", 0) not in (0, self.draft_tokens):
            each = f"{self.draft_tokens} tokens of each request"
            raise Unsupported(
                f"openmla in SGLang: drafts that are not {each}",
                nearest="SGLANG_RAGGED_VERIFY_MODE=static",
            )

    def forward_decode(self, *args: Any, **kwargs: Any) -> Tensor:
        """[requests, heads * latent]: one new token of every request."""
        return self.forward_extend(*args, **kwargs)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **more: Any,
    ) -> Tensor:
        """[tokens, heads * d_v] of a layer, d_v being the latent width in latent form."""
        asked = [name for name, value in more.items() if value is not None]
        if asked or layer.logit_cap:
            raise Unsupported(f"openmla in SGLang: {', '.join(asked) or 'capped scores'}")
        if save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)
        heads: int = layer.tp_q_head_num
        q = q.view(-1, heads, layer.head_dim)
        if layer.v_head_dim == self.latent:
            rows = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
            out = attend_latent(
                q,
                rows,
                self.forward_metadata,
                self.page_size,
                self.latent,
                layer.scaling,
                self.invariant,
                self._ranges_of(forward_batch.forward_mode),
            )
        else:
            k = k.view(-1, heads, layer.head_dim)
            v = v.view(-1, heads, layer.v_head_dim)
            out = attend_fresh(q, k, v, self.forward_metadata, self.d_nope, layer.scaling)
        return out.reshape(len(q), -1)


def why_not(runner: Any, parallel: Any, speculation: Any) -> tuple[str, str] | None:
    """What of a runner has no kernel here, and what comes nearest; None if nothing."""
    if not runner.use_mla_backend:
        return "a model without MLA", "another --attention-backend"
    config = runner.model_config
    if getattr(config.hf_config, "index_topk", None) is not None:
        return "a model that selects keys", "--attention-backend dsa with OPENMLA_SGLANG=attention"
    if config.v_head_dim == config.kv_lora_rank:  # which is how the two forms are told apart
        return "heads as wide as latent rows", "another --attention-backend"
    if runner.token_to_kv_pool.dtype != torch.bfloat16 or runner.dtype != torch.bfloat16:
        types = f"{runner.dtype} with a cache of {runner.token_to_kv_pool.dtype}"
        return types, "--dtype bfloat16 --kv-cache-dtype bf16"
    if parallel.attn_dcp_size > 1:
        return "decode context parallelism", "--dcp-size 1"
    if (speculation.speculative_eagle_topk or 1) > 1:
        return "trees of speculated tokens", "--speculative-eagle-topk 1"
    if runner.is_draft_worker:
        return "the draft model", "--speculative-draft-attention-backend triton"
    return None
