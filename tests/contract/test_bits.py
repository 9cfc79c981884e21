"""Points 7 to 10 of the contract on the CPU: unaddressed memory, sizes, and which bits come out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import calls
import formula
import openmla
from openmla import LatentCache

BEYOND = 2**31 + 16  # elements
POISONS = pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf], ids=str)
Q_LENS, K_LENS = [5, 1, 0, 70, 3, 300, 2, 9], [9, 1, 4, 70, 0, 600, 2, 5]


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    return all(formula.same_bits(a, b) for a, b in zip(got, want, strict=True))


# 7. Unaddressed memory


@POISONS
def test_7_dense_ignores_rows_and_gaps_it_does_not_address(poison: float):
    call = calls.dense([3, 2], [4, 2])
    want = openmla.mla_prefill(**call, return_lse=True)
    poisoned = dict(call)
    for name in ("q", "k_nope", "k_rope", "v"):
        value = call[name]
        roomy = torch.full((value.shape[0] + 3, *value.shape[1:-1], value.shape[-1] + 5), poison)
        roomy[: value.shape[0], ..., : value.shape[-1]] = value
        # The last rows belong to no sequence, the last columns to no row.
        poisoned[name] = roomy[..., : value.shape[-1]]
    got = openmla.mla_prefill(**poisoned, return_lse=True)
    assert same(tuple(t[:5] for t in got), want)
    assert not got[0][5:].any() and (got[1][5:] == -torch.inf).all()


@POISONS
def test_7_latent_ignores_unused_pages_tails_and_table_entries(poison: float):
    call = calls.latent([3, 2], [6, 3])
    want = openmla.mla_prefill_latent(**call, return_lse=True)
    data = torch.full_like(call["cache"].data, poison)
    for b, length in enumerate([6, 3]):
        for key in range(length):
            page = call["block_table"][b, key // 4]
            data[page, key % 4] = call["cache"].data[page, key % 4]
    call["cache"] = LatentCache(data, None, 8, 4, "bf16")
    tail = torch.full((2, 5), -(2**31), dtype=torch.int32)
    call["block_table"] = torch.cat([call["block_table"], tail], dim=1)
    assert same(openmla.mla_prefill_latent(**call, return_lse=True), want)


@POISONS
def test_7_sparse_ignores_rows_that_no_index_names(poison: float):
    call = calls.sparse(queries=4, rows=50)
    want = openmla.mla_prefill_sparse(**call, return_lse=True)
    unnamed = torch.ones(50, dtype=torch.bool)
    unnamed[call["indices"].long().flatten()] = False
    call["kv"][unnamed] = poison
    assert same(openmla.mla_prefill_sparse(**call, return_lse=True), want)


def test_7_outputs_need_not_be_cleared_first():
    call = calls.dense([3], [1])
    out = torch.full((3, 2, 6), torch.nan)
    openmla.mla_prefill(**call, out=out)
    assert formula.same_bits(out, openmla.mla_prefill(**call))


# 8. Sizes


def beyond(value: Tensor) -> Tensor:
    """The same values, rows 2^31 elements apart. The memory between them is never committed."""
    strides = (BEYOND, *[value.stride(i) for i in range(1, value.dim())])
    room = torch.empty((value.shape[0] - 1) * BEYOND + value[0].numel(), dtype=value.dtype)
    spread = room.as_strided(value.shape, strides)
    spread.copy_(value)
    return spread


@pytest.mark.parametrize("name", ["q", "k_nope", "k_rope", "v", "out"])
def test_8_dense_rows_past_two_to_the_31_elements(name: str):
    call = calls.dense([2], dtype=torch.bfloat16)
    want = openmla.mla_prefill(**call)
    call["out"] = torch.zeros_like(want)
    call[name] = beyond(call[name])
    assert formula.same_bits(openmla.mla_prefill(**call), want)


def test_8_cache_pages_past_two_to_the_31_elements():
    call = calls.latent([2], [4], page_size=2)
    want = openmla.mla_prefill_latent(**call)
    pages = call["cache"].data[call["block_table"][0].long()]
    call["cache"] = LatentCache(beyond(pages), None, 8, 4, "bf16")
    call["block_table"] = torch.tensor([[0, 1]], dtype=torch.int32)
    assert formula.same_bits(openmla.mla_prefill_latent(**call), want)


def test_8_sparse_row_past_two_to_the_31_elements_of_one_pool():
    rows = BEYOND // 12 + 2
    kv = torch.empty(rows, 12, dtype=torch.bfloat16)
    chosen = [1, rows - 1, rows - 2]
    kv[chosen] = calls.numbers(3, 12, dtype=torch.bfloat16)
    q = calls.numbers(1, 2, 12, seed=1, dtype=torch.bfloat16)
    indices = torch.tensor([chosen], dtype=torch.int32)
    got = openmla.mla_prefill_sparse(q, kv, indices, scale=0.3, d_v=8)
    few = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    want = openmla.mla_prefill_sparse(q, kv[chosen], few, scale=0.3, d_v=8)
    assert formula.same_bits(got, want)


def test_8_more_than_65535_queries_and_keys():
    call = calls.dense([70_000], [3], heads=1)
    out, lse = openmla.mla_prefill(**call, causal=False, return_lse=True)
    tail = {**call, "q": call["q"][-2:], "cu_seqlens_q": formula.cu_seqlens([2])}
    want = openmla.mla_prefill(**tail, causal=False, return_lse=True)
    formula.assert_close(out[-2:], want[0].double(), bound=1e-6)
    formula.assert_close(lse[-2:], want[1].double(), bound=1e-6)
    long = calls.dense([1], [70_000], heads=1)
    got = openmla.mla_prefill(**long, return_lse=True)
    keys = torch.cat([long["k_nope"], long["k_rope"][:, None]], dim=-1)
    exact = formula.ragged(long["q"], keys, long["v"], [1], [70_000], 12**-0.5)
    formula.assert_close(got[0], exact.out)
    formula.assert_close(got[1], exact.lse)


def test_8_more_than_65535_sequences():
    lens = [0] * 70_000
    lens[1], lens[-1] = 2, 3
    call = calls.dense([2, 3])
    want = openmla.mla_prefill(**call, return_lse=True)
    offsets = torch.tensor([0, 0] + [2] * 69_998 + [5], dtype=torch.int32)
    many = {**call, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    assert same(openmla.mla_prefill(**many, return_lse=True), want)


# 9. Bits


def one_of(form: str, i: int, **options: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Request i of the batch, alone."""
    if form == "dense":
        return openmla.mla_prefill, calls.dense([Q_LENS[i]], [K_LENS[i]], heads=5, seed=10 * i)
    if form == "latent":
        call = calls.latent([Q_LENS[i]], [K_LENS[i]], heads=5, seed=10 * i, **options)
        return openmla.mla_prefill_latent, call
    return openmla.mla_prefill_sparse, calls.sparse(Q_LENS[i], 40, 9, heads=5, seed=10 * i)


def batch_of(form: str, order: list[int], page_size: int, reverse_pages: bool) -> dict[str, Any]:
    """The requests `order`, together in one call."""
    alone = [one_of(form, i)[1] for i in order]
    joined: dict[str, Any] = {"q": torch.cat([call["q"] for call in alone])}
    q_lens, k_lens = [Q_LENS[i] for i in order], [K_LENS[i] for i in order]
    if form == "sparse":
        joined["kv"] = torch.cat([call["kv"] for call in alone])
        joined["indices"] = torch.cat([call["indices"] + 40 * n for n, call in enumerate(alone)])
        return {**joined, "scale": 0.3, "d_v": 8}
    joined["cu_seqlens_q"] = formula.cu_seqlens(q_lens)
    if form == "dense":
        for name in ("k_nope", "k_rope", "v"):
            joined[name] = torch.cat([call[name] for call in alone])
        return {**joined, "cu_seqlens_k": formula.cu_seqlens(k_lens)}
    keys = [calls.numbers(k, 12, seed=10 * i + 1) for i, k in zip(order, k_lens, strict=True)]
    pages = sum(-(-k // page_size) for k in k_lens) + 1
    ids = list(range(pages))
    cache, table = calls.paged(
        torch.cat(keys), k_lens, page_size, ids[::-1] if reverse_pages else ids
    )
    lengths = torch.tensor(k_lens, dtype=torch.int32)
    return {**joined, "cache": cache, "block_table": table, "cache_lengths": lengths, "scale": 0.3}


@pytest.mark.parametrize(
    ("order", "page_size", "reverse_pages"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 4, False),
        ([5, 3, 7, 1, 6, 0, 2, 4], 4, True),
        ([7, 6, 5, 4, 3, 2, 1, 0], 64, True),
        ([3, 3, 3, 3, 3, 3, 3, 3], 1, False),
    ],
    ids=["in-order", "shuffled", "reversed-pages-of-64", "eight-times-the-same"],
)
@pytest.mark.parametrize("form", ["dense", "latent", "sparse"])
def test_9_a_request_has_the_same_bits_alone_and_in_a_batch(
    form: str, order: list[int], page_size: int, reverse_pages: bool
):
    function, _ = one_of(form, 0)
    batch = batch_of(form, order, page_size, reverse_pages)
    out, lse = function(**batch, return_lse=True)
    at = 0
    for i in order:
        rows = slice(at, at + Q_LENS[i])
        assert same((out[rows], lse[rows]), function(**one_of(form, i)[1], return_lse=True)), i
        at += Q_LENS[i]


@pytest.mark.parametrize("form", ["dense", "latent", "sparse"])
def test_9_twenty_runs_give_the_same_bits(form: str):
    function, call = one_of(form, 3)
    first = function(**call, return_lse=True)
    for _ in range(20):
        assert same(function(**call, return_lse=True), first)


def test_9_a_different_scale_does_change_the_bits():
    """The comparison itself must be able to fail."""
    call = calls.dense([9])
    nudged = openmla.mla_prefill(**call, scale=12**-0.5 * (1 + 1e-6))
    assert not formula.same_bits(nudged, openmla.mla_prefill(**call))


# 10. Memory


def test_10_inputs_are_not_written():
    call = calls.dense()
    before = {name: value.clone() for name, value in call.items()}
    openmla.mla_prefill(**call, sink=torch.zeros(2), return_lse=True)
    assert all(formula.same_bits(call[name], before[name]) for name in call)


@pytest.mark.parametrize("heads", [1, 3, 16, 33])
@pytest.mark.parametrize("n", [1, 9, 31, 64, 257])
def test_9_a_token_has_the_same_bits_among_neighbors_that_are_computed_with_it(heads: int, n: int):
    """The CPU takes tokens together, and torch computes the last elements of a tensor otherwise."""
    torch.manual_seed(heads * n)
    q, rows = torch.randn(21, heads, 20), torch.randn(300, 20)
    indices = torch.randint(0, 300, (21, n), dtype=torch.int32)
    rest: dict[str, Any] = {"scale": 0.3, "d_v": 13, "sink": torch.randn(heads), "return_lse": True}
    together = openmla.mla_prefill_sparse(q, rows, indices, **rest)
    for token in (0, 3, 20):
        one = slice(token, token + 1)
        alone = openmla.mla_prefill_sparse(q[one].clone(), rows, indices[one], **rest)
        assert same(tuple(x[one] for x in together), alone)


def test_9_a_token_with_a_long_list_has_the_same_bits_among_many():
    """How many rows the CPU takes at a time depends on heads, not on how many tokens there are."""
    call = calls.sparse(queries=300, rows=2500, topk=2300)
    together = openmla.mla_prefill_sparse(**call)
    first = {name: call[name][:1].clone() for name in ("q", "indices")}
    assert formula.same_bits(together[:1], openmla.mla_prefill_sparse(**{**call, **first}))
