"""`OPENMLA_VLLM_CPU=sparse`: DeepSeek-V3.2 and GLM-5 on a CPU, which vLLM refuses by itself.

A platform that is registered by a plug-in stands before vLLM's own. This one is vLLM's for CPUs but
for models that select keys: they get OPENMLA_SPARSE, and keep chunked prefill, cached prefixes and
the block size that were asked for. Over FP8 pages all their queries are over selected rows: for the
dense prefill of short prompts, vLLM would gather cached prefixes by kernels that are CUDA's.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform

UNQUANTIZED = ("auto", "bfloat16")
SPARSE = "openmla.integrations.vllm.sparse.OpenMLASparseBackend"


class OpenMLACpuPlatform(CpuPlatform):
    """vLLM's CPU platform, with sparse MLA."""

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """The class path of a layer's backend."""
        if attn_selector_config.use_mla and attn_selector_config.use_sparse:
            return SPARSE
        own: str = super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        return own

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """vLLM's changes to a configuration, some of them taken back for models that select."""
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        prefixes, block_size = cache.enable_prefix_caching, cache.block_size
        chunked, tokens = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        super().check_and_update_config(vllm_config)
        model = vllm_config.model_config
        if model is None or not model.use_mla or not hasattr(model.hf_config, "index_topk"):
            return
        cache.enable_prefix_caching = prefixes
        cache.block_size = block_size if cache.user_specified_block_size else 64
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = chunked, tokens
        if cache.cache_dtype not in UNQUANTIZED:
            vllm_config.attention_config.sparse_mla_force_mqa = True
