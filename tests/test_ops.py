"""The torch operators: well-formed for torch.library, and traced without graph breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import calls
import formula
import openmla
from openmla.compat.flash_attn import flash_attn_varlen_func
from openmla.compat.flash_mla import flash_mla_sparse_fwd


def dense_arguments(lse: bool) -> tuple[Any, ...]:
    call = calls.dense()
    return (
        call["q"],
        call["k_nope"],
        call["k_rope"],
        call["v"],
        None,
        None,
        "",
        0,
        None,
        None,
        call["cu_seqlens_q"],
        call["cu_seqlens_k"],
        None,
        torch.zeros(2),
        None,
        None,
        None,
        0.3,
        True,
        2,
        "auto",
        torch.empty(5, 2, 6),
        torch.empty(5, 2) if lse else None,
    )


def latent_arguments(lse: bool) -> tuple[Any, ...]:
    call = calls.latent()
    return (
        call["q"],
        call["cache"].data,
        None,
        "bf16",
        8,
        call["block_table"],
        call["cache_lengths"],
        call["cu_seqlens_q"],
        None,
        torch.ones(5),
        None,
        0.3,
        True,
        2,
        False,
        128,
        8,
        "auto",
        torch.empty(5, 2, 8),
        torch.empty(5, 2) if lse else None,
    )


def sparse_arguments(lse: bool) -> tuple[Any, ...]:
    call = calls.sparse()
    extra = torch.empty(5, 2) if lse else None
    return (
        call["q"],
        call["kv"],
        None,
        "",
        0,
        call["indices"],
        None,
        None,
        None,
        torch.ones(7),
        0.3,
        8,
        "auto",
        torch.empty(5, 2, 8),
        extra,
        None if extra is None else extra.clone(),
    )


def attend_arguments(lse: bool) -> tuple[Any, ...]:
    call, paged = calls.sparse(), calls.latent()
    tokens = torch.zeros(5, dtype=torch.int32)
    span = (None, None, paged["block_table"], tokens, tokens - 1, tokens + 3)
    return (
        call["q"],
        *(paged["cache"].data, None, "bf16", 8, *span),
        *(call["kv"], None, "", 0, call["indices"], None, None, None, None, None),
        *((torch.zeros(7, 4), tokens.long()) if lse else (None, None)),
        torch.zeros(2),
        0.3,
        8,
        "auto",
        torch.empty(5, 2, 8),
        torch.empty(5, 2) if lse else None,
    )


def merge_arguments(lse: bool) -> tuple[Any, ...]:
    call = calls.merge_many()
    return (call["outs"], list(call["lses"]), torch.empty(5, 2, 6), torch.empty(5, 2))


@pytest.mark.parametrize("lse", [True, False], ids=["lse", "out-only"])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("dense", dense_arguments),
        ("latent", latent_arguments),
        ("sparse", sparse_arguments),
        ("attend", attend_arguments),
        ("merge_many", merge_arguments),
    ],
)
def test_operators_are_well_formed(name: str, arguments: Callable[[bool], tuple[Any, ...]], lse):
    operator = getattr(torch.ops.openmla, name).default
    checks = torch.library.opcheck(operator, arguments(lse))
    assert set(checks.values()) == {"SUCCESS"}


def dense_rope_cache(seed: int) -> dict[str, Any]:
    lens = [2 + seed, 3]
    call = calls.dense(lens, seed=seed)
    rows = torch.cat([torch.zeros(sum(lens), calls.LATENT), call["k_rope"]], dim=1)
    call["k_rope"], call["block_table"] = calls.paged(rows, lens, page_size=2)
    call["cache_lengths"] = torch.tensor(lens, dtype=torch.int32)
    return call


# Every call with two problems of different shapes, which one graph must serve.
COMPILED: dict[str, tuple[Callable[..., Any], Callable[[int], dict[str, Any]]]] = {
    "dense": (
        lambda **call: openmla.mla_prefill(**call, return_lse=True),
        lambda i: calls.dense([2 + i, 3], [4, 3 + i], seed=i),
    ),
    "dense-rope-cache": (lambda **call: openmla.mla_prefill(**call), dense_rope_cache),
    "latent": (
        lambda **call: openmla.mla_prefill_latent(**call, return_lse=True),
        lambda i: calls.latent([2 + i, 3], [4, 3 + i], seed=i),
    ),
    "latent-plain-pages": (
        lambda cache, **call: openmla.mla_prefill_latent(cache=cache.data, d_v=8, **call),
        lambda i: calls.latent([2 + i, 3], [4, 3 + i], seed=i),
    ),
    "sparse": (
        lambda **call: openmla.mla_prefill_sparse(**call, return_lse=True, return_max_logits=True),
        lambda i: calls.sparse(queries=4 + i, rows=7 + i, topk=3 + i, seed=i),
    ),
    "merge": (openmla.merge_states, lambda i: calls.merge(queries=4 + i, seed=i)),
    "merge-many": (openmla.merge_many, lambda i: calls.merge_many(queries=4 + i, seed=i)),
    "flash_mla": (flash_mla_sparse_fwd, lambda i: calls.flash_mla(seed=i)),
    "flash_attn": (
        lambda **call: flash_attn_varlen_func(**call, causal=True, return_attn_probs=True),
        lambda i: calls.flash_attn([2 + i, 3], [4, 3 + i], key_heads=2, seed=i),
    ),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_calls_have_the_bits_of_eager_ones(name: str):
    function, call = COMPILED[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for i in range(2):
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = compiled(**call(i))
        want = function(**call(i))
        pairs = [(got, want)] if isinstance(want, Tensor) else zip(got, want, strict=True)
        assert all(formula.same_bits(a, b) for a, b in pairs)


def test_inductor_runs_the_call():
    torch._dynamo.reset()
    call = calls.dense([3, 5], dtype=torch.bfloat16)
    compiled = torch.compile(openmla.mla_prefill, fullgraph=True, dynamic=True)
    assert formula.same_bits(compiled(**call), openmla.mla_prefill(**call))


def test_a_compiled_call_still_refuses_wrong_arguments():
    torch._dynamo.reset()
    call = calls.dense()
    call["v"] = call["v"][:4]
    compiled = torch.compile(lambda **call: openmla.mla_prefill(**call), backend="aot_eager")
    with pytest.raises(Exception, match=r"v: expected torch.float32 \[5, 2, d_v\]"):
        compiled(**call)


def test_out_of_a_compiled_call_is_written_in_place():
    torch._dynamo.reset()
    call = calls.dense()
    out = torch.full((5, 2, 6), torch.nan)
    compiled = torch.compile(openmla.mla_prefill, fullgraph=True, backend="aot_eager")
    compiled(**call, out=out)
    assert formula.same_bits(out, openmla.mla_prefill(**call))
