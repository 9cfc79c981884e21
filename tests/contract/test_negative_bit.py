"""Views with torch's negative bit: read as the numbers they stand for, never written through.

`x.conj().imag` of a complex x is such a view: its memory holds the negatives of its numbers. A
kernel that takes an address would read the wrong signs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import calls
import openmla
from indexer import cases
from openmla import IndexCache, InvalidArgument, LatentCache

SINK = {"sink": torch.tensor([0.3, -0.2]), "return_lse": True}


def negative(x: Tensor) -> Tensor:
    """The same numbers, in memory that holds their negatives."""
    view = torch._neg_view(-x)
    assert view.is_neg() and view.equal(x)
    return view


def scores() -> dict[str, Any]:
    call = cases.paged([2, 1], [5, 9])
    return {"q": call.q, "keys": call.keys, "weights": call.weights, **call.options}


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "mla_prefill": (openmla.mla_prefill, lambda: {**calls.dense(), **SINK}),
    "mla_prefill_latent": (openmla.mla_prefill_latent, lambda: {**calls.latent(), **SINK}),
    "mla_prefill_latent, pages": (
        openmla.mla_prefill_latent,
        lambda: {**(call := calls.latent()), "cache": call["cache"].data, "d_v": calls.LATENT},
    ),
    "mla_prefill_sparse": (openmla.mla_prefill_sparse, lambda: {**calls.sparse(), **SINK}),
    "reference": (openmla.mla_prefill, lambda: {**calls.dense(), "backend": "reference"}),
    "merge_states": (openmla.merge_states, calls.merge),
    "merge_many": (openmla.merge_many, calls.merge_many),
    "quantize": (openmla.quantize, lambda: {"x": calls.numbers(2, 3, 4), "rope": torch.ones(2, 4)}),
    "select_topk": (openmla.select_topk, lambda: {"scores": calls.numbers(3, 8), "topk": 2}),
    "index_topk": (openmla.index_topk, lambda: {**scores(), "topk": 3}),
}


def bits(results: Any) -> list[Tensor]:
    found = results if isinstance(results, tuple) else (results,)
    return [x.contiguous().view(torch.uint8) for x in found]


def same(a: Any, b: Any) -> bool:
    return all(map(torch.equal, bits(a), bits(b)))


def resolvable(x: object) -> bool:
    return isinstance(x, Tensor) and x.dtype != torch.float8_e4m3fn


@pytest.mark.parametrize("name", CALLS)
def test_every_input_may_be_such_a_view(name: str) -> None:
    function, valid = CALLS[name]
    arguments = valid()
    expected = function(**arguments)
    for argument, value in arguments.items():
        if isinstance(value, list):
            changed: Any = [negative(x) for x in value]
        elif resolvable(value):
            changed = negative(value)
        else:
            continue
        for _ in range(2):
            assert same(function(**{**arguments, argument: changed}), expected), argument


def test_the_view_of_a_complex_tensor_is_served() -> None:
    call = calls.sparse()
    expected = openmla.mla_prefill_sparse(**call)
    weights = torch.complex(torch.zeros(7), -torch.ones(7)).conj().imag
    assert weights.is_neg()
    assert same(openmla.mla_prefill_sparse(**call, k_scale=weights), expected)


@pytest.mark.parametrize("name", ["mla_prefill", "mla_prefill_latent", "mla_prefill_sparse"])
def test_out_must_hold_the_numbers_themselves(name: str) -> None:
    function, valid = CALLS[name]
    for return_lse in (True, False):
        arguments = {**valid(), "return_lse": return_lse}
        result = function(**arguments)
        memory = torch.zeros_like(result[0] if return_lse else result)
        with pytest.raises(InvalidArgument, match=r"out: expected memory .* negative bit"):
            function(**arguments, out=torch._neg_view(memory))
        assert not memory.any()


def test_outputs_of_the_indexer_likewise() -> None:
    memory = torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(InvalidArgument, match=r"out: .* negative bit"):
        openmla.select_topk(calls.numbers(3, 8), 2, out=torch._neg_view(memory))
    width = scores()["block_table"].shape[1] * 4
    with pytest.raises(InvalidArgument, match=r"out: .* negative bit"):
        openmla.indexer_scores(**scores(), out=torch._neg_view(torch.zeros(3, width)))


def test_fp8_has_no_negatives_in_torch_and_is_refused() -> None:
    call = scores()
    with pytest.raises(InvalidArgument, match=r"q: .* negative bit"):
        openmla.index_topk(**{**call, "q": torch._neg_view(call["q"])}, topk=3)


@pytest.mark.parametrize("format", ["bf16", "fp8_token", "fp8_block32"])
@pytest.mark.parametrize("rope", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_such_rows_are_appended(format: str, rope: int, dtype: torch.dtype) -> None:
    rows = calls.numbers(2, 8, dtype=dtype), calls.numbers(2, rope, dtype=dtype, seed=1)
    pools = []
    for given in (rows, tuple(negative(x) for x in rows)):
        cache = LatentCache.allocate(num_pages=2, page_size=3, latent=8, rope=rope, format=format)
        cache.append(*given, torch.tensor([0, 4]))
        pools.append(cache)
    assert same(pools[0].data, pools[1].data)
    if pools[0].scales is not None:
        assert same(pools[0].scales, pools[1].scales)


def test_a_pool_must_hold_its_rows_themselves() -> None:
    cache = LatentCache.allocate(num_pages=2, page_size=3, latent=8, rope=4, format="fp8_block32")
    assert cache.scales is not None
    for field, memory in (("data", cache.data), ("scales", cache.scales)):
        with pytest.raises(InvalidArgument, match=f"{field}: .* negative bit"):
            replace(cache, **{field: torch._neg_view(memory)})
    pages = IndexCache.allocate(num_pages=2, page_size=4)
    with pytest.raises(InvalidArgument, match=r"data: .* negative bit"):
        replace(pages, data=torch._neg_view(pages.data))


def test_such_a_view_may_be_traced() -> None:
    call = calls.sparse()
    expected = openmla.mla_prefill_sparse(**call)
    torch.compiler.reset()
    compiled = torch.compile(openmla.mla_prefill_sparse, fullgraph=True, backend="aot_eager")
    assert same(compiled(**call), expected)
    assert same(compiled(**{**call, "q": negative(call["q"])}), expected)


def test_a_traced_out_is_refused_by_torch() -> None:
    call, memory = calls.sparse(), torch.zeros(5, calls.HEADS, calls.LATENT)
    torch.compiler.reset()
    compiled = torch.compile(openmla.mla_prefill_sparse, fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError):
        compiled(**call, out=torch._neg_view(memory))
    assert not memory.any()
    assert compiled(**call, out=memory).equal(openmla.mla_prefill_sparse(**call))
