"""DeepSeek-V3.2 and GLM-5 in SGLang: its `dsa` backend with openmla's scores and attention.

    OPENMLA_SGLANG=scores      the index scores, where SGLang calls DeepGEMM
    OPENMLA_SGLANG=attention   each query over its selected rows, where it calls FlashMLA or Triton

Each function takes the place of one of SGLang's, by its REPLACE hooks. Its indexer, its caches, its
selection and its metadata stay. `scores` needs no DeepGEMM, so it serves chips that DeepGEMM does
not. Nothing here needs SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from openmla import mla_prefill_sparse
from openmla.compat import deep_gemm


def logits_function() -> Callable[..., Tensor]:
    """`resolve_fp8_mqa_logits_fn`: scores over keys that lie one after another."""
    return deep_gemm.fp8_mqa_logits


def paged_logits_function() -> Callable[..., Tensor]:
    """`resolve_fp8_paged_mqa_logits_fn`: scores over pages of keys."""
    return deep_gemm.fp8_paged_mqa_logits


def metadata_function() -> Callable[..., Tensor]:
    """`resolve_paged_mqa_logits_metadata_fn`: a schedule that nothing here looks at."""
    return deep_gemm.get_paged_mqa_logits_metadata


def multiprocessors() -> int:
    """`resolve_num_sms`: how large that schedule is."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def attend_selected(
    backend: Any,
    q_all: Tensor,
    kv_cache: Tensor,
    v_head_dim: int,
    page_table_1: Tensor,
    sm_scale: float,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
) -> Tensor:
    """`_forward_flashmla_sparse` and `_forward_triton_sparse_mla`: [tokens, heads, v_head_dim].

    q_all [tokens, heads, latent + rope], any number of heads; kv_cache bf16 rows; page_table_1
    int32 [tokens, topk] names rows, -1 none.
    """
    if topk_length is not None and len(topk_length) != len(q_all):
        topk_length = None  # lists end with -1 as well
    return mla_prefill_sparse(
        q_all,
        kv_cache.view(-1, kv_cache.shape[-1]),
        page_table_1,
        scale=sm_scale,
        d_v=v_head_dim,
        topk_lengths=topk_length,
        sink=attn_sink,
    )
