"""The float64 reference against the formula: two independent ways to write attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import calls
import formula
from openmla import reference
from openmla.operands import DenseOperands, LatentOperands, SparseOperands, Weights

Q_LENS, K_LENS = [3, 0, 4, 2, 1], [5, 2, 4, 0, 1]
EXACT = 1e-13
NO_KEY = torch.full((2,), -torch.inf, dtype=torch.float64)


def dense_operands(causal: bool, sink: Tensor | None = None, per_head: bool = False):
    call = calls.dense(Q_LENS, K_LENS)
    if per_head:
        call["k_rope"] = calls.numbers(sum(K_LENS), calls.HEADS, calls.D_ROPE, seed=9)
    return DenseOperands(**call, causal=causal, weights=Weights(0.3, sink))


def whole_keys(op: DenseOperands) -> Tensor:
    rope = op.k_rope if op.k_rope.dim() == 3 else op.k_rope[:, None].expand(-1, calls.HEADS, -1)
    return torch.cat([op.k_nope, rope], dim=-1)


def assert_truth(truth: reference.Truth, want: formula.Expected) -> None:
    for got, expected in zip((truth.out, truth.lse, truth.max_logits), want, strict=True):
        formula.assert_close(got, expected, bound=EXACT)


@pytest.mark.parametrize("per_head", [False, True], ids=["shared-rope", "rope-per-head"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("with_sink", [False, True], ids=["plain", "sink"])
def test_dense(per_head: bool, causal: bool, with_sink: bool):
    sink = torch.tensor([0.5, -2.0]) if with_sink else None
    op = dense_operands(causal, sink, per_head)
    want = formula.ragged(op.q, whole_keys(op), op.v, Q_LENS, K_LENS, 0.3, causal, sink)
    assert_truth(reference.dense(op), want)


def test_latent():
    call = calls.latent(Q_LENS, K_LENS, page_size=2)
    weights = Weights(call.pop("scale"))
    op = LatentOperands(**call, causal=True, d_v=calls.LATENT, weights=weights)
    keys = calls.numbers(sum(K_LENS), 12, seed=1).to(torch.bfloat16)[:, None].expand(-1, 2, -1)
    want = formula.ragged(op.q, keys, keys[..., : calls.LATENT], Q_LENS, K_LENS, 0.3)
    assert_truth(reference.latent(op), want)


def test_sparse_follows_the_rules_of_indices():
    call = calls.sparse(queries=4, rows=6)
    call["indices"] = torch.tensor(
        [[0, 0, 5], [-1, 6, 3], [1, 2, 3], [-5, 9, 7]], dtype=torch.int32
    )
    lengths = torch.tensor([3, 9, 1, 3], dtype=torch.int32)
    weights = Weights(call.pop("scale"))
    op = SparseOperands(call["q"], call["kv"], call["indices"], lengths, call["d_v"], weights)
    want = formula.listed(call["q"], call["kv"], [[0, 0, 5], [3], [1], []], 8, 0.3)
    truth = reference.sparse(op)
    assert_truth(truth, want)
    assert truth.keys.tolist() == [3, 1, 1, 0]


def test_scales_per_token_multiply_the_scores():
    op = dense_operands(causal=True)
    q_scale, k_scale = calls.numbers(10, seed=5), calls.numbers(12, seed=6)
    weights = Weights(0.3, None, q_scale, k_scale)
    scaled = DenseOperands(**{**vars(op), "weights": weights})
    q = op.q.double() * q_scale[:, None, None].double()
    k = whole_keys(op).double() * k_scale[:, None, None].double()
    assert_truth(reference.dense(scaled), formula.ragged(q, k, op.v, Q_LENS, K_LENS, 0.3))


@pytest.mark.parametrize("sink", [None, torch.tensor([4.0, torch.inf])], ids=["plain", "sink"])
def test_a_row_that_sees_no_key_is_exactly_plus_zero_and_minus_infinity(sink: Tensor | None):
    truth = reference.dense(dense_operands(causal=True, sink=sink))
    for row in (7, 8):  # the sequence of two queries and no keys
        assert formula.same_bits(truth.out[row], torch.zeros(2, 6, dtype=torch.float64))
        assert formula.same_bits(truth.lse[row], NO_KEY)
        assert formula.same_bits(truth.max_logits[row], NO_KEY)
    assert truth.keys.tolist() == [3, 4, 5, 1, 2, 3, 4, 0, 0, 1]


def test_magnitudes_are_what_the_error_bound_needs():
    op = dense_operands(causal=False)
    truth = reference.dense(op)
    k = whole_keys(op)[:5].double()
    scores = torch.einsum("hd,shd->hs", op.q[0].double(), k) * 0.3
    p = torch.softmax(scores, dim=-1)
    magnitude = torch.einsum("hs,shv->hv", p, op.v[:5].double().abs())
    largest = torch.einsum("hd,shd->hs", op.q[0].double().abs(), k.abs()).amax(-1) * 0.3
    deviation = torch.einsum("hs,shv->hv", p**2, op.v[:5].double() ** 2).sqrt()
    formula.assert_close(truth.magnitude[0], magnitude, bound=EXACT)
    formula.assert_close(truth.deviation[0], deviation, bound=EXACT)
    formula.assert_close(truth.total_v[0], op.v[:5].double().abs().sum(0), bound=EXACT)
    formula.assert_close(truth.score_magnitude[0], largest, bound=EXACT)
