"""mla_prefill(key_mask=): which keys a query sees is what bits and causal both allow."""

from __future__ import annotations

import doctest

import pytest
import torch

import calls
import openmla
from openmla import InvalidArgument, Problem, reference
from openmla.indexer.reference import bits

BACKENDS = ("cpu", "reference")
Q_LENS, K_LENS = [3, 0, 70, 5], [90, 4, 70, 2]


def test_examples() -> None:
    assert doctest.testmod(reference).failed == 0


def random_mask(words: int, share: float = 0.5, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    flags = torch.rand(sum(Q_LENS), 32 * words, generator=generator) < share
    return torch.stack([bits(row.nonzero()[:, 0], words) for row in flags])


def formula(call: dict, mask: torch.Tensor, causal: bool) -> torch.Tensor:
    """Softmax over a boolean matrix, request by request."""
    flags = ((mask[:, :, None] >> torch.arange(32)) & 1).flatten(1).bool()
    out = torch.zeros(sum(Q_LENS), calls.HEADS, calls.D_V, dtype=torch.float64)
    t = s = 0
    for q_len, k_len in zip(Q_LENS, K_LENS, strict=True):
        q = call["q"][t : t + q_len].double()
        k_nope, v = (call[name][s : s + k_len].double() for name in ("k_nope", "v"))
        rope = call["k_rope"][s : s + k_len, None].double().expand(-1, calls.HEADS, -1)
        scores = torch.einsum("qhd,khd->hqk", q, torch.cat([k_nope, rope], -1)) * 0.3
        seen = flags[t : t + q_len, :k_len]
        if causal:
            seen = seen & torch.ones(q_len, k_len).tril(k_len - q_len).bool()
        p = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1).nan_to_num(0.0)
        out[t : t + q_len] = torch.einsum("hqk,khv->qhv", p, v)
        t, s = t + q_len, s + k_len
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.9, 1.0])
def test_bits_and_causal_both_decide(backend: str, causal: bool, share: float) -> None:
    call = calls.dense(Q_LENS, K_LENS)
    mask = random_mask(4, share)
    got = openmla.mla_prefill(**call, scale=0.3, causal=causal, key_mask=mask, backend=backend)
    assert torch.allclose(got.double(), formula(call, mask, causal), atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_bits_set_is_no_mask(backend: str) -> None:
    call = calls.dense(Q_LENS, K_LENS)
    everything = torch.full((sum(Q_LENS), 3), -1, dtype=torch.int32)
    got = openmla.mla_prefill(**call, key_mask=everything, return_lse=True, backend=backend)
    want = openmla.mla_prefill(**call, return_lse=True, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_without_bits_is_an_empty_row(backend: str) -> None:
    call = calls.dense(Q_LENS, K_LENS)
    mask = random_mask(3, 1.0)
    mask[1] = 0
    out, lse = openmla.mla_prefill(**call, key_mask=mask, return_lse=True, backend=backend)
    assert not out[1].any() and (lse[1] == -torch.inf).all()
    assert (lse[0] > -torch.inf).all() and out[0].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bits_past_the_keys_are_ignored(backend: str) -> None:
    call = calls.dense(Q_LENS, K_LENS)
    mask = random_mask(9)
    narrow = openmla.mla_prefill(**call, key_mask=mask[:, :3].contiguous(), backend=backend)
    assert torch.equal(openmla.mla_prefill(**call, key_mask=mask, backend=backend), narrow)
    assert torch.equal(openmla.mla_prefill(**call, key_mask=mask[:, :3], backend=backend), narrow)


def test_masked_attention_is_sparse_attention_on_the_selection() -> None:
    """What a selection's mask and its rows are for: the same function, in two forms."""
    tokens, topk = 40, 9
    scores = torch.randn(tokens, tokens)
    ends = torch.arange(1, tokens + 1, dtype=torch.int32)
    rows, mask = openmla.select_topk(scores, topk, ends=ends, return_mask=True)
    latent, rope = torch.randn(tokens, 16), torch.randn(tokens, 8)
    q = torch.randn(tokens, 2, 24)
    kv = torch.cat([latent, rope], -1)
    sparse = openmla.mla_prefill_sparse(q, kv, rows, scale=0.2, d_v=16)
    expanded = latent[:, None].expand(-1, 2, -1)
    cu = torch.tensor([0, tokens], dtype=torch.int32)
    dense = openmla.mla_prefill(
        q, expanded, rope, expanded, cu_seqlens_q=cu, scale=0.2, key_mask=mask
    )
    assert torch.allclose(dense, sparse, atol=1e-5)


def test_nan_of_a_key_that_nobody_sees_does_not_matter() -> None:
    call = calls.dense([6], [6])
    mask = torch.full((6, 1), ~(1 << 2), dtype=torch.int32)
    want = openmla.mla_prefill(**call, key_mask=mask)
    for name in ("k_nope", "k_rope", "v"):
        call[name][2] = torch.nan
    assert torch.equal(openmla.mla_prefill(**call, key_mask=mask), want)


@pytest.mark.parametrize(
    "mask",
    [
        torch.zeros(78, 3),
        torch.zeros(77, 3, dtype=torch.int32),
        torch.zeros(78, 2, dtype=torch.int32),
        torch.zeros(3, 78, dtype=torch.int32).T,
        [1],
    ],
    ids=["dtype", "rows", "too few words", "strided words", "a list"],
)
def test_malformed_masks_are_refused(mask: object) -> None:
    call = calls.dense(Q_LENS, K_LENS)
    with pytest.raises(InvalidArgument, match=r"^key_mask: expected"):
        openmla.mla_prefill(**call, key_mask=mask)


def test_only_dense_problems_have_a_mask() -> None:
    sizes = {"heads": 4, "d_nope": 8, "d_rope": 4, "d_v": 8}
    with pytest.raises(InvalidArgument, match="has_key_mask"):
        Problem(form="sparse", **sizes, has_key_mask=True)


@pytest.mark.parametrize(
    ("target", "backend"), [("h200", "hopper"), ("b200", "blackwell"), ("mi355x", "cdna4")]
)
def test_every_chips_own_kernels_take_a_mask(target: str, backend: str) -> None:
    problem = Problem(
        form="dense",
        heads=16,
        d_nope=128,
        d_rope=64,
        d_v=128,
        total_q=64,
        total_k=64,
        has_key_mask=True,
    )
    assert openmla.plan(problem, target).backend == backend
