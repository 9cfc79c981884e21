"""Malformed calls of the three attention forms.

`old -> new` entries give a function of the valid value; the others give the new value itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from malformed.arguments import REMOVED, Malformed, Unsupported
from openmla import LatentCache, Listed

DENSE, DENSE_CACHE = "mla_prefill", "mla_prefill+cache"
LATENT, SPARSE, SPARSE_CACHE = (
    "mla_prefill_latent",
    "mla_prefill_sparse",
    "mla_prefill_sparse+cache",
)
FORMS = (DENSE, LATENT, SPARSE)
INT32 = "torch.int32"
NAN, INF = float("nan"), float("inf")


def has_no_backward(call: str) -> list[Malformed]:
    """Gradients of the latent form."""
    return [
        Malformed(
            call,
            "q",
            "the forward pass",
            "requires a gradient",
            lambda a: {"q": a["q"].requires_grad_()},
            Unsupported,
        ),
        Malformed(
            call,
            "sink",
            "the forward pass",
            "requires a gradient",
            {"sink": torch.zeros(2, requires_grad=True)},
            Unsupported,
        ),
    ]


def has_a_backward(call: str) -> list[Malformed]:
    """What a call that needs gradients refuses."""
    return [
        Malformed(
            call,
            "out",
            "does not write into an argument",
            "is given",
            lambda a: {"q": a["q"].requires_grad_()},
            Unsupported,
        )
    ]


def to(call: str, argument: str, value: Any, expected: str, got: str) -> Malformed:
    """The argument replaced by a value."""
    return Malformed(call, argument, expected, got, {argument: value})


def of(call: str, argument: str, new: Callable[[Any], Any], expected: str, got: str) -> Malformed:
    """The argument replaced by a function of its valid value."""
    return Malformed(call, argument, expected, got, lambda a: {argument: new(a[argument])})


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def last_dim_strided(t: Tensor) -> Tensor:
    """The same values with a stride of 2 in the last dimension."""
    return torch.stack([t, t], dim=-1).flatten(-2)[..., ::2]


def on_meta(t: Tensor) -> Tensor:
    return t.to("meta")


def cache_on_meta(cache: LatentCache) -> LatentCache:
    return LatentCache(cache.data.to("meta"), None, cache.latent, cache.rope, cache.format)


def common(call: str) -> list[Malformed]:
    """What every form checks the same way."""
    width = 6 if call == DENSE else 8
    q_shape = "[total_q, heads, d_qk]"
    return [
        to(call, "q", None, q_shape, "None"),
        to(call, "q", [[1.0]], "a tensor, torch.bfloat16 or", "list [[1.0]]"),
        to(call, "q", 3, "a tensor", "int 3"),
        of(call, "q", lambda q: q[0], q_shape, "[2, 12]"),
        of(call, "q", lambda q: q[None], q_shape, "[1, 5, 2, 12]"),
        of(call, "q", lambda q: q.to_sparse(), "a strided tensor", "torch.sparse_coo"),
        of(call, "q", lambda q: q.numpy(), "a tensor", "numpy.ndarray ["),
        of(
            call,
            "q",
            lambda q: torch.nested.nested_tensor([q, q], layout=torch.jagged),
            "a strided tensor",
            "a nested tensor",
        ),
        of(call, "q", lambda q: q.double(), "torch.float8_e4m3fn", "torch.float64"),
        of(call, "q", lambda q: q.int(), "torch.bfloat16", INT32),
        of(call, "q", lambda q: q[:, :0], "1 to 128 heads", "0"),
        of(call, "q", lambda q: q[:, :1].expand(-1, 129, -1), "1 to 128 heads", "129"),
        of(call, "q", lambda q: q[..., :0], "a width above 0", "0"),
        of(call, "q", last_dim_strided, "a contiguous last dimension", "stride 2"),
        to(call, "scale", True, "a finite number", "bool True"),
        to(call, "scale", "0.3", "a finite number", "str '0.3'"),
        to(call, "scale", NAN, "a finite number", "nan"),
        to(call, "scale", INF, "a finite number", "inf"),
        to(call, "scale", -INF, "a finite number", "-inf"),
        to(call, "scale", 1e39, "float32 can hold", "1e+39"),
        to(call, "scale", 10**400, "float32 can hold", "int 1000"),
        to(call, "scale", torch.tensor(0.3), "a finite number", "torch.float32 []"),
        to(call, "sink", torch.zeros(3), "torch.float32 [2]", "[3]"),
        to(call, "sink", torch.zeros(2, 1), "torch.float32 [2]", "[2, 1]"),
        to(call, "sink", torch.zeros(2).half(), "torch.float32 [2]", "torch.float16"),
        to(call, "sink", 0.5, "a tensor, torch.float32 [2]", "float 0.5"),
        to(call, "sink", torch.zeros(2, device="meta"), "a tensor on cpu", "on meta"),
        to(call, "q_scale", torch.ones(4), "torch.float32 [5]", "[4]"),
        to(call, "q_scale", torch.ones(5, 2), "torch.float32 [5]", "[5, 2]"),
        to(call, "q_scale", torch.ones(5).double(), "torch.float32 [5]", "torch.float64"),
        to(call, "q_scale", 2.0, "a tensor, torch.float32 [5]", "float 2.0"),
        to(call, "q_scale", torch.ones(5, device="meta"), "a tensor on cpu", "on meta"),
        to(call, "k_scale", torch.ones(99), "torch.float32", "[99]"),
        to(call, "k_scale", [1.0], "a tensor, torch.float32", "list"),
        to(call, "return_lse", 1, "True or False", "int 1"),
        to(call, "return_lse", None, "True or False", "None"),
        to(call, "backend", "cuda", "one of auto, reference, cpu", "'cuda'"),
        to(call, "backend", None, "one of auto", "None"),
        to(call, "backend", 0, "one of auto", "0"),
        of(call, "out", lambda o: o[:4], f"[5, 2, {width}]", f"[4, 2, {width}]"),
        of(call, "out", lambda o: o[..., :3], f"[5, 2, {width}]", "[5, 2, 3]"),
        of(call, "out", lambda o: o.bfloat16(), "torch.float32 [5", "torch.bfloat16"),
        of(call, "out", last_dim_strided, "a contiguous last dimension", "stride 2"),
        of(call, "out", on_meta, "a tensor on cpu", "on meta"),
        to(call, "out", True, f"a tensor, torch.float32 [5, 2, {width}]", "bool True"),
        of(call, "out", lambda o: o[:1].expand(5, -1, -1), "memory of its own", "strides [0"),
        Malformed(
            call, "out", "apart from q", "an overlap", lambda a: {"out": a["q"][..., :width]}
        ),
        *(has_no_backward(call) if call == LATENT else has_a_backward(call)),
        Malformed(
            call,
            "out",
            "the forward pass",
            "requires a gradient",
            lambda a: {"out": a["out"].requires_grad_()},
            Unsupported,
        ),
        Malformed(
            call,
            "q_scale",
            "the forward pass",
            "requires a gradient",
            {"q_scale": torch.ones(5, requires_grad=True)},
            Unsupported,
        ),
        Malformed(
            call,
            "hopper",
            "nearest supported form",
            "backend 'hopper'",
            {"backend": "hopper"},
            Unsupported,
        ),
    ]


def offsets(call: str) -> list[Malformed]:
    """cu_seqlens_q of the dense and the latent form."""
    name = "cu_seqlens_q"
    return [
        to(call, name, None, f"a tensor, {INT32} [batch+1]", "None"),
        to(call, name, [0, 2, 5], f"a tensor, {INT32} [batch+1]", "list [0, 2, 5]"),
        to(call, name, torch.tensor([0, 2, 5]), f"{INT32} [batch+1]", "torch.int64 [3]"),
        to(call, name, int32(0, 2, 5)[None], f"{INT32} [batch+1]", "[1, 3]"),
        to(call, name, int32(0, 2, 5).to("meta"), "a tensor on cpu", "on meta"),
        to(call, name, int32(), "at least one entry", "[0]"),
        to(call, name, int32(1, 2, 5), "0 as its first entry", "1"),
        to(call, name, int32(0, 4, 3), "offsets that never fall", "4 then 3 at entry 2"),
        to(call, name, int32(0, 2, 6), "at most 5 (rows of q)", "6"),
        to(call, name, int32(0, -1, 5), "offsets that never fall", "0 then -1 at entry 1"),
        to(call, "causal", 1, "True or False", "int 1"),
        to(call, "causal", None, "True or False", "None"),
        to(call, "window", 0, "1 to 2147483647 keys", "int 0"),
        to(call, "window", -1, "1 to 2147483647 keys", "int -1"),
        to(call, "window", 2**31, "1 to 2147483647 keys", "int 2147483648"),
        to(call, "window", True, "None, or 1 to", "bool True"),
        to(call, "window", 4.0, "None, or 1 to", "float 4.0"),
        Malformed(
            call, "window", "None unless causal=True", "4 with", {"window": 4, "causal": False}
        ),
    ]


def paging(call: str) -> list[Malformed]:
    """block_table and cache_lengths of the calls that read pages."""
    table, lengths = "block_table", "cache_lengths"
    return [
        to(call, table, None, f"a tensor, {INT32} [2, max_pages]", "None"),
        of(call, table, lambda t: t.long(), f"{INT32} [2, max_pages]", "torch.int64"),
        of(call, table, lambda t: t[0], f"{INT32} [2, max_pages]", "[2] on cpu"),
        of(call, table, lambda t: t[:1], f"{INT32} [2, max_pages]", "[1, 2]"),
        of(call, table, on_meta, "a tensor on cpu", "on meta"),
        of(call, table, lambda t: t - 10, "pages 0 to 3", "for sequence 0, entry 0"),
        of(call, table, lambda t: t.where(t != t[1, 1], 4), "0 to 3", "page 4 for sequence 1"),
        Malformed(
            call, lengths, "0 to 0 pages", "for sequence 0", lambda a: {table: a[table][:, :0]}
        ),
        to(call, lengths, None, f"a tensor, {INT32} [2]", "None"),
        to(call, lengths, torch.tensor([2, 3]), f"{INT32} [2]", "torch.int64"),
        to(call, lengths, int32(2), f"{INT32} [2]", "[1]"),
        to(call, lengths, int32(2, 3).to("meta"), "a tensor on cpu", "on meta"),
        to(call, lengths, int32(2, -1), "0 to 2 pages", "-1 for sequence 1"),
        to(call, lengths, int32(999, 3), "0 to 2 pages", "999 for sequence 0"),
    ]


DENSE_ONLY = [
    to(DENSE, "k_nope", None, "a tensor, torch.float32 [total_k, heads, d_nope]", "None"),
    of(DENSE, "k_nope", lambda k: k[:, :0], "2 heads, as q has, or a number", "got 0"),
    of(DENSE, "k_nope", lambda k: k.repeat(1, 2, 1), "a number that divides it", "got 4"),
    of(DENSE, "k_nope", lambda k: k[:, 0], "[total_k, heads, d_nope]", "[5, 8]"),
    Malformed(DENSE, "v", "[5, 1, d_v]", "[5, 2, 6]", lambda a: {"k_nope": a["k_nope"][:, :1]}),
    of(DENSE, "k_nope", lambda k: k.bfloat16(), "torch.float32", "torch.bfloat16"),
    of(DENSE, "k_nope", on_meta, "a tensor on cpu", "on meta"),
    of(DENSE, "k_nope", last_dim_strided, "a contiguous last dimension", "stride 2"),
    of(DENSE, "k_nope", lambda k: k[..., :0], "a width above 0", "[5, 2, 0]"),
    of(DENSE, "k_nope", lambda k: k.repeat(1, 1, 2), "at most q's width 12", "d_nope 16"),
    to(DENSE, "v", None, "a tensor, torch.float32 [5, 2, d_v]", "None"),
    of(DENSE, "v", lambda v: v[:4], "[5, 2, d_v]", "[4, 2, 6]"),
    of(DENSE, "v", lambda v: v[:, :1], "[5, 2, d_v]", "[5, 1, 6]"),
    of(DENSE, "v", lambda v: v.half(), "torch.float32", "torch.float16"),
    of(DENSE, "v", on_meta, "a tensor on cpu", "on meta"),
    of(DENSE, "v", last_dim_strided, "a contiguous last dimension", "stride 2"),
    of(DENSE, "v", lambda v: v[..., :0], "a width above 0", "[5, 2, 0]"),
    to(DENSE, "k_rope", None, "4 columns (q has 12, k_nope 8)", "None"),
    to(DENSE, "k_rope", "cache", "a tensor, torch.float32 [5, 4]", "str 'cache'"),
    of(DENSE, "k_rope", lambda r: r[:4], "torch.float32 [5, 4]", "[4, 4]"),
    of(DENSE, "k_rope", lambda r: r[:, :3], "torch.float32 [5, 4], because q has 12", "[5, 3]"),
    Malformed(
        DENSE, "k_rope", "[5, 0], because q has 8", "[5, 4]", lambda a: {"q": a["q"][..., :8]}
    ),
    of(DENSE, "k_rope", lambda r: r[:, None].expand(5, 3, 4), "[5, 2, 4]", "[5, 3, 4]"),
    of(DENSE, "k_rope", lambda r: r.bfloat16(), "torch.float32 [5, 4]", "torch.bfloat16"),
    of(DENSE, "k_rope", on_meta, "a tensor on cpu", "on meta"),
    of(DENSE, "k_rope", last_dim_strided, "a contiguous last dimension", "stride 2"),
    to(DENSE, "cu_seqlens_k", int32(0, 5), "3 entries, as cu_seqlens_q has", "2"),
    to(DENSE, "cu_seqlens_k", torch.tensor([0, 2, 5]), INT32, "torch.int64"),
    to(DENSE, "cu_seqlens_k", int32(0, 2, 6), "at most 5 (rows of the keys)", "6"),
    to(DENSE, "cu_seqlens_k", int32(2, 3, 5), "0 as its first entry", "2"),
    to(DENSE, "cu_seqlens_k", int32(0, 3, 1), "offsets that never fall", "3 then 1"),
    to(DENSE, "block_table", int32(0)[None], "None, unless k_rope is a LatentCache", "a tensor"),
    to(DENSE, "cache_lengths", int32(0), "None, unless k_rope is a LatentCache", "a tensor"),
    Malformed(DENSE, "out", "apart from v", "an overlap", lambda a: {"out": a["v"]}),
    Malformed(
        DENSE,
        "k_start",
        "has no backward pass",
        "is given",
        lambda a: {"v": a["v"].requires_grad_(), "out": None, "k_start": int32(0, 2)},
        Unsupported,
    ),
    Malformed(
        DENSE,
        "q_scale",
        "has no backward pass",
        "is given",
        lambda a: {"q": a["q"].requires_grad_(), "out": None, "q_scale": torch.ones(5)},
        Unsupported,
    ),
    of(
        DENSE_CACHE,
        "k_rope",
        lambda c: LatentCache(c.data, None, 7, 5, "bf16"),
        "a cache with 4 rope columns",
        "5",
    ),
    of(DENSE_CACHE, "k_rope", cache_on_meta, "a cache on cpu", "one on meta"),
    to(DENSE_CACHE, "cache_lengths", int32(1, 3), "2 keys for sequence 0", "1"),
]

LATENT_ONLY = [
    to(LATENT, "cache", None, "a tensor", "None"),
    to(LATENT, "cache", torch.zeros(4, 12), "[pages, page_size, width]", "[4, 12]"),
    to(LATENT, "cache", torch.zeros(4, 4, 656, dtype=torch.uint8), "a LatentCache", "uint8"),
    to(LATENT, "cache", torch.zeros(4, 4, 512), "torch.bfloat16 [pages", "torch.float32"),
    of(
        LATENT,
        "cache",
        lambda c: LatentCache(c.data[..., :10], None, 8, 2, "bf16"),
        "rows of 12 values, as q has (absorbed queries: latent + rope)",
        "10",
    ),
    of(LATENT, "cache", cache_on_meta, "a cache on cpu", "one on meta"),
    of(
        LATENT,
        "cache",
        lambda c: last_dim_strided(c.data.repeat(1, 1, 43)),
        "a contiguous last dimension",
        "stride 2",
    ),
    to(LATENT, "range_keys", 0, "None, or a power of two from 128 to 1048576", "int 0"),
    to(LATENT, "range_keys", 64, "a power of two from 128", "int 64"),
    to(LATENT, "range_keys", 384, "a power of two from 128", "int 384"),
    to(LATENT, "range_keys", 2**21, "a power of two from 128 to 1048576", "int 2097152"),
    to(LATENT, "range_keys", -128, "a power of two from 128", "int -128"),
    to(LATENT, "range_keys", True, "None, or a power", "bool True"),
    to(LATENT, "range_keys", 512.0, "None, or a power", "float 512.0"),
    to(LATENT, "range_keys", "512", "None, or a power", "'512'"),
    to(LATENT, "d_v", 9, "at most the latent width 8", "9"),
    to(LATENT, "d_v", 0, "a positive int", "int 0"),
    to(LATENT, "d_v", 2.0, "a positive int", "float 2.0"),
    Malformed(
        LATENT, "d_v", "at most the row width 12", "512", lambda a: {"cache": a["cache"].data}
    ),
    to(LATENT, "scale", REMOVED, "mla_prefill_latent has no default", "None"),
    Malformed(
        LATENT,
        "out",
        "apart from cache",
        "an overlap",
        lambda a: {"q": a["q"].bfloat16(), "out": a["cache"].data.view(-1)[:80].view(5, 2, 8)},
    ),
    Malformed(
        LATENT,
        "cache",
        "the forward pass",
        "requires a gradient",
        lambda a: {
            "cache": LatentCache(a["cache"].data.clone().requires_grad_(), None, 8, 4, "bf16")
        },
        Unsupported,
    ),
]

SPARSE_ONLY = [
    to(SPARSE, "kv", None, "a tensor", "None"),
    of(SPARSE, "kv", lambda kv: kv[None], "[rows, width]", "[1, 7, 12]"),
    of(SPARSE, "kv", lambda kv: kv[:, :10], "torch.float32 [rows, 12]", "[7, 10]"),
    of(SPARSE, "kv", lambda kv: kv.bfloat16(), "torch.float32 [rows, 12]", "torch.bfloat16"),
    of(SPARSE, "kv", lambda kv: kv.int(), "torch.bfloat16 or", INT32),
    of(SPARSE, "kv", on_meta, "a tensor on cpu", "on meta"),
    of(SPARSE, "kv", last_dim_strided, "a contiguous last dimension", "stride 2"),
    to(SPARSE, "indices", None, f"a tensor, {INT32} [5, topk]", "None"),
    of(SPARSE, "indices", lambda i: i.long(), f"{INT32} [5, topk]", "torch.int64 [5, 3]"),
    of(SPARSE, "indices", lambda i: i[:4], f"{INT32} [5, topk]", "[4, 3]"),
    of(SPARSE, "indices", lambda i: i[:, None], f"{INT32} [5, topk]", "[5, 1, 3]"),
    of(SPARSE, "indices", on_meta, "a tensor on cpu", "on meta"),
    to(SPARSE, "topk_lengths", 3, f"a tensor, {INT32} [5]", "int 3"),
    to(SPARSE, "topk_lengths", int32(1, 2), f"{INT32} [5]", "[2]"),
    to(SPARSE, "topk_lengths", torch.ones(5), f"{INT32} [5]", "torch.float32"),
    to(SPARSE, "topk_lengths", torch.ones(5).long(), f"{INT32} [5]", "torch.int64"),
    to(SPARSE, "topk_lengths", int32(*[1] * 5).to("meta"), "a tensor on cpu", "on meta"),
    to(SPARSE, "d_v", REMOVED, "at most the row width 12", "512"),
    to(SPARSE, "d_v", 13, "at most the row width 12", "13"),
    to(SPARSE, "d_v", 0, "a positive int", "int 0"),
    to(SPARSE, "d_v", -1, "a positive int", "int -1"),
    to(SPARSE, "d_v", True, "a positive int", "bool True"),
    to(SPARSE, "d_v", "8", "a positive int", "str '8'"),
    to(SPARSE, "scale", REMOVED, "mla_prefill_sparse has no default", "None"),
    to(SPARSE, "return_max_logits", "yes", "True or False", "str 'yes'"),
    Malformed(
        SPARSE,
        "out",
        "apart from kv",
        "an overlap",
        lambda a: {"kv": a["out"].view(-1)[:72].view(6, 12)},
    ),
    of(SPARSE_CACHE, "kv", cache_on_meta, "a cache on cpu", "one on meta"),
    of(
        SPARSE_CACHE,
        "kv",
        lambda c: LatentCache(c.data[..., :11], None, 8, 3, "bf16"),
        "rows of 12 values, as q has (absorbed queries: latent + rope)",
        "11",
    ),
    to(SPARSE_CACHE, "d_v", 9, "at most the latent width 8", "9"),
]

ATTEND = "mla_attend"
SPAN, LISTED = 0, 1  # places of the two in the valid call


def part(place: int, field: str, new: Any, expected: str, got: str, name: str = "") -> Malformed:
    """A field of a source replaced, by a value or by a function of its valid value."""

    def change(arguments: dict[str, Any]) -> dict[str, Any]:
        sources = list(arguments["sources"])
        old = getattr(sources[place], field)
        sources[place] = replace(sources[place], **{field: new(old) if callable(new) else new})
        return {"sources": sources}

    return Malformed(ATTEND, name or f"sources[{place}].{field}", expected, got, change)


def narrower(cache: LatentCache) -> LatentCache:
    """A cache without its last column."""
    return LatentCache(cache.data[..., :11], None, 8, 3, "bf16")


ATTEND_ONLY = [
    to(ATTEND, "sources", None, "1 to 2 of Listed and Span", "NoneType"),
    to(ATTEND, "sources", [], "1 to 2 of Listed and Span", "list of 0"),
    of(ATTEND, "sources", lambda s: s[SPAN], "in a list or tuple", "Span"),
    of(ATTEND, "sources", lambda s: [*s, s[0]], "1 to 2 of Listed and Span", "list of 3"),
    Malformed(
        ATTEND,
        "sources[1]",
        "a Listed or a Span",
        "torch.float32",
        lambda a: {"sources": [a["sources"][0], torch.ones(3)]},
    ),
    part(SPAN, "cache", lambda c: c.data, "a LatentCache", "torch.bfloat16"),
    part(SPAN, "cache", cache_on_meta, "a cache on cpu", "one on meta"),
    part(SPAN, "cache", narrower, "rows of 12 values", "11"),
    part(SPAN, "block_table", lambda t: t.long(), f"{INT32} [requests, pages]", "torch.int64"),
    part(SPAN, "block_table", lambda t: t[0], f"{INT32} [requests, pages]", "[2]"),
    part(SPAN, "request", None, f"a tensor, {INT32} [5]", "None"),
    part(SPAN, "begin", int32(0, 1), f"{INT32} [5]", "[2]"),
    part(SPAN, "begin", lambda t: t.long(), f"{INT32} [5]", "torch.int64"),
    part(SPAN, "end", on_meta, "a tensor on cpu", "on meta"),
    part(LISTED, "rows", None, "a tensor, torch.float32 [rows, 12]", "None"),
    part(LISTED, "rows", lambda kv: kv.bfloat16(), "torch.float32 [rows, 12]", "torch.bfloat16"),
    part(LISTED, "rows", lambda kv: kv[:, :10], "torch.float32 [rows, 12]", "[7, 10]"),
    part(LISTED, "rows", last_dim_strided, "a contiguous last dimension", "stride 2"),
    part(LISTED, "indices", lambda i: i.long(), f"{INT32} [5, n]", "torch.int64"),
    part(LISTED, "indices", lambda i: i[:4], f"{INT32} [5, n]", "[4, 3]"),
    part(LISTED, "lengths", int32(1, 2), f"{INT32} [5]", "[2]"),
    Malformed(
        ATTEND,
        "sources[1]",
        "latent width 8, as the other source has",
        "9",
        lambda a: {"sources": [a["sources"][0], replace(a["sources"][0], cache=other_latent(a))]},
    ),
    to(ATTEND, "d_v", 9, "at most the latent width 8", "9"),
    to(ATTEND, "d_v", 0, "a positive int", "int 0"),
    to(ATTEND, "d_v", True, "a positive int", "bool True"),
    to(ATTEND, "scale", None, "mla_attend has no default", "None"),
    to(ATTEND, "scale", NAN, "a finite number", "nan"),
    to(ATTEND, "sink", torch.zeros(3), "torch.float32 [2]", "[3]"),
    to(ATTEND, "return_lse", 1, "True or False", "int 1"),
    to(ATTEND, "backend", "hip", "one of auto", "'hip'"),
    of(ATTEND, "q", lambda q: q.double(), "torch.float8_e4m3fn", "torch.float64"),
    Malformed(
        ATTEND,
        "out",
        "apart from sources[1].rows",
        "an overlap",
        lambda a: {
            "sources": [a["sources"][0], Listed(a["out"].view(-1)[:72].view(6, 12), int_lists())]
        },
    ),
    Malformed(
        ATTEND,
        "sources[1].rows",
        "the forward pass",
        "requires a gradient",
        lambda a: {
            "sources": [a["sources"][0], Listed(torch.ones(7, 12, requires_grad=True), int_lists())]
        },
        Unsupported,
    ),
]


def other_latent(arguments: dict[str, Any]) -> LatentCache:
    cache = arguments["sources"][SPAN].cache
    return LatentCache(cache.data, None, 9, 3, "bf16")


def int_lists() -> Tensor:
    return torch.zeros(5, 3, dtype=torch.int32)


ATTENTION = [
    *(entry for form in FORMS for entry in common(form)),
    *(entry for form in (DENSE, LATENT) for entry in offsets(form)),
    *(entry for form in (DENSE_CACHE, LATENT) for entry in paging(form)),
    *DENSE_ONLY,
    *LATENT_ONLY,
    *SPARSE_ONLY,
    *ATTEND_ONLY,
]
