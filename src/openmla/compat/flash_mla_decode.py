"""FlashMLA's decode call, served by openmla; import it from openmla.compat.flash_mla.

Same signature, shapes and conventions as `flash_mla.flash_mla_with_kvcache`; any head count, any
number of queries a request, any page size and topk, and CPU tensors work too. What differs from
openmla's own calls:

| | FlashMLA, here | openmla.mla_prefill_latent, mla_prefill_sparse |
|---|---|---|
| q | [batch, s_q, heads, d_qk] | [total_q, heads, d_qk], cu_seqlens_q |
| lse | [batch, heads, s_q] | [total_q, heads] |
| a row that sees no key | lse +inf | lse -inf |
| topk_length | [batch], or one per query [batch, s_q] | topk_lengths [total_q] |

openmla plans by itself: there is nothing in the metadata, and it is not looked at. A second cache
(`extra_k_cache`) is a second source of `openmla.mla_attend`: one softmax, rounded once. Engines
also pass what belongs to a fork or a later release: `out`, where to write; `kv_format`, which rows
the bytes are; `enable_batch_invariant` and `use_legacy`, which change nothing here, where the bits
of a request never depend on its batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openmla import checks
from openmla.api import mla_attend, mla_prefill_latent
from openmla.cache import LatentCache
from openmla.errors import InvalidArgument
from openmla.formats import V4, V32
from openmla.sources import Listed

FP8_LATENT = 512  # columns of V in both FP8 rows
FP8_ROWS = {576: (V32, 656), 512: (V4, 584)}
"""The format and the bytes of a token, by d_qk."""
KV_FORMATS = {"V32": V32, "V4": V4}
"""Names that FlashMLA has for them."""


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
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [batch, s_q, heads, head_dim_v], lse float32 [batch, heads, s_q]).

    q [batch, s_q, heads, d_qk]; k_cache [pages, page_size, 1, d_qk], V is its first head_dim_v
    columns; with is_fp8_kvcache bytes [pages, page_size, 1, 656], or 584 where d_qk is 512: each
    page all its rows, then all their scales. Without indices, request b sees the first
    cache_seqlens[b] rows of the pages that block_table[b] names. With indices int32
    [batch, s_q, topk], physical rows, those, up to topk_length[b], and likewise those of
    extra_k_cache; neither causal nor a block table then. Lengths are one per request, or one per
    query, [batch, s_q]. softmax_scale: 1 / sqrt(d_qk) unless given. kv_format: None, or "V32" or
    "V4", which must be what the bytes of a row say; other rows are refused.
    """
    if num_splits is not None:
        raise InvalidArgument("num_splits", "None, as get_mla_metadata returns", type(num_splits))
    q = checks.tensor("q", q, ("batch", "s_q", "heads", "d_qk"), checks.Q_DTYPES)
    batch, s_q, heads, d_qk = q.shape
    rows = checks.queries(q.reshape(batch * s_q, heads, d_qk))
    for name, flag in (("causal", causal), ("use_legacy", use_legacy)):
        checks.flag(name, flag)
    checks.flag("enable_batch_invariant", enable_batch_invariant)
    scale = d_qk**-0.5
    if softmax_scale is not None:
        scale = checks.scale(softmax_scale, name="softmax_scale") or 0.0
    fp8 = checks.flag("is_fp8_kvcache", is_fp8_kvcache)
    _check_format(kv_format, d_qk, fp8)
    place = _place_of(out, q, head_dim_v)
    cache = _cache("k_cache", k_cache, rows, head_dim_v, fp8)
    checks.no_gradients(attn_sink=checks.sink(attn_sink, heads, q.device, "attn_sink"))
    found: Tensor | tuple[Tensor, ...]
    extras = {
        "extra_indices_in_kvcache": extra_indices_in_kvcache,
        "extra_topk_length": extra_topk_length,
    }
    if extra_k_cache is None:
        _absent("extra_k_cache", **extras)
    if indices is None:
        _absent("indices", topk_length=topk_length, extra_k_cache=extra_k_cache)
        found = mla_prefill_latent(
            rows,
            cache,
            block_table,  # type: ignore[arg-type]
            cache_seqlens,  # type: ignore[arg-type]
            cu_seqlens_q=s_q * torch.arange(batch + 1, dtype=torch.int32, device=q.device),
            scale=scale,
            causal=causal,
            sink=attn_sink,
            out=place,
            return_lse=True,
        )
    else:
        if causal:
            raise InvalidArgument("causal", "False with indices", "True")
        named = {"indices": indices, "topk_length": topk_length}
        sources = [_listed(cache, named, q)]
        if extra_k_cache is not None:
            more = _cache("extra_k_cache", extra_k_cache, rows, head_dim_v, fp8)
            sources.append(_listed(more, extras, q))
        found = mla_attend(rows, sources, scale=scale, sink=attn_sink, out=place, return_lse=True)
    written, lse = found
    by_head = _lse_by_head(lse.view(batch, s_q, heads))
    return written.view(batch, s_q, heads, -1) if out is None else out, by_head


def _lse_by_head(lse: Tensor) -> Tensor:
    """lse [batch, s_q, heads] as FlashMLA has it, [batch, heads, s_q] with +inf for an empty row:
    one launch, which a call of ten microseconds would feel twice."""
    by_head = lse.new_empty(lse.shape[0], lse.shape[2], lse.shape[1])
    inf = torch.inf
    return torch.nan_to_num(lse.transpose(1, 2), nan=torch.nan, posinf=inf, neginf=inf, out=by_head)


def _check_format(kv_format: str | None, d_qk: int, is_fp8: bool) -> None:
    """A name must be that of the rows that are served at this width."""
    if kv_format is None:
        return
    if kv_format not in KV_FORMATS:
        raise InvalidArgument("kv_format", f"None or one of {', '.join(KV_FORMATS)}", kv_format)
    if not is_fp8 or d_qk not in FP8_ROWS or KV_FORMATS[kv_format] is not FP8_ROWS[d_qk][0]:
        expected = f"the rows that q of {d_qk} columns reads, with is_fp8_kvcache"
        raise InvalidArgument("kv_format", expected, kv_format)


def _place_of(out: Tensor | None, q: Tensor, d_v: int) -> Tensor | None:
    """`out` [batch, s_q, heads, d_v] as rows of queries, in place."""
    if out is None:
        return None
    shape = (*q.shape[:3], d_v)
    checked = checks.tensor("out", out, shape, (checks.out_dtype(q.dtype),), q.device)
    try:
        return checked.view(-1, *shape[2:])
    except RuntimeError:
        got = f"strides {checked.stride()}"
        raise InvalidArgument("out", "queries at equal distances, or s_q of 1", got) from None


def _absent(other: str, **given: Tensor | None) -> None:
    for name, x in given.items():
        if x is not None:
            raise InvalidArgument(name, f"None without {other}", "a tensor")


def _listed(cache: LatentCache, named: dict[str, Tensor | None], q: Tensor) -> Listed:
    """Rows that queries name; `named`: indices and lengths, under the names of their arguments."""
    batch, s_q = q.shape[:2]
    kind, device = (torch.int32,), q.device
    (name, indices), (name_of_lengths, lengths) = named.items()
    lists = checks.tensor(name, indices, (batch, s_q, "topk"), kind, device)
    if lengths is not None:
        per_query = isinstance(lengths, Tensor) and lengths.dim() == 2
        shape = (batch, s_q) if per_query else (batch,)
        lengths = checks.tensor(name_of_lengths, lengths, shape, kind, device)
        lengths = (lengths if per_query else lengths[:, None]).expand(batch, s_q).reshape(-1)
    return Listed(cache, lists.reshape(batch * s_q, lists.shape[2]), lengths)


def _cache(name: str, k_cache: Tensor, q: Tensor, d_v: int, is_fp8: bool) -> LatentCache:
    """The cache as openmla's, its bytes where they are."""
    d_qk = q.shape[2]
    if not is_fp8:
        shape = ("pages", "page_size", 1, d_qk)
        data = checks.tensor(name, k_cache, shape, (torch.bfloat16,), q.device)
        if isinstance(d_v, bool) or not isinstance(d_v, int) or not 1 <= d_v <= d_qk:
            raise InvalidArgument("head_dim_v", f"an integer from 1 to {d_qk}", d_v)
        return LatentCache(data[:, :, 0], None, d_v, d_qk - d_v, "bf16")
    if d_qk not in FP8_ROWS:
        raise InvalidArgument("q", "576 or 512 columns, with FP8 rows", d_qk)
    format, row_bytes = FP8_ROWS[d_qk]
    shape = ("pages", "page_size", 1, row_bytes)
    kinds = (torch.uint8, torch.int8, torch.float8_e4m3fn)
    data = checks.tensor(name, k_cache, shape, kinds, q.device).view(torch.uint8)[:, :, 0]
    if d_v != FP8_LATENT:
        raise InvalidArgument("head_dim_v", f"{FP8_LATENT}, with FP8 rows", d_v)
    if format is V32:
        return LatentCache(data, None, FP8_LATENT, d_qk - FP8_LATENT, format.name)
    return _scales_behind_rows(name, data)


def _scales_behind_rows(name: str, data: Tensor) -> LatentCache:
    """A page of DeepSeek-V4's: all its rows, then all their scales."""
    pages, page_size, row_bytes = data.shape
    if data.stride()[1:] != (row_bytes, 1):
        raise InvalidArgument(name, "pages without gaps between rows", f"strides {data.stride()}")
    scales = V4.layout(FP8_LATENT, 0).scale_columns
    step, start, columns = data.stride(0), data.storage_offset(), row_bytes - scales
    rows = data.as_strided((pages, page_size, columns), (step, columns, 1), start)
    behind = data.as_strided(
        (pages, page_size, scales), (step, scales, 1), start + page_size * columns
    )
    return LatentCache(rows, behind, FP8_LATENT, 0, V4.name)
