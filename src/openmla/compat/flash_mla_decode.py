"""FlashMLA's decode call, served by openmla; import it from openmla.compat.flash_mla.

Same signature, shapes and conventions as `flash_mla.flash_mla_with_kvcache`; any head count, any
number of queries a request, any page size and topk, and CPU tensors work too. What differs from
openmla's own calls:

| | FlashMLA, here | openmla.mla_prefill_latent, mla_prefill_sparse |
|---|---|---|
| q | [batch, s_q, heads, d_qk] | [total_q, heads, d_qk], cu_seqlens_q |
| lse | [batch, heads, s_q] | [total_q, heads] |
| a row that sees no key | lse +inf | lse -inf |
| topk_length | [batch] | topk_lengths [total_q] |

openmla plans by itself: there is nothing in the metadata, and it is not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openmla import checks
from openmla.api import mla_prefill_latent, mla_prefill_sparse
from openmla.cache import LatentCache
from openmla.errors import InvalidArgument, Unsupported
from openmla.formats import V32

FP8_BYTES = 656  # of a row: 512 e4m3, 4 float32 scales, 64 bf16
FP8_LATENT, FP8_ROPE = 512, 64


@dataclass(frozen=True)
class FlashMLASchedMeta:
    """What `get_mla_metadata` returns: nothing."""


def get_mla_metadata(*_args: object, **_options: object) -> tuple[FlashMLASchedMeta, None]:
    """(metadata, None), as FlashMLA returns it, whatever it is given."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: object = None,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [batch, s_q, heads, head_dim_v], lse float32 [batch, heads, s_q]).

    q [batch, s_q, heads, d_qk]; k_cache [pages, page_size, 1, d_qk], V is its first head_dim_v
    columns; with is_fp8_kvcache bytes [pages, page_size, 1, 656]. Without indices, request b sees
    the first cache_seqlens[b] rows of the pages that block_table[b] names. With indices int32
    [batch, s_q, topk], physical rows, those, up to topk_length[b]; neither causal nor a block table
    then. softmax_scale: 1 / sqrt(d_qk) unless given.
    """
    extras = (extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
    if any(x is not None for x in extras):
        raise Unsupported("extra_k_cache: a second cache", "one call per cache and merge_states")
    if num_splits is not None:
        raise InvalidArgument("num_splits", "None, as get_mla_metadata returns", type(num_splits))
    q = checks.tensor("q", q, ("batch", "s_q", "heads", "d_qk"), checks.Q_DTYPES)
    batch, s_q, heads, d_qk = q.shape
    rows = checks.queries(q.reshape(batch * s_q, heads, d_qk))
    checks.flag("causal", causal)
    scale = d_qk**-0.5
    if softmax_scale is not None:
        scale = checks.scale(softmax_scale, name="softmax_scale") or 0.0
    cache = _cache(k_cache, rows, head_dim_v, checks.flag("is_fp8_kvcache", is_fp8_kvcache))
    checks.no_gradients(attn_sink=checks.sink(attn_sink, heads, q.device, "attn_sink"))
    found: Tensor | tuple[Tensor, ...]
    if indices is None:
        if topk_length is not None:
            raise InvalidArgument("topk_length", "None without indices", "a tensor")
        found = mla_prefill_latent(
            rows, cache, block_table, cache_seqlens,  # type: ignore[arg-type]
            cu_seqlens_q=s_q * torch.arange(batch + 1, dtype=torch.int32, device=q.device),
            scale=scale, causal=causal, sink=attn_sink, return_lse=True,
        )  # fmt: skip
    else:
        if causal:
            raise InvalidArgument("causal", "False with indices", "True")
        lists = checks.tensor("indices", indices, (batch, s_q, "topk"), (torch.int32,), q.device)
        lengths = topk_length
        if lengths is not None:
            checks.tensor("topk_length", lengths, (batch,), (torch.int32,), q.device)
            lengths = lengths[:, None].expand(batch, s_q).reshape(-1)
        found = mla_prefill_sparse(
            rows, cache, lists.reshape(batch * s_q, lists.shape[2]),
            scale=scale, topk_lengths=lengths, sink=attn_sink, return_lse=True,
        )  # fmt: skip
    out, lse = found
    lse.masked_fill_(lse == -torch.inf, torch.inf)
    return out.view(batch, s_q, heads, -1), lse.view(batch, s_q, heads).transpose(1, 2).contiguous()


def _cache(k_cache: Tensor, q: Tensor, d_v: int, is_fp8: bool) -> LatentCache:
    """The cache as openmla's, its bytes where they are."""
    if not is_fp8:
        shape = ("pages", "page_size", 1, q.shape[2])
        data = checks.tensor("k_cache", k_cache, shape, (torch.bfloat16,), q.device)
        if isinstance(d_v, bool) or not isinstance(d_v, int) or not 1 <= d_v <= q.shape[2]:
            raise InvalidArgument("head_dim_v", f"an integer from 1 to {q.shape[2]}", d_v)
        return LatentCache(data[:, :, 0], None, d_v, q.shape[2] - d_v, "bf16")
    shape = ("pages", "page_size", 1, FP8_BYTES)
    kinds = (torch.uint8, torch.int8, torch.float8_e4m3fn)
    data = checks.tensor("k_cache", k_cache, shape, kinds, q.device)
    if d_v != FP8_LATENT:
        raise InvalidArgument("head_dim_v", f"{FP8_LATENT}, with FP8 rows", d_v)
    return LatentCache(data.view(torch.uint8)[:, :, 0], None, FP8_LATENT, FP8_ROPE, V32.name)
