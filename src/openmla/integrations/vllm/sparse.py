"""`--attention-backend OPENMLA_SPARSE`: DeepSeek-V3.2 and GLM-5, each query over its selected rows.

Any head count without padding; bf16 caches, `fp8_ds_mla`, which is openmla's `fp8_656`, and `fp8`,
one scale for a layer, with bf16 or FP8 queries; an lse for decode context parallelism. Metadata and
the dense prefill of prompts shorter than the selection are vLLM's; so is the indexer, but for its
scores on chips that DeepGEMM does not serve (`slots`), and on a CPU, where vLLM has none
(`indexer`). There rows are written by openmla as well.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.platforms import current_platform
from vllm.utils import deep_gemm
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, MultipleOf
from vllm.v1.attention.backends.mla.index_group import HiSparseMLAIndexGroup
from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows, flat_kv_row_view

from openmla import LatentCache, Unsupported, mla_prefill_sparse
from openmla.integrations.vllm import slots
from openmla.integrations.vllm.forward import (
    TENSOR_SCALED,
    Shard,
    pages_as_cache,
    physical_rows,
    query_scale,
    refresh_requests,
    requests_of_tokens,
    write_scaled,
)
from openmla.integrations.vllm.registration import name_of


class OpenMLASparseBackend(AttentionBackend):
    """Attention over selected rows, for bf16 models with bf16 or FP8 caches."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        *("auto", "bfloat16", "fp8_ds_mla"),
        *TENSOR_SCALED,
    ]

    @staticmethod
    def get_name() -> str:
        """The backend's name on the command line."""
        return name_of("sparse")

    @staticmethod
    def get_impl_cls() -> Any:
        """The class that vLLM makes for each layer."""
        return OpenMLASparseImpl

    @staticmethod
    def get_builder_cls() -> Any:
        """The class that prepares a batch."""
        return OpenMLASparseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Rows per page."""
        return [MultipleOf(16)]

    @classmethod
    def is_mla(cls) -> bool:
        """Latent rows."""
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        """Selected rows."""
        return True

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Pages a whole number of rows apart: bf16 caches are addressed by row."""
        return align_blocks_to_rows(spec)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Whatever Triton multiplies bf16 matrices on; a CPU has no capability."""
        return capability is None or capability.major >= 8

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """A query's bits depend on its selected rows alone; a layer checks that all queries do."""
        return True


class OpenMLASparseMetadataBuilder(SparseMLACommonMetadataBuilder[SparseMLACommonMetadata]):
    """vLLM's metadata; requests of one token, or of a speculated few, come first in a batch."""

    metadata_cls = SparseMLACommonMetadata
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        # Lengths of a rank's own rows are not advanced between drafted tokens.
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int:
        """Tokens of a request in a captured batch: each token is a query of its own.

        With decode context parallelism, requests of several tokens count as prefills here.
        """
        from vllm.v1.attention.backend import max_decode_query_len

        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            return 1
        most: int = max_decode_query_len(vllm_config)
        return most

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        """Find the request of each token anew, between drafted tokens and in vLLM's draft graphs.

        All else in the metadata is a view of buffers that vLLM keeps up to date.
        """
        tokens = metadata.num_decode_tokens
        if tokens:
            refresh_requests(metadata.req_id_per_token[:tokens], metadata.query_start_loc)

    def _build_req_id_per_token(self, common_attn_metadata: Any) -> Tensor:
        """int32 [tokens]: the row of the block table that each token's request has."""
        starts = common_attn_metadata.query_start_loc
        if not starts.is_cpu:
            own: Tensor = super()._build_req_id_per_token(common_attn_metadata)
            return own
        return requests_of_tokens(starts)  # vLLM's is a Triton kernel


class OpenMLASparseImpl(SparseMLACommonImpl[SparseMLACommonMetadata]):
    """A layer's attention: `forward_mqa`, over selected rows, is openmla's."""

    can_return_lse_for_decode = True
    supports_dcp = True
    supports_pcp = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if isinstance(self.index_group, HiSparseMLAIndexGroup):
            raise Unsupported("HiSparse keeps rows outside the paged cache")
        if self.kv_cache_dtype == "fp8_ds_mla" and self.qk_rope_head_dim == 0:
            raise Unsupported("fp8_ds_mla rows without rope", nearest="--kv-cache-dtype bfloat16")
        wishes = get_current_vllm_config().attention_config
        if envs.VLLM_BATCH_INVARIANT and not wishes.sparse_mla_force_mqa:
            # Whether prompts are attended to densely depends on the longest of a batch.
            raise Unsupported(
                "batch invariance where vLLM prefills short prompts densely",
                nearest="-ac.sparse_mla_force_mqa=true",
            )
        self.supports_quant_query_input = (
            self.kv_cache_dtype in TENSOR_SCALED and wishes.use_prefill_query_quantization
        )
        slots.fill(deep_gemm, current_platform)

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> None:
        """Write the rows of new tokens; vLLM's operation for it exists on GPUs alone."""
        if not kv_cache.is_cpu:
            super().do_kv_cache_update(
                kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale
            )
        elif kv_cache.numel():
            rows = slot_mapping.flatten().long()
            real = rows >= 0  # tokens that fill up a batch have no slot
            latent, rope = kv_c_normed[: len(rows)], k_pe[: len(rows)].flatten(1)
            if kv_cache_dtype in TENSOR_SCALED:
                write_scaled(kv_cache, latent[real], rope[real], rows[real], k_scale)
            else:
                self._cache(kv_cache).append(latent[real], rope[real], rows[real])

    def _cache(self, pages: Tensor, k_scale: Tensor | None = None) -> LatentCache:
        widths = self.kv_lora_rank, self.qk_rope_head_dim
        return pages_as_cache(pages, self.kv_cache_dtype, *widths, k_scale)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[Tensor, Tensor]:
        """out [tokens, heads, latent] and lse [tokens, heads] over each token's selected rows."""
        q = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        size = attn_metadata.block_size
        rows: LatentCache | Tensor
        if self.kv_cache_dtype in ("fp8_ds_mla", *TENSOR_SCALED):
            rows = self._cache(kv_c_and_k_pe_cache, getattr(layer, "_k_scale", None))
            stride = size  # a LatentCache counts its own rows, wherever its pages lie
        else:
            rows, stride = flat_kv_row_view(kv_c_and_k_pe_cache, size)
        selected = physical_rows(
            self.topk_indices_buffer[: len(q)],
            attn_metadata.req_id_per_token[: len(q)],
            attn_metadata.block_table,
            size,
            stride,
            Shard(self.dcp_world_size, self.dcp_rank, attn_metadata.cp_kv_cache_interleave_size),
        )
        out, lse = mla_prefill_sparse(
            q,
            rows,
            selected,
            scale=self.scale,
            d_v=self.kv_lora_rank,
            q_scale=query_scale(q, layer),
            return_lse=True,
        )
        return out, lse
