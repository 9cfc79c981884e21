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
the bytes are; `enable_batch_invariant`, which changes nothing here, where the bits of a request
never depend on its batch; and `use_legacy`, which changes nothing but where the scales of
DeepSeek-V4.1's rows lie:

| bytes of a token | `kv_format` | rows |
|---|---|---|
| 656 | V32 | d_qk 576; DeepSeek-V3.2 |
| 584 | V4 | DeepSeek-V4 |
| 528 | V32_NO_ROPE | V3.2 without rope |
| 528 | V41 | DeepSeek-V4.1: scales behind the rows of a page, as in FlashMLA's older kernels |
| 528 | none | the same, scales after each row, as in its newer ones; refused with `use_legacy` |
| 288 | V41_FP4, or none | DeepSeek-V4.1, compressed: likewise |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from openmla import checks
from openmla.api import mla_attend, mla_prefill_latent
from openmla.cache import LatentCache
from openmla.errors import InvalidArgument, Unsupported
from openmla.formats import (
    V4,
    V32,
    V32_NO_ROPE,
    V41,
    V41_FP4,
    V41_FP4_SPLIT,
    V41_SPLIT,
    RowFormat,
)
from openmla.sources import Listed

FP8_LATENT = 512  # columns of V in all quantized rows
FP8_ROWS = {576: {656: V32}, 512: {584: V4, 528: V41, 288: V41_FP4}}
"""Formats by d_qk and the bytes of a token, where no name is given."""
KV_FORMATS = {
    "V32": V32,
    "V32_NO_ROPE": V32_NO_ROPE,
    "V4": V4,
    "V41": V41_SPLIT,
    "V41_FP4": V41_FP4_SPLIT,
}
"""Names that FlashMLA's older kernels have for them."""
AMBIGUOUS = 528  # bytes of a token: V32_NO_ROPE or V41
OLDER = {V41: V41_SPLIT, V41_FP4: V41_FP4_SPLIT}
"""Formats whose scales the older kernels want behind the rows of a page."""


class Formats(NamedTuple):
    """Quantized rows that a call may have, by the bytes of a token."""

    main: dict[int, RowFormat]
    extra: dict[int, RowFormat]


@dataclass
class FlashMLASchedMeta:
    """What `get_mla_metadata` returns: room for a schedule, which an engine may fill. openmla's
    kernels have none, and look at none."""

    tile_scheduler_metadata: object = None
    """A schedule of FlashMLA's kernels."""
    num_splits: object = None
    """How many parts of it each request has."""


def get_mla_metadata(*_args: object, **_options: object) -> tuple[FlashMLASchedMeta, None]:
    """(metadata, None), as FlashMLA returns it, whatever it is given.

    Args:
        *_args: not looked at.
        **_options: not looked at.
    """
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
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [batch, s_q, heads, head_dim_v], lse float32 [batch, heads, s_q]).

    Without indices, request b sees the first cache_seqlens[b] rows of the pages that block_table[b]
    names. With indices, each query sees the rows that it names, of k_cache and of extra_k_cache.

    Args:
        q: [batch, s_q, heads, d_qk], bf16, fp16, fp32 or e4m3; 1 to 128 heads.
        k_cache: bf16 [pages, page_size, 1, d_qk], V is its first head_dim_v columns; with
            is_fp8_kvcache bytes [pages, page_size, 1, 656], or 584, 528 or 288 where d_qk is 512:
            of 584, each page all its rows, then all their scales.
        block_table: int32 [batch, max_pages], the pages of each request; not read with indices.
        cache_seqlens: int32 [batch], keys of each request; not read with indices.
        head_dim_v: how many leading columns of a row are V; 512 with is_fp8_kvcache.
        tile_scheduler_metadata: not looked at.
        num_splits: None, as get_mla_metadata returns it.
        softmax_scale: a factor for all scores; 1 / sqrt(d_qk) if None.
        causal: aligned bottom-right: the last query of a request sees its last key; False with
            indices.
        is_fp8_kvcache: whether the caches are bytes of quantized rows.
        indices: int32 [batch, s_q, topk], physical rows of k_cache; None: all keys of the request.
        attn_sink: float32 [heads]: one more term exp(sink) in each head's denominator; None without
            one.
        extra_k_cache: a second cache, as k_cache; only with indices.
        extra_indices_in_kvcache: int32 [batch, s_q, topk], physical rows of extra_k_cache; only
            with it.
        topk_length: int32 [batch], or one per query [batch, s_q]: how many entries of a list count;
            all if None. Only with indices.
        extra_topk_length: the same for extra_indices_in_kvcache.
        enable_batch_invariant: a bool that changes nothing: the bits of a request never depend on
            its batch.
        use_legacy: scales of DeepSeek-V4.1's rows lie behind the rows of a page; see the table of
            this module.
        kv_format: the name of k_cache's rows, which must be what its bytes say; see the table of
            this module. None: its bytes say which.
        descale_q: None: queries are not quantized.
        descale_k: None: rows have scales of their own.
        out: where to write the result, [batch, s_q, heads, head_dim_v]; made if None.

    Raises:
        InvalidArgument: an argument is wrong; the message names it, and what was expected.
        Unsupported: a tensor requires gradients, or no kernel serves such a call.
    """
    for name, scales in (("descale_q", descale_q), ("descale_k", descale_k)):
        if scales is not None:
            raise Unsupported(f"{name}: queries are bf16 and rows have scales of their own", "None")
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
    formats = _formats(d_qk, kv_format, use_legacy) if fp8 else None
    cache = _cache("k_cache", k_cache, rows, head_dim_v, formats and formats.main)
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
            beside = formats and formats.extra
            more = _cache("extra_k_cache", extra_k_cache, rows, head_dim_v, beside)
            sources.append(_listed(more, extras, q))
        found = mla_attend(rows, sources, scale=scale, sink=attn_sink, out=place, return_lse=True)
    written, lse = found
    by_head = _lse_by_head(lse.view(batch, s_q, heads))
    return written.view(batch, s_q, heads, head_dim_v) if out is None else out, by_head


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
    if not is_fp8 or not KV_FORMATS[kv_format].takes(FP8_LATENT, d_qk - FP8_LATENT):
        expected = f"the rows that q of {d_qk} columns reads, with is_fp8_kvcache"
        raise InvalidArgument("kv_format", expected, kv_format)


def _formats(d_qk: int, kv_format: str | None, use_legacy: bool) -> Formats:
    """What the rows of both caches may be. A name is an argument of the older kernels; without one,
    these do not know which 528 bytes are meant."""
    if d_qk not in FP8_ROWS:
        raise InvalidArgument("q", "576 or 512 columns, with FP8 rows", d_qk)
    if kv_format is not None:
        named = KV_FORMATS[kv_format]
        beside = tuple(OLDER.values()) if named in OLDER.values() else (named,)
        return Formats(_by_bytes(d_qk, named), _by_bytes(d_qk, *beside))
    found = FP8_ROWS[d_qk]
    if use_legacy:
        known = (OLDER.get(format, format) for size, format in found.items() if size != AMBIGUOUS)
        found = _by_bytes(d_qk, *known)
    return Formats(found, found)


def _by_bytes(d_qk: int, *formats: RowFormat) -> dict[int, RowFormat]:
    return {f.layout(FP8_LATENT, d_qk - FP8_LATENT).row_bytes: f for f in formats}


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


def _cache(
    name: str, k_cache: Tensor, q: Tensor, d_v: int, formats: dict[int, RowFormat] | None
) -> LatentCache:
    """The cache as openmla's, its bytes where they are; `formats` of quantized rows by their
    bytes."""
    d_qk = q.shape[2]
    if formats is None:
        shape = ("pages", "page_size", 1, d_qk)
        data = checks.tensor(name, k_cache, shape, (torch.bfloat16,), q.device)
        if isinstance(d_v, bool) or not isinstance(d_v, int) or not 1 <= d_v <= d_qk:
            raise InvalidArgument("head_dim_v", f"an integer from 1 to {d_qk}", d_v)
        return LatentCache(data[:, :, 0], None, d_v, d_qk - d_v, "bf16")
    kinds = (torch.uint8, torch.int8, torch.float8_e4m3fn)
    rows = checks.tensor(name, k_cache, ("pages", "page_size", 1, "bytes"), kinds, q.device)
    data = rows.view(torch.uint8)[:, :, 0]
    if data.shape[2] not in formats:
        sizes = " or ".join(str(size) for size in formats)
        why = ", or a kv_format" if data.shape[2] == AMBIGUOUS else ""
        raise InvalidArgument(name, f"rows of {sizes} bytes{why}", f"{data.shape[2]} bytes")
    if d_v != FP8_LATENT:
        raise InvalidArgument("head_dim_v", f"{FP8_LATENT}, with FP8 rows", d_v)
    format = formats[data.shape[2]]
    if format.scales_in_row:
        return LatentCache(data, None, FP8_LATENT, d_qk - FP8_LATENT, format.name)
    return _scales_behind_rows(name, data, format)


def _scales_behind_rows(name: str, data: Tensor, format: RowFormat) -> LatentCache:
    """Pages of all their rows, then all their scales."""
    pages, page_size, row_bytes = data.shape
    if data.stride()[1:] != (row_bytes, 1):
        raise InvalidArgument(name, "pages without gaps between rows", f"strides {data.stride()}")
    together = data.as_strided(
        (pages, page_size * row_bytes), (data.stride(0), 1), data.storage_offset()
    )
    return LatentCache.from_pages(together, page_size=page_size, rope=0, format=format.name)
