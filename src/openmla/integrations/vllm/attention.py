"""`--attention-backend OPENMLA`: prefill from the tensors a model has, without putting K together.

New tokens go through `mla_prefill` as k_nope, one rope row for all heads, and v, a view of the
projection. Their context is read where it lies, in the paged latent cache, by `mla_prefill_latent`;
the two are merged by their lse. Where requests bring more new tokens than `most_latent_tokens` says
(about 170), the context goes vLLM's way instead, expanded chunk by chunk and attended to by the
prefill backend: fewer operations. Decoding is vLLM's: FlashMLA where it runs, Triton's otherwise,
and the CPU's own on a CPU.

With VLLM_BATCH_INVARIANT=1 there is one form for all: prefills, chunks and decoded tokens are
attended to in latent form, over all rows of their requests, which vLLM has written by then. Nothing
depends on how long a neighbor is, nor on where a chunk or a cached prefix ends.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.model_executor.layers.attention.mla_attention import split_kv_b_proj
from vllm.platforms import current_platform

from openmla import LatentCache, Unsupported, merge_states, mla_prefill
from openmla.integrations.vllm.forward import (
    TENSOR_SCALED,
    Context,
    UpProjection,
    attend_context,
    attend_rows,
    pages_as_cache,
    query_scale,
)
from openmla.integrations.vllm.registration import name_of


def batch_invariant() -> bool:
    """Whether the user wants bits that do not depend on the batch."""
    return bool(envs.VLLM_BATCH_INVARIANT)


def decoding_backend() -> Any:
    """vLLM's backend whose decoding, cache layout and metadata are used."""
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

        return CPUMLABackend
    if current_platform.is_cuda() and not batch_invariant():
        from vllm.v1.attention.backends.mla.flashmla import FlashMLABackend
        from vllm.v1.attention.ops.flashmla import is_flashmla_dense_supported

        if is_flashmla_dense_supported()[0]:
            return FlashMLABackend
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend

    return TritonMLABackend


_Decoding: Any = decoding_backend()
_DecodingImpl: Any = _Decoding.get_impl_cls()


class OpenMLABackend(_Decoding):
    """Prefill of bf16 models, over bf16 caches or FP8 ones that the decoding backend reads too.

    Decoding, pages, block sizes and metadata are that backend's, whatever `decoding_backend` found.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        *("auto", "bfloat16"),
        *(name for name in TENSOR_SCALED if name in _Decoding.supported_kv_cache_dtypes),
    ]

    @staticmethod
    def get_name() -> str:
        """The backend's name on the command line."""
        return name_of("attention")

    @staticmethod
    def get_impl_cls() -> Any:
        """The class that vLLM makes for each layer."""
        return OpenMLAImpl

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """By one form for all tokens, which vLLM's switch turns on."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Prefills are causal here, whatever decoding can do."""
        return False


class OpenMLAImpl(_DecodingImpl):
    """A layer's attention: `forward_mha`, the prefill, is openmla's."""

    # Not tried; vLLM refuses what is not offered.
    supports_pcp = False
    supports_dcp = False

    _projection: UpProjection

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """No: asked while vLLM compiles the model, which then quantizes the output afterwards.

        With a prefill backend that quantizes (FlashAttention's), a fused output would take new
        tokens past openmla.
        """
        return False

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Split kv_b_proj's weight: a view of it, unless it is quantized."""
        super().process_weights_after_loading(act_dtype)
        if act_dtype != torch.bfloat16:
            # On a CPU, vLLM does not look at supported_dtypes.
            raise Unsupported(f"a latent cache of {act_dtype}", nearest="--dtype bfloat16")
        keys, values = split_kv_b_proj(
            self.kv_b_proj,
            act_dtype,
            self.kv_lora_rank,
            self.num_heads,
            self.qk_nope_head_dim,
            self.v_head_dim,
        )
        self._projection = UpProjection(keys.permute(1, 2, 0), values.transpose(0, 1))

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        k_scale: Tensor,
        output: Tensor,
        output_scale: Tensor | None = None,
    ) -> None:
        """Write the attention of all requests that are not decoding to `output`."""
        if output_scale is not None:  # vLLM was told so when it compiled the model
            raise Unsupported("an output that is quantized on the way", nearest="output_scale=None")
        if batch_invariant():
            self._attend_rows(q, kv_c_and_k_pe_cache, attn_metadata, k_scale, output)
            return
        prefill = attn_metadata.prefill
        has_context = prefill.chunked_context is not None
        out = output.view(-1, self.num_heads, self.v_head_dim)
        kv = self.kv_b_proj(kv_c_normed)[0].view(len(q), self.num_heads, -1)
        k_nope, v = kv.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        new = mla_prefill(
            q,
            k_nope,
            k_pe if self.qk_rope_head_dim else None,
            v,
            cu_seqlens_q=prefill.query_start_loc,
            scale=self.scale,
            return_lse=has_context,
            out=None if has_context else out,
        )
        if has_context:
            context = self._attend_context(q, kv_c_and_k_pe_cache, attn_metadata, k_scale)
            merged, _ = merge_states(new[0], new[1], *context)
            out.copy_(merged)

    def _attend_context(
        self, q: Tensor, pages: Tensor, attn_metadata: Any, k_scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """out, and lse [tokens, heads], of the new tokens over their requests' context."""
        prefill = attn_metadata.prefill
        if prefill.max_query_len > self._projection.most_latent_tokens(self.qk_rope_head_dim):
            out, lse = self._compute_prefill_context(q, pages, attn_metadata, k_scale)
            return out[..., : self.v_head_dim], lse.T
        lengths = prefill.chunked_context.context_lens
        table = prefill.block_table[: len(lengths)]
        context = Context(self._cache(pages, k_scale), table, lengths)
        return attend_context(q, context, self._projection, prefill.query_start_loc, self.scale)

    def _cache(self, pages: Tensor, k_scale: Tensor | None) -> LatentCache:
        widths = self.kv_lora_rank, self.qk_rope_head_dim
        return pages_as_cache(pages, self.kv_cache_dtype, *widths, k_scale)

    def _attend_rows(
        self,
        q: Tensor,
        pages: Tensor,
        attn_metadata: Any,
        k_scale: Tensor,
        output: Tensor,
    ) -> None:
        """`forward_mha` where bits must not depend on the batch: new tokens and context at once."""
        prefill = attn_metadata.prefill
        lengths = prefill.query_start_loc.diff()
        if prefill.chunked_context is not None:
            lengths = lengths + prefill.chunked_context.context_lens
        table = prefill.block_table[: len(lengths)]
        rows = Context(self._cache(pages, k_scale), table, lengths.int())
        absorbed = self._projection.absorb(q)
        latent, _ = attend_rows(absorbed, rows, prefill.query_start_loc, self.scale)
        out = output.view(-1, self.num_heads, self.v_head_dim)
        out.copy_(self._projection.release(latent))

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Decoded tokens: vLLM's, unless bits must not depend on which tokens are decoded."""
        if not batch_invariant():
            out, lse = super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
            return out, lse
        q = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        decode = attn_metadata.decode
        requests = len(decode.seq_lens)
        starts = torch.arange(requests + 1, dtype=torch.int32, device=q.device)
        starts = starts * (len(q) // requests)  # as many tokens of each request
        cache = self._cache(kv_c_and_k_pe_cache, layer._k_scale)
        rows = Context(cache, decode.block_table[:requests], decode.seq_lens)
        return attend_rows(q, rows, starts, self.scale, query_scale(q, layer))
