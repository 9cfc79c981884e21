"""The FlashAttention-3 shim against the formula, in FlashAttention's own conventions."""

from __future__ import annotations

import inspect

import pytest
import torch

import calls
import formula
from openmla.compat.flash_attn import flash_attn_varlen_func
from openmla.errors import InvalidArgument, Unsupported
from unstable_sorts import unstable_sorts

FA3_PARAMETERS = (
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k softmax_scale "
    "causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits "
    "pack_gqa deterministic sm_margin return_attn_probs"
)
Q_LENS, K_LENS = [2, 0, 4, 3, 1], [5, 3, 4, 1, 0]


def per_query_head(t: torch.Tensor, heads: int) -> torch.Tensor:
    return t.repeat_interleave(heads // t.shape[1], dim=1)


def test_signature_is_flash_attention_3s():
    parameters = inspect.signature(flash_attn_varlen_func).parameters
    assert " ".join(parameters) == FA3_PARAMETERS
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    given = {n: d for n, d in defaults.items() if d is not None}
    assert given == {
        "causal": False,
        "window_size": (-1, -1),
        "attention_chunk": 0,
        "softcap": 0.0,
        "num_splits": 1,
        "deterministic": False,
        "sm_margin": 0,
        "return_attn_probs": False,
    }


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("key_heads", [4, 2, 1], ids="key_heads={}".format)
def test_values_match_the_formula(causal: bool, key_heads: int):
    call = calls.flash_attn(Q_LENS, K_LENS, heads=4, key_heads=key_heads)
    out, lse = flash_attn_varlen_func(**call, causal=causal, return_attn_probs=True)
    k, v = (per_query_head(call[name], 4) for name in ("k", "v"))
    want = formula.ragged(call["q"], k, v, Q_LENS, K_LENS, 12**-0.5, causal)
    formula.assert_close(out, want.out)
    formula.assert_close(lse, want.lse.T)
    assert lse.is_contiguous()


def test_empty_row_is_plus_zero_and_minus_infinity():
    call = calls.flash_attn([3], [1])
    out, lse = flash_attn_varlen_func(**call, causal=True, return_attn_probs=True)
    assert formula.same_bits(out[:2], torch.zeros(2, 4, 6))
    assert formula.same_bits(lse[:, :2], torch.full((4, 2), -torch.inf))
    assert formula.same_bits(out[2], call["v"][0])


def test_only_out_is_returned_by_default_and_a_scale_is_used():
    call = calls.flash_attn()
    out = flash_attn_varlen_func(**call, softmax_scale=0.7)
    want = formula.ragged(call["q"], call["k"], call["v"], [2, 3], [4, 3], 0.7, causal=False)
    assert isinstance(out, torch.Tensor)
    formula.assert_close(out, want.out)


def test_window_of_minus_one_and_zero_is_causal():
    call = calls.flash_attn()
    causal = flash_attn_varlen_func(**call, causal=True)
    assert formula.same_bits(flash_attn_varlen_func(**call, window_size=(-1, 0)), causal)
    assert formula.same_bits(flash_attn_varlen_func(**call, window_size=[-1, 0]), causal)


@pytest.mark.parametrize("key_heads", [4, 2])
def test_windows_to_the_left_are_causal_windows(key_heads: int):
    call = calls.flash_attn([9, 2], [12, 5], heads=4, key_heads=key_heads)
    k, v = (per_query_head(call[name], 4) for name in ("k", "v"))
    want = formula.ragged(call["q"], k, v, [9, 2], [12, 5], 12**-0.5, window=4)
    given = [((3, 0), False), ([3, 0], True), ((3, -1), True), ((3, 7), True)]
    outs = [flash_attn_varlen_func(**call, window_size=w, causal=c) for w, c in given]
    formula.assert_close(outs[0], want.out)
    assert all(formula.same_bits(out, outs[0]) for out in outs)


def test_hints_about_speed_change_nothing():
    call = calls.flash_attn(heads=4, key_heads=2)
    hinted = flash_attn_varlen_func(
        **call, num_splits=0, pack_gqa=True, deterministic=True, sm_margin=8
    )
    assert formula.same_bits(hinted, flash_attn_varlen_func(**call))


def test_v_may_be_a_strided_view_of_a_projection():
    call = calls.flash_attn()
    wide = torch.full((7, 4, 20), torch.nan)
    wide[..., 12:18] = call["v"]
    got = flash_attn_varlen_func(**{**call, "v": wide[..., 12:18]})
    assert formula.same_bits(got, flash_attn_varlen_func(**call))


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_gradients_are_those_of_the_formula(key_heads: int):
    """Query heads that share a key head add up; the forward pass has the bits that it had."""
    call = calls.flash_attn([5, 3], [7, 3], key_heads=key_heads)
    served = flash_attn_varlen_func(**call, causal=True, return_attn_probs=True)
    given = {name: call[name].requires_grad_() for name in ("q", "k", "v")}
    out, lse = flash_attn_varlen_func(**call, causal=True, return_attn_probs=True)
    assert formula.same_bits(out.detach(), served[0]) and formula.same_bits(lse.detach(), served[1])
    got = torch.autograd.grad(out.square().sum() + lse.sum(), list(given.values()))
    wide = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    total = torch.zeros((), dtype=torch.float64)
    for first, last, start, stop in ((0, 5, 0, 7), (5, 8, 7, 10)):
        q, k = wide["q"][first:last], per_query_head(wide["k"], 4)[start:stop]
        scores = torch.einsum("qhd,khd->qhk", q, k) * 12**-0.5
        position = torch.arange(last - first)[:, None] + (stop - start) - (last - first)
        seen = torch.arange(stop - start) <= position
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        v = per_query_head(wide["v"], 4)[start:stop]
        total = total + torch.einsum("qhk,khv->qhv", scores.softmax(-1), v).square().sum()
        total = total + scores.logsumexp(-1).sum()
    for x, y in zip(got, torch.autograd.grad(total, list(wide.values())), strict=True):
        assert torch.allclose(x.double(), y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("which", ["keys", "queries", "both"])
def test_unused_rows_of_sequences(which: str, causal: bool):
    """As if they were not there; keys behind those that count are not read."""
    call = calls.flash_attn(Q_LENS, K_LENS, heads=4, key_heads=2)
    used_q, used_k = [1, 0, 3, 2, 0], [3, 3, 0, 1, 0]
    own_q = used_q if which != "keys" else Q_LENS
    own_k = used_k if which != "queries" else K_LENS
    given = {}
    if which != "keys":
        given["seqused_q"] = torch.tensor(used_q, dtype=torch.int32)
    if which != "queries":
        given["seqused_k"] = torch.tensor(used_k, dtype=torch.int32)
    queries, keys, first_q, first_k = [], [], 0, 0
    for q_len, used, k_len, count in zip(Q_LENS, own_q, K_LENS, own_k, strict=True):
        queries += range(first_q, first_q + used)
        keys += range(first_k, first_k + count)
        first_q, first_k = first_q + q_len, first_k + k_len
    k, v = (per_query_head(call[name], 4)[keys] for name in ("k", "v"))
    want = formula.ragged(call["q"][queries], k, v, own_q, own_k, 12**-0.5, causal)
    unread = torch.ones(first_k, dtype=torch.bool)
    unread[keys] = False
    call["k"][unread] = torch.nan
    call["v"][unread] = torch.nan
    with unstable_sorts():
        out, lse = flash_attn_varlen_func(**call, **given, causal=causal, return_attn_probs=True)
    formula.assert_close(out[queries], want.out)
    formula.assert_close(lse[:, queries], want.lse.T)
    others = torch.ones(first_q, dtype=torch.bool)
    others[queries] = False
    assert not out[others].any() and lse[:, others].isneginf().all()
    assert out.shape == call["q"].shape[:2] + call["v"].shape[2:] and lse.is_contiguous()
    assert formula.same_bits(out, flash_attn_varlen_func(**call, **given, causal=causal))


def test_more_rows_than_there_are_count_as_all():
    call = calls.flash_attn(Q_LENS, K_LENS, heads=4)
    many = torch.full((5,), 2**31 - 1, dtype=torch.int32)
    got = flash_attn_varlen_func(**call, seqused_q=many, seqused_k=many)
    formula.assert_close(got, flash_attn_varlen_func(**call).double())
    none = flash_attn_varlen_func(**call, seqused_q=-many, seqused_k=-many)
    assert not none.any()


@pytest.mark.parametrize("name", ["seqused_q", "seqused_k"])
def test_unused_rows_have_no_gradients(name: str):
    call = calls.flash_attn(Q_LENS, K_LENS, heads=4)
    used = {name: torch.tensor(Q_LENS, dtype=torch.int32)}
    with pytest.raises(InvalidArgument, match=f"{name}: expected"):
        flash_attn_varlen_func(**call, **{name: torch.ones(4, dtype=torch.int32)})
    call["q"].requires_grad_()
    with pytest.raises(Unsupported, match="gradients of sequences with unused rows"):
        flash_attn_varlen_func(**call, **used)
