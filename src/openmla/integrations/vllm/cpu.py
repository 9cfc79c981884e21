"""`OPENMLA_VLLM_CPU=sparse`: DeepSeek-V3.2 and GLM-5 on a CPU, which vLLM refuses by itself.

A platform that is registered by a plug-in stands before vLLM's own. This one is vLLM's for CPUs but
for models that select keys: they get OPENMLA_SPARSE, and keep chunked prefill, cached prefixes and
the block size that were asked for. `quantize_queries` stands in for a Triton kernel of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.platforms.cpu import CpuPlatform

E4M3_MAX = 448.0
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


def quantize_queries(
    x: Tensor,
    group_size: int,
    eps: float = 1e-10,
    dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    out_q: Tensor | None = None,
    use_ue8m0: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """`per_token_group_quant_fp8`: e4m3 [.., columns] and a scale for each group of columns.

    >>> x = torch.tensor([[1.0, -3.5, 0.25, 0.0]])
    >>> q, scale = quantize_queries(x, 2, use_ue8m0=True)
    >>> scale.tolist(), (q.float().view(2, 2) * scale.view(2, 1)).tolist()
    ([[0.0078125, 0.00048828125]], [[1.0, -3.5], [0.25, 0.0]])
    """
    groups = x.float().view(*x.shape[:-1], -1, group_size)
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(eps) / E4M3_MAX
    if use_ue8m0:  # the next power of two
        mantissa, exponent = torch.frexp(scale)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scale = torch.ldexp(torch.ones_like(scale), exponent)
    quantized = (groups / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return quantized.flatten(-2), scale.squeeze(-1)
