"""Index scores where vLLM calls DeepGEMM, on chips that DeepGEMM does not serve.

vLLM keeps DeepGEMM's functions in slots of `vllm.utils.deep_gemm`, and its wrappers call what is
there. DeepGEMM runs on SM90, SM100 and SM120; on SM80, SM86 and SM89 its import succeeds and its
calls fail. There, and nowhere else, three slots are openmla's. vLLM's cache of index keys, its
gathering, its selection and its metadata stay. A slot that is filled also keeps vLLM from looking
for DeepGEMM's matrix products, which are not for these chips either. Nothing here imports vLLM.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from openmla.compat import deep_gemm
from openmla.errors import Unsupported

CHIPS = ((8, 0), (8, 6), (8, 9))
DEEP_GEMM = ("deep_gemm", "vllm.third_party.deep_gemm")
"""Where vLLM finds DeepGEMM itself, in this order."""
Query = tuple[Tensor, Tensor | None]


def mqa_logits(
    q: Query,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    clean_logits: bool = True,
) -> Tensor:
    """`fp8_fp4_mqa_logits`: float32 [tokens, keys], over keys that were gathered from the pages."""
    return deep_gemm.fp8_mqa_logits(
        _fp8(q), kv, weights.float(), cu_seqlen_ks, cu_seqlen_ke, clean_logits=clean_logits
    )


def paged_mqa_logits(
    q: Query,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    schedule_metadata: Tensor | None,
    max_model_len: int,
    clean_logits: bool = True,
    indices: Tensor | None = None,
) -> Tensor:
    """`fp8_fp4_paged_mqa_logits`: float32 [requests * next_n, max_model_len], over the pages.

    context_lens [requests, next_n] has the keys that each query sees; [requests] or [requests, 1],
    those of a request's last query, where each query before it sees one less.
    """
    values = _fp8(q)
    requests, queries = values.shape[:2]
    lengths = context_lens if context_lens.dim() == 2 else context_lens[:, None]
    if lengths.shape[1] != queries:
        before = torch.arange(1 - queries, 1, dtype=lengths.dtype, device=lengths.device)
        lengths = (lengths + before).clamp_min(0)
    return deep_gemm.fp8_paged_mqa_logits(
        values,
        kv_cache,
        weights.float(),
        lengths.contiguous(),
        block_tables[:requests],
        schedule_metadata,
        max_model_len,
        clean_logits=clean_logits,
        indices=indices,
    )


def paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    """`get_paged_mqa_logits_metadata`: a schedule that nothing here looks at."""
    return deep_gemm.get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms, indices)


SLOTS = {
    "_fp8_fp4_mqa_logits_impl": mqa_logits,
    "_fp8_fp4_paged_mqa_logits_impl": paged_mqa_logits,
    "_get_paged_mqa_logits_metadata_impl": paged_mqa_logits_metadata,
}


def fill(slots: Any, platform: Any) -> bool:
    """Fill the slots of `vllm.utils.deep_gemm` where vLLM's platform is one of CHIPS.

    Returns whether they are openmla's. Another plug-in's functions stay; so do all, elsewhere.
    """
    if not _unserved(platform):
        return False
    missing = [name for name in SLOTS if not hasattr(slots, name)]
    if missing:
        raise Unsupported(
            f"index scores without DeepGEMM in this vLLM, which has no {', '.join(missing)}",
            nearest="vLLM 0.32",
        )
    there = {name: getattr(slots, name) for name in SLOTS}
    if any(_is_foreign(name, function) for name, function in there.items()):
        return False
    for name, function in SLOTS.items():
        setattr(slots, name, function)
    return True


def _unserved(platform: Any) -> bool:
    if not platform.is_cuda() or platform.support_deep_gemm():
        return False
    capability = platform.get_device_capability()
    return capability is not None and (capability.major, capability.minor) in CHIPS


def _is_foreign(name: str, function: Any) -> bool:
    """Whether a slot holds a function that is neither openmla's nor DeepGEMM's."""
    if function is None or function is SLOTS[name]:
        return False
    public = name.removeprefix("_").removesuffix("_impl")
    packages = [sys.modules[found] for found in DEEP_GEMM if found in sys.modules]
    return all(getattr(package, public, None) is not function for package in packages)


def _fp8(q: Query) -> Tensor:
    values, scale = q
    if scale is not None:
        raise Unsupported("index queries of MXFP4", nearest="an indexer cache of FP8")
    return values
