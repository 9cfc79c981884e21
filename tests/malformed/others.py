"""Malformed calls of merge_states, merge_many, plan, Problem, LatentCache and the shims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from malformed.arguments import Malformed, Unsupported
from malformed.attention import INT32, NAN, int32, last_dim_strided, of, on_meta, to

MERGE, MANY, PLAN, PROBLEM = "merge_states", "merge_many", "plan", "Problem"
CACHE, ALLOCATE, APPEND, GATHER = "LatentCache", "allocate", "append", "gather"
FLASH_MLA, FLASH_ATTN = "flash_mla", "flash_attn"


def second(name: str, change: Callable[[Tensor], object], expected: str, got: str) -> Malformed:
    """merge_many with another second part in a list."""

    def changed(arguments: dict[str, Any]) -> dict[str, Any]:
        parts = list(arguments[name])
        return {name: [parts[0], change(parts[1]), parts[2]]}

    return Malformed(MANY, f"{name}[1]", expected, got, changed)


def unsupported(call: str, argument: str, value: object, expected: str, got: str) -> Malformed:
    """Legal elsewhere, but without a kernel here."""
    return Malformed(call, argument, expected, got, {argument: value}, Unsupported)


MERGES = [
    to(MERGE, "out_a", None, "a tensor", "None"),
    of(MERGE, "out_a", lambda t: t[0], "[total_q, heads, d_v]", "[2, 6]"),
    of(MERGE, "out_a", lambda t: t.double(), "torch.bfloat16 or", "torch.float64"),
    of(MERGE, "out_a", lambda t: t.int(), "torch.bfloat16 or", INT32),
    of(MERGE, "out_b", lambda t: t[:4], "torch.float32 [5, 2, 6]", "[4, 2, 6]"),
    of(MERGE, "out_b", lambda t: t.half(), "torch.float32 [5, 2, 6]", "torch.float16"),
    of(MERGE, "out_b", on_meta, "a tensor on cpu", "on meta"),
    of(MERGE, "lse_a", lambda t: t.T, "torch.float32 [5, 2]", "[2, 5]"),
    of(MERGE, "lse_a", lambda t: t.double(), "torch.float32 [5, 2]", "torch.float64"),
    of(MERGE, "lse_b", lambda t: t[..., None], "torch.float32 [5, 2]", "[5, 2, 1]"),
    to(MERGE, "lse_b", 0.0, "a tensor, torch.float32 [5, 2]", "float 0.0"),
    of(MERGE, "lse_b", on_meta, "a tensor on cpu", "on meta"),
    Malformed(
        MERGE,
        "lse_a",
        "the forward pass",
        "requires a gradient",
        lambda a: {"lse_a": a["lse_a"].requires_grad_()},
        Unsupported,
    ),
    to(MANY, "outs", None, "a list of tensors or a tensor", "None"),
    to(MANY, "outs", [], "at least one part", "list []"),
    to(MANY, "outs", torch.ones(0, 5, 2, 6), "at least one part", "[0, 5, 2, 6]"),
    to(MANY, "outs", torch.ones(5, 2, 6), "[parts, total_q, heads, d_v]", "[5, 2, 6]"),
    to(MANY, "outs", torch.ones(3, 5, 2, 6).double(), "torch.bfloat16 or", "torch.float64"),
    second("outs", lambda t: t[:4], "torch.float32 [5, 2, 6]", "[4, 2, 6]"),
    second("outs", lambda t: t.half(), "torch.float32 [5, 2, 6]", "torch.float16"),
    second("outs", on_meta, "a tensor on cpu", "on meta"),
    second("outs", lambda t: None, "a tensor", "None"),
    to(MANY, "lses", 0.0, "a list of tensors or a tensor", "float 0.0"),
    to(MANY, "lses", (), "at least one part", "tuple ()"),
    of(MANY, "lses", lambda t: t[:2], "3 parts, as outs has", "2"),
    of(MANY, "lses", lambda t: t.transpose(1, 2), "torch.float32 [parts, 5, 2]", "[3, 2, 5]"),
    of(MANY, "lses", lambda t: t.bfloat16(), "torch.float32 [parts, 5, 2]", "torch.bfloat16"),
    of(MANY, "lses", on_meta, "a tensor on cpu", "on meta"),
    second("lses", lambda t: t[..., None], "torch.float32 [5, 2]", "[5, 2, 1]"),
    Malformed(
        MANY,
        "lses",
        "the forward pass",
        "requires a gradient",
        lambda a: {"lses": a["lses"].requires_grad_()},
        Unsupported,
    ),
]

PROBLEMS = [
    to(PROBLEM, "form", "paged", "one of dense, latent, sparse", "'paged'"),
    to(PROBLEM, "form", None, "one of dense", "None"),
    to(PROBLEM, "rope", "both", "one of none, shared, per_head, cache", "'both'"),
    to(PROBLEM, "q_dtype", "bfloat16", "one of bf16", "'bfloat16'"),
    to(PROBLEM, "q_dtype", "fp8_656", "one of bf16, fp16, fp32, e4m3", "'fp8_656'"),
    to(PROBLEM, "kv_dtype", "int8", "fp8_token", "'int8'"),
    to(PROBLEM, "v_dtype", torch.bfloat16, "one of bf16", "torch.bfloat16"),
    to(PROBLEM, "rope_dtype", "", "one of bf16", "''"),
    to(PROBLEM, "heads", 0, "1 to 128", "0"),
    to(PROBLEM, "heads", 129, "1 to 128", "129"),
    to(PROBLEM, "heads", "8", "an int", "'8'"),
    to(PROBLEM, "heads", 8.0, "an int", "8.0"),
    to(PROBLEM, "heads", True, "an int", "True"),
    to(PROBLEM, "d_nope", 0, "a positive width", "0"),
    to(PROBLEM, "d_v", -6, "a positive width", "-6"),
    to(PROBLEM, "d_rope", -1, "a count of 0 or more", "-1"),
    to(PROBLEM, "page_size", -1, "a count of 0 or more", "-1"),
    to(PROBLEM, "topk", -1, "a count of 0 or more", "-1"),
    to(PROBLEM, "batch", -1, "a count of 0 or more", "-1"),
    to(PROBLEM, "total_q", None, "an int", "None"),
    to(PROBLEM, "total_k", 1.5, "an int", "1.5"),
    to(PROBLEM, "causal", 1, "True or False", "1"),
    to(PROBLEM, "has_sink", None, "True or False", "None"),
    Malformed(PROBLEM, "d_v", "at most the latent width 8", "9", {"form": "latent", "d_v": 9}),
    to(PLAN, "target", "h900", "one of cpu", "'h900'"),
    to(PLAN, "target", None, "the name of a target", "None"),
    to(PLAN, "backend", "sm90", "one of auto, reference, cpu", "'sm90'"),
    Malformed(
        PLAN, "hopper", "nearest supported form", "target 'cpu'", {"backend": "hopper"}, Unsupported
    ),
]

CACHES = [
    to(ALLOCATE, "num_pages", -1, "an int of at least 0", "-1"),
    to(ALLOCATE, "num_pages", 2.0, "an int of at least 0", "2.0"),
    to(ALLOCATE, "num_pages", True, "an int of at least 0", "True"),
    to(ALLOCATE, "page_size", 0, "an int of at least 1", "0"),
    to(ALLOCATE, "page_size", "64", "an int of at least 1", "'64'"),
    to(ALLOCATE, "latent", 0, "an int of at least 1", "0"),
    to(ALLOCATE, "rope", -64, "an int of at least 0", "-64"),
    to(ALLOCATE, "format", "fp8", "one of bf16, fp8_656", "'fp8'"),
    to(ALLOCATE, "format", None, "one of bf16, fp8_656", "None"),
    to(ALLOCATE, "device", "gpu", "a torch device", "'gpu'"),
    to(ALLOCATE, "device", 1.5, "a torch device", "1.5"),
    to(ALLOCATE, "device", "cuda:99", "a torch device of this machine", "'cuda:99'"),
    Malformed(
        ALLOCATE,
        "format",
        "latent 512, rope 64 for fp8_656",
        "latent 256, rope 64",
        {"format": "fp8_656", "latent": 256},
    ),
    to(CACHE, "data", None, "a tensor, torch.float8_e4m3fn", "NoneType"),
    of(CACHE, "data", lambda d: d[0], "[pages, page_size, 12]", "(3, 12)"),
    of(CACHE, "data", lambda d: d[..., :11], "[pages, page_size, 12]", "(2, 3, 11)"),
    of(CACHE, "data", lambda d: d.bfloat16(), "torch.float8_e4m3fn", "torch.bfloat16"),
    of(
        CACHE,
        "data",
        lambda d: d.view(torch.uint8).repeat(1, 1, 2)[..., ::2].view(d.dtype),
        "a contiguous last dimension",
        "stride 2",
    ),
    of(CACHE, "data", lambda d: d[:, :0], "at least 1 row per page", "(2, 0, 12)"),
    to(CACHE, "scales", None, "float32 [2, 3, 1]", "NoneType"),
    of(CACHE, "scales", lambda s: s[0], "float32 [2, 3, 1]", "(3, 1)"),
    of(CACHE, "scales", lambda s: s.half(), "float32 [2, 3, 1]", "torch.float16"),
    of(CACHE, "scales", on_meta, "a tensor on cpu", "one on meta"),
    to(CACHE, "latent", "8", "an int of at least 1", "'8'"),
    to(CACHE, "rope", None, "an int of at least 0", "None"),
    Malformed(CACHE, "data", "[pages, page_size, 13]", "(2, 3, 12)", {"rope": 5}),
    to(CACHE, "format", "fp16", "one of bf16", "'fp16'"),
    Malformed(
        CACHE,
        "scales",
        "None for bf16",
        "a tensor",
        lambda a: {"format": "bf16", "data": a["data"].bfloat16()},
    ),
    Malformed(
        CACHE,
        "scales",
        "a contiguous last dimension",
        "stride 2",
        {
            "data": torch.zeros(2, 3, 44, dtype=torch.float8_e4m3fn),
            "latent": 40,
            "scales": torch.ones(2, 3, 4)[..., ::2],
        },
    ),
    to(APPEND, "latent", None, "a tensor [tokens, 8]", "NoneType"),
    to(APPEND, "latent", torch.ones(2, 7), "[tokens, 8]", "(2, 7)"),
    to(APPEND, "latent", torch.ones(8), "[tokens, 8]", "(8,)"),
    to(APPEND, "latent", torch.ones(2, 8).int(), "torch.bfloat16, torch.float16", INT32),
    to(APPEND, "latent", torch.ones(2, 8, device="meta"), "a tensor on cpu", "one on meta"),
    to(APPEND, "rope", None, "a tensor [tokens, 4]", "NoneType"),
    to(APPEND, "rope", torch.ones(2, 5), "[tokens, 4]", "(2, 5)"),
    to(APPEND, "rope", torch.ones(1, 4), "2 tokens, as latent has", "1"),
    to(APPEND, "rope", torch.ones(2, 4).to(torch.float8_e4m3fn), "torch.bfloat16", "float8"),
    to(APPEND, "slot_mapping", [0, 1], "a tensor of row numbers", "list"),
    to(APPEND, "slot_mapping", torch.tensor([0]), "2 slots, one per token", "1"),
    to(APPEND, "slot_mapping", torch.tensor([0, 6]), "rows 0 to 5 (the pool has 6)", "row 6"),
    to(APPEND, "slot_mapping", torch.tensor([0, -1]), "rows 0 to 5", "row -1"),
    to(APPEND, "slot_mapping", torch.tensor([0.0, 1.0]), "int64 [tokens]", "torch.float32"),
    to(APPEND, "slot_mapping", torch.tensor([[0, 1]]), "int64 [tokens]", "(1, 2)"),
    Malformed(
        APPEND,
        "rope",
        "does not carry one",
        "requires a gradient",
        {"rope": torch.ones(2, 4, requires_grad=True)},
        Unsupported,
    ),
    to(GATHER, "rows", 0, "a tensor of row numbers", "int"),
    to(GATHER, "rows", torch.tensor([6]), "rows 0 to 5", "row 6"),
    to(GATHER, "rows", torch.tensor([True]), "int64 [tokens]", "torch.bool"),
    to(GATHER, "rows", torch.tensor([0]).to("meta"), "a tensor on cpu", "one on meta"),
]

SHIM_FLASH_MLA = [
    of(FLASH_MLA, "q", lambda q: q[:, 0], "[total_q, heads, d_qk]", "[5, 12]"),
    to(FLASH_MLA, "kv", None, "a tensor", "None"),
    of(FLASH_MLA, "kv", lambda kv: kv[:, 0], "[s_kv, 1, 12]", "[7, 12]"),
    of(FLASH_MLA, "kv", lambda kv: kv.expand(-1, 2, -1), "[s_kv, 1, 12]", "[7, 2, 12]"),
    of(FLASH_MLA, "kv", lambda kv: kv.half(), "torch.float32 [s_kv", "torch.float16"),
    of(FLASH_MLA, "kv", last_dim_strided, "a contiguous last dimension", "stride 2"),
    of(FLASH_MLA, "indices", lambda i: i[:, 0], f"{INT32} [5, 1, topk]", "[5, 3]"),
    of(FLASH_MLA, "indices", lambda i: i.long(), f"{INT32} [5, 1, topk]", "torch.int64"),
    to(FLASH_MLA, "sm_scale", None, "flash_mla_sparse_fwd has no default", "None"),
    to(FLASH_MLA, "sm_scale", NAN, "a finite number", "nan"),
    to(FLASH_MLA, "d_v", 13, "at most the row width 12", "13"),
    to(FLASH_MLA, "attn_sink", torch.zeros(3), "torch.float32 [2]", "[3]"),
    to(FLASH_MLA, "attn_sink", torch.zeros(2).half(), "torch.float32 [2]", "torch.float16"),
    to(FLASH_MLA, "topk_length", int32(3), f"{INT32} [5]", "[1]"),
    to(FLASH_MLA, "topk_length", torch.ones(5).long(), f"{INT32} [5]", "torch.int64"),
    of(FLASH_MLA, "out", lambda o: o[..., :7], "[5, 2, 8]", "[5, 2, 7]"),
    Malformed(
        FLASH_MLA,
        "attn_sink",
        "the forward pass",
        "requires a gradient",
        {"attn_sink": torch.zeros(2, requires_grad=True)},
        Unsupported,
    ),
]

SHIM_FLASH_ATTN = [
    to(FLASH_ATTN, "q", None, "[total_q, heads, d_qk]", "None"),
    to(FLASH_ATTN, "k", None, "[total_k, heads_k, 12]", "None"),
    of(FLASH_ATTN, "k", lambda k: k[..., :8], "[total_k, heads_k, 12]", "[7, 4, 8]"),
    of(FLASH_ATTN, "k", lambda k: k[:, :3], "a number of heads that divides q's 4", "3 heads"),
    of(FLASH_ATTN, "k", lambda k: k[:, :0], "a number of heads that divides q's 4", "0 heads"),
    of(FLASH_ATTN, "k", lambda k: k.bfloat16(), "torch.float32", "torch.bfloat16"),
    of(FLASH_ATTN, "k", last_dim_strided, "a contiguous last dimension", "stride 2"),
    of(FLASH_ATTN, "v", lambda v: v[:6], "torch.float32 [7, 4, d_v]", "[6, 4, 6]"),
    of(FLASH_ATTN, "v", lambda v: v[:, :2], "torch.float32 [7, 4, d_v]", "[7, 2, 6]"),
    of(FLASH_ATTN, "v", lambda v: v[..., :0], "a width above 0", "[7, 4, 0]"),
    of(FLASH_ATTN, "v", on_meta, "a tensor on cpu", "on meta"),
    to(FLASH_ATTN, "cu_seqlens_q", torch.tensor([0, 2, 5]), INT32, "torch.int64"),
    to(FLASH_ATTN, "cu_seqlens_k", None, f"a tensor, {INT32}", "None"),
    to(FLASH_ATTN, "cu_seqlens_k", int32(0, 7), "3 entries, as cu_seqlens_q has", "2"),
    to(FLASH_ATTN, "cu_seqlens_k", int32(0, 4, 8), "at most 7", "8"),
    to(FLASH_ATTN, "seqused_q", int32(1), "torch.int32 [2]", "[1]"),
    to(FLASH_ATTN, "seqused_k", torch.tensor([1, 1]), "torch.int32 [2]", "torch.int64"),
    to(FLASH_ATTN, "max_seqlen_q", -1, "an int of 0 or more", "int -1"),
    to(FLASH_ATTN, "max_seqlen_k", None, "an int of 0 or more", "None"),
    to(FLASH_ATTN, "num_splits", 1.0, "an int of 0 or more", "float 1.0"),
    to(FLASH_ATTN, "sm_margin", -2, "an int of 0 or more", "int -2"),
    to(FLASH_ATTN, "softmax_scale", "auto", "a finite number", "str 'auto'"),
    to(FLASH_ATTN, "softmax_scale", NAN, "a finite number", "nan"),
    to(FLASH_ATTN, "causal", 1, "True or False", "int 1"),
    to(FLASH_ATTN, "deterministic", 1, "True or False", "int 1"),
    to(FLASH_ATTN, "pack_gqa", 0, "True or False", "int 0"),
    to(FLASH_ATTN, "return_attn_probs", None, "True or False", "None"),
    to(FLASH_ATTN, "window_size", -1, "(left, right)", "int -1"),
    to(FLASH_ATTN, "window_size", (-1, -1, 0), "(left, right)", "(-1, -1, 0)"),
    to(FLASH_ATTN, "window_size", (-1, None), "two ints", "(-1, None)"),
    to(FLASH_ATTN, "softcap", None, "0", "None"),
    to(FLASH_ATTN, "window_size", (-2, 0), "-1 or more", "(-2, 0)"),
    unsupported(FLASH_ATTN, "window_size", (8, 8), "(left, 0) without causal", "(8, 8)"),
    unsupported(FLASH_ATTN, "window_size", (8, -1), "(left, 0) without causal", "(8, -1)"),
    unsupported(FLASH_ATTN, "softcap", 30.0, "expected 0", "got 30.0"),
    unsupported(FLASH_ATTN, "attention_chunk", 64, "expected 0", "got 64"),
    unsupported(FLASH_ATTN, "qv", torch.zeros(5, 4, 6), "expected None", "[5, 4, 6]"),
    unsupported(FLASH_ATTN, "q_descale", torch.ones(2, 4), "one per token", "[2, 4]"),
    unsupported(FLASH_ATTN, "k_descale", torch.ones(2, 4), "expected None", "[2, 4]"),
    unsupported(FLASH_ATTN, "v_descale", torch.ones(2, 4), "expected None", "[2, 4]"),
]

OTHERS = [*MERGES, *PROBLEMS, *CACHES, *SHIM_FLASH_MLA, *SHIM_FLASH_ATTN]
