"""The definition of gradients agrees with autograd, with differences, and with itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from backward import eager
from openmla import Unsupported, reference
from openmla.backward.reference import Saved, backward
from openmla.lab.testing.case import Case
from openmla.lab.testing.gradients import GradientCase, build_gradients, random_gradient_case
from openmla.operands import Weights

SMALL = Case("dense", 3, 5, 4, 6, q_lens=(5, 0, 3), k_lens=(7, 2, 0), dtype="fp32", spare=2)
CASES = {
    "plain": SMALL,
    "full": replace(SMALL, causal=False),
    "sink": replace(SMALL, sink="normal"),
    "sink of -inf": replace(SMALL, sink="low"),
    "mask": replace(SMALL, key_mask="half"),
    "few bits": replace(SMALL, key_mask="few", k_lens=(70, 2, 3)),
    "rows without keys": replace(SMALL, q_lens=(9, 3), k_lens=(4, 7)),
    "rope per head": replace(SMALL, rope="per_head"),
    "no rope": replace(SMALL, rope="none", d_rope=0),
    "one of all": Case("dense", 1, 1, 1, 1, q_lens=(1,), k_lens=(1,), dtype="fp32"),
    "negative scale": replace(SMALL, scale=-0.7),
    "peaked": replace(SMALL, values="peaky"),
}


@pytest.mark.parametrize("d_lse", [False, True], ids=["out", "out and lse"])
@pytest.mark.parametrize("name", CASES)
def test_autograd_agrees(name: str, d_lse: bool) -> None:
    built = build_gradients(GradientCase(CASES[name], d_lse=d_lse))
    expected = eager.gradients(built.operands, built.d_out, built.d_lse)
    got = backward(built.operands, built.d_out, built.d_lse)
    for gradient, x in expected.items():
        assert torch.allclose(getattr(got, gradient), x, rtol=1e-12, atol=1e-13), gradient
    assert any(float(x.abs().max()) > 0 for x in expected.values())


@pytest.mark.parametrize("seed", range(500, 530))
def test_autograd_agrees_on_random_cases(seed: int) -> None:
    case = random_gradient_case(seed)
    if case.case.sink in ("high", "mixed"):  # autograd has NaN for the gradient at +inf
        case = replace(case, case=replace(case.case, sink="normal"))
    built = build_gradients(case)
    expected = eager.gradients(built.operands, built.d_out, built.d_lse)
    got = backward(built.operands, built.d_out, built.d_lse)
    op, incoming = built.operands, float(built.d_out[: case.case.total_q].double().norm())
    norms = [float(x.double().norm()) for x in (op.q, op.k_nope, op.v)]
    size = incoming * max(1.0, norms[2]) * max(1.0, *norms[:2])
    for gradient, x in expected.items():
        assert float((getattr(got, gradient) - x).norm()) <= 1e-13 * (size + float(x.norm()))


class Attention(torch.autograd.Function):
    """The eager forward pass with the reference's gradients, for gradcheck."""

    @staticmethod
    def forward(ctx, op, q, k_nope, k_rope, v, sink):
        ctx.op, ctx.inputs = op, (q, k_nope, k_rope, v, sink)
        out, lse = eager.attend(op, q, k_nope, k_rope, v, sink)
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    @staticmethod
    def backward(ctx, d_out, d_lse):
        q, k_nope, k_rope, v, sink = ctx.inputs
        weights = Weights(ctx.op.weights.scale, sink)
        op = replace(ctx.op, q=q, k_nope=k_nope, k_rope=k_rope, v=v, weights=weights)
        return None, *backward(op, d_out, d_lse)


@pytest.mark.parametrize(
    "name", ["plain", "full", "sink", "mask", "rows without keys", "one of all"]
)
def test_gradcheck(name: str) -> None:
    case = replace(CASES[name], heads=2, spare=0)
    op = build_gradients(GradientCase(case)).operands
    inputs = op.q, op.k_nope, op.k_rope, op.v, op.weights.sink
    wide = tuple(None if x is None else x.double().requires_grad_() for x in inputs)
    assert torch.autograd.gradcheck(
        lambda *given: Attention.apply(op, *given), wide, eps=1e-6, atol=1e-7
    )


def test_directional_derivative() -> None:
    """The loss changes along a direction as the gradients say."""
    built = build_gradients(GradientCase(CASES["sink"], d_lse=True))
    op, step = built.operands, 1e-6
    generator = torch.Generator().manual_seed(5)
    names = ("q", "k_nope", "k_rope", "v")
    along = {n: torch.randn(getattr(op, n).shape, generator=generator).double() for n in names}
    along["sink"] = torch.randn(op.q.shape[1], generator=generator).double()

    def loss(by: float) -> Tensor:
        moved = {n: getattr(op, n).double() + by * along[n] for n in names}
        moved["sink"] = op.weights.sink.double() + by * along["sink"]
        return eager.loss(*eager.attend(op, **moved), built.d_out, built.d_lse)

    exact = backward(op, built.d_out, built.d_lse)
    slope = sum(float((getattr(exact, n) * x).sum()) for n, x in along.items())
    assert slope == pytest.approx(float(loss(step) - loss(-step)) / (2 * step), rel=1e-8)


def test_an_infinite_sink_leaves_the_gradient_of_lse_alone() -> None:
    built = build_gradients(GradientCase(replace(SMALL, sink="high"), d_lse=True))
    got = backward(built.operands, built.d_out, built.d_lse)
    assert not got.v.any() and not got.sink.any()
    without = replace(built.operands, weights=Weights(built.operands.weights.scale))
    expected = eager.gradients(without, torch.zeros_like(built.d_out), built.d_lse)
    for name in ("q", "k_nope", "k_rope"):
        assert torch.allclose(getattr(got, name), expected[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["plain", "sink", "mask"])
def test_exact_results_may_be_given(name: str) -> None:
    built = build_gradients(GradientCase(CASES[name], d_lse=True))
    truth = reference.of(built.operands)
    saved = Saved(truth.out, truth.lse)
    got = backward(built.operands, built.d_out, built.d_lse, saved)
    for x, y in zip(got, backward(built.operands, built.d_out, built.d_lse), strict=True):
        assert (x is None and y is None) or torch.allclose(x, y, rtol=1e-12, atol=1e-14)


def test_given_results_are_used() -> None:
    built = build_gradients(GradientCase(SMALL))
    truth = reference.of(built.operands)
    one = backward(built.operands, built.d_out, None, Saved(truth.out, truth.lse))
    other = backward(built.operands, built.d_out, None, Saved(truth.out * 1.1, truth.lse))
    assert not torch.allclose(one.q, other.q) and torch.equal(one.v, other.v)


def test_unseen_keys_and_rows_are_zero() -> None:
    built = build_gradients(GradientCase(replace(SMALL, q_lens=(9, 1), k_lens=(4, 0))))
    got = backward(built.operands, built.d_out, None)
    assert not got.q[:5].any() and not got.q[9:].any() and bool(got.q[6:9].any())
    assert not got.v[4:].any()


@pytest.mark.parametrize(
    "changed",
    [
        {"k_start": torch.zeros(3, dtype=torch.int32)},
        {"weights": Weights(1.0, q_scale=torch.ones(10))},
        {"weights": Weights(1.0, k_scale=torch.ones(11))},
    ],
)
def test_what_has_no_definition_is_refused(changed) -> None:
    built = build_gradients(GradientCase(SMALL))
    with pytest.raises(Unsupported, match="are not defined"):
        backward(replace(built.operands, **changed), built.d_out)
