"""Decode over lists in FlashMLA's conventions and by its limits, checked through the shim.

The sweep is over what that library's users rely on in rows of 656 and 584 bytes, and in those of
528 and 288 that its newest release reads in their place (DeepSeek-V4.1): one query a
request or several, 64 and 128 heads, pages of odd sizes, lists whose tail is cut off or that name
nothing at all, sinks of both infinities, a second cache with pages of another size, NaN in every
row that no list names. The definition is spelled out here in float64. Limits are FlashMLA's: out
within 1e-3 and 2.01/128 of each element and a cosine of 1 - 5e-6 over all, lse within 8.01/65536.
So are the magnitudes, which the absolute limit belongs to: queries of 1, rows of a tenth. With rows
of a half, the bf16 weights of lists of a few rows alone exceed it where an output is near 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla.cache import LatentCache
from openmla.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from openmla.formats import FORMATS

OUT_ABSOLUTE, OUT_RELATIVE, OUT_COSINE, LSE_LIMIT = 1e-3, 2.01 / 128, 5e-6, 8.01 / 65536
INT32 = torch.iinfo(torch.int32)
AT_ONCE = 4096  # rows times queries whose definition is evaluated together


@dataclass(frozen=True)
class DecodeCase:
    """One call of flash_mla_with_kvcache over lists."""

    requests: int
    s_q: int
    heads: int
    topk: int
    rows: int = 600
    """About how many rows the cache has."""
    page_size: int = 64
    format: str = "fp8_584"
    extra_format: str = ""
    """Format of the second cache; empty: the first one's."""
    kv_format: str | None = None
    """The name that the call gives the rows."""
    extra: tuple[int, int] | None = None
    """Entries of the second list, and rows of a page of the second cache."""
    lengths: bool = False
    sink: bool = True
    nothing: bool = False
    """Whether every list names no row."""
    seed: int = 0

    @property
    def width(self) -> int:
        return 576 if self.format == "fp8_656" else 512


def cases() -> Iterator[DecodeCase]:
    """From small to large."""
    seed = 0
    sizes = product((1, 3), (64, 128), ((64, 61), (128, 256), (512, 64), (600, 2)))
    for s_q, heads, (topk, page) in sizes:
        for format in ("fp8_584", "fp8_656"):
            extras: list[tuple[int, int] | None] = [None]
            if format == "fp8_584":
                extras += [(64, 2), (100, 61), (512, 64), (65, 69), (1024, 576)]
            for extra in extras:
                made = DecodeCase(4, s_q, heads, topk, page_size=page, format=format, extra=extra)
                more = {"lengths": seed % 2 == 1, "sink": seed % 3 > 0, "nothing": seed % 11 == 10}
                yield replace(made, **more, seed=seed)
                seed += 1
    for heads, extra in product((64, 128), (None, (512, 64), (1024, 2))):
        for requests, s_q in ((74, 2), (321, 1)):
            made = DecodeCase(requests, s_q, heads, 128, 9000, page_size=256, extra=extra)
            yield replace(made, lengths=True, seed=seed)
            seed += 1
    arrangements = {"": None, "_split": "V41"}  # scales in the row; behind the rows of a page
    for heads, s_q, (suffix, name) in product((64, 128), (1, 3), arrangements.items()):
        rows = {"format": f"fp8_528_v41{suffix}", "extra_format": f"fp4_288{suffix}"}
        for page, extra in ((32, (512, 64)), (61, (65, 2)), (256, None), (64, (1024, 69))):
            made = DecodeCase(4, s_q, heads, 128, page_size=page, extra=extra, kv_format=name)
            more = {"lengths": seed % 2 == 1, "sink": seed % 3 > 0, "nothing": seed % 11 == 10}
            yield replace(made, **rows, **more, seed=seed)
            seed += 1


class _Cache(NamedTuple):
    """A cache as FlashMLA is given it, the values of its rows, and lists of them."""

    k_cache: Tensor
    values: Tensor
    indices: Tensor
    lengths: Tensor | None
    counts: Tensor
    """bool like indices: which entries name a row."""


def problems(case: DecodeCase, device: torch.device | str) -> list[str]:
    """What is wrong with openmla's answer, in words; nothing when all is right."""
    g = torch.Generator("cpu").manual_seed(case.seed)
    q = torch.randn(case.requests, case.s_q, case.heads, case.width, generator=g).clamp(-1, 1)
    q = q.bfloat16()
    caches = [_drawn(case, case.format, case.topk, case.page_size, g)]
    if case.extra is not None:
        caches.append(_drawn(case, case.extra_format or case.format, *case.extra, g))
    sink = None
    if case.sink:
        sink = torch.randn(case.heads, generator=g)
        sink[0], sink[-1] = -torch.inf, torch.inf
    call: dict[str, Any] = {
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": get_mla_metadata()[0],
        "is_fp8_kvcache": True,
        "kv_format": case.kv_format,
        "attn_sink": None if sink is None else sink.to(device),
        **_given(caches[0], "k_cache", "indices", "topk_length", device),
    }
    if case.extra is not None:
        names = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
        call |= _given(caches[1], *names, device)
    out, lse = flash_mla_with_kvcache(q.to(device), **call)
    want = _definition(q, caches, sink)
    return _compare(out.cpu(), lse.cpu(), *want)


def _given(cache: _Cache, rows: str, lists: str, lengths: str, device: Any) -> dict[str, Any]:
    cut = None if cache.lengths is None else cache.lengths.to(device)
    return {rows: cache.k_cache.to(device), lists: cache.indices.to(device), lengths: cut}


def _drawn(case: DecodeCase, format: str, topk: int, page_size: int, g: torch.Generator) -> _Cache:
    """Pages of rows, NaN wherever no list names one."""
    pages, shape = -(-case.rows // page_size), (case.requests, case.s_q, topk)
    rows = pages * page_size
    indices = torch.randint(0, rows, shape, generator=g)
    # A tenth of them name nothing; FlashMLA itself knows -1 alone.
    strange = torch.tensor([-1, INT32.min, rows, INT32.max])
    drawn = strange[torch.randint(0, 4, shape, generator=g)]
    indices = torch.where(torch.rand(shape, generator=g) < 0.1, drawn, indices)
    if case.nothing:
        indices.fill_(-1)
    counts = (indices >= 0) & (indices < rows)
    lengths = None
    if case.lengths:
        lengths = torch.randint(0, topk + 1, (case.requests,), generator=g).int()
        counts &= torch.arange(topk) < lengths[:, None, None]
    latent, rope = 512, case.width - 512
    row_bytes = FORMATS[format].layout(latent, rope).row_bytes
    used = indices[counts].unique()
    values = (torch.randn(len(used), case.width, generator=g) / 10).clamp(-1, 1)
    k_cache = torch.full((pages, page_size * row_bytes), 0xFF, dtype=torch.uint8)
    view = LatentCache.from_pages(k_cache, page_size=page_size, rope=rope, format=format)
    view.append(values[:, :latent], values[:, latent:] if rope else None, used)
    read = torch.zeros(rows, case.width, dtype=torch.float64)
    read[used] = view.gather(used).double()
    shaped = k_cache.view(pages, page_size, 1, row_bytes).view(torch.float8_e4m3fn)
    return _Cache(shaped, read, indices.int(), lengths, counts)


def _definition(q: Tensor, caches: list[_Cache], sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out [b, s_q, h, 512], lse [b, h, s_q]), float64: one softmax over both caches' rows."""
    flat, width = q.double().flatten(0, 1), q.shape[3]
    out = torch.empty(len(flat), q.shape[2], 512, dtype=torch.float64)
    lse = torch.empty(len(flat), q.shape[2], dtype=torch.float64)
    topk = sum(cache.indices.shape[2] for cache in caches)
    step = max(AT_ONCE // topk, 1)
    for first in range(0, len(flat), step):
        part = slice(first, first + step)
        named = [c.indices.flatten(0, 1)[part].long() for c in caches]
        counts = torch.cat([c.counts.flatten(0, 1)[part] for c in caches], 1)
        sizes = [len(c.values) for c in caches]
        rows = torch.cat(
            [c.values[n.clamp(0, s - 1)] for c, n, s in zip(caches, named, sizes, strict=True)], 1
        )
        scores = width**-0.5 * (flat[part] @ rows.transpose(1, 2))
        scores = scores.masked_fill(~counts[:, None], -torch.inf)
        lse[part] = torch.logsumexp(scores, -1)
        empty = lse[part] == -torch.inf
        below = lse[part] if sink is None else torch.logaddexp(lse[part], sink.double())
        weights = torch.exp(scores - below.masked_fill(empty, 0.0)[..., None])
        out[part] = (weights @ rows[..., :512]).masked_fill(empty[..., None], 0.0)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf).view(*q.shape[:3]).transpose(1, 2)
    return out.view(*q.shape[:3], 512), lse


def _compare(out: Tensor, lse: Tensor, want: Tensor, want_lse: Tensor) -> list[str]:
    found, got = [], out.double()
    wrong = ~((got - want).abs() <= OUT_ABSOLUTE + OUT_RELATIVE * want.abs())
    if wrong.any():
        found.append(f"out: {int(wrong.sum())} of {wrong.numel()} elements")
    both = got.square().sum() + want.square().sum()
    if both > 0 and not 1 - 2 * (got * want).sum() / both <= OUT_COSINE:
        found.append("out: another direction")
    wrong = ~(((lse.double() - want_lse).abs() <= LSE_LIMIT) | (lse.double() == want_lse))
    if wrong.any():
        found.append(f"lse: {int(wrong.sum())} of {wrong.numel()}")
    return found
