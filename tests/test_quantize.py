"""openmla.quantize on the CPU: e4m3 with one scale per token, and calls that take it."""

from __future__ import annotations

import pytest
import torch

import openmla
from openmla import InvalidArgument, Unsupported

E4M3 = torch.float8_e4m3fn


def test_every_token_uses_the_whole_range() -> None:
    torch.manual_seed(0)
    x = (torch.randn(300, 4, 192) * torch.rand(300, 1, 1) * 100).bfloat16()
    values, scale = openmla.quantize(x)
    assert values.dtype == E4M3 and values.shape == x.shape and scale.shape == (300,)
    assert torch.equal(values.float().abs().amax((1, 2)), torch.full((300,), 448.0))
    error = (values.float() * scale[:, None, None] - x.float()).abs()
    # Half a unit of the last of four bits, or of the smallest number.
    assert bool((error <= x.float().abs() * 2.0**-4 + scale[:, None, None] * 2.0**-10).all())


def test_the_factor_is_rounded_once() -> None:
    """With 448 * (1 / amax) instead of 448 / amax, values half way between two codes would flip."""
    amax = torch.arange(129, 256).float()
    x = amax[:, None, None] * torch.ones(1, 1, 64)
    x[:, 0, 1:] = torch.arange(1, 64).float()
    codes, _ = openmla.quantize(x.bfloat16())
    factor = torch.full_like(amax, 448) / amax
    assert torch.equal(
        codes.view(torch.uint8), (x * factor[:, None, None]).to(E4M3).view(torch.uint8)
    )


def test_a_token_and_its_rope_share_a_scale() -> None:
    x, rope = torch.full((2, 3, 32), 7.0), torch.full((2, 16), 7.0)
    rope[1, 5] = -224.0
    values, small, scale = openmla.quantize(x, rope)
    assert scale.tolist() == [2.0**-6, 0.5]
    assert small.float()[:, 5].tolist() == [448.0, -448.0]
    assert values.float()[:, 0, 0].tolist() == [448.0, 14.0]


def test_zeros_nan_and_infinity() -> None:
    x = torch.full((4, 2, 16), 7.0)
    x[0], x[1, 0, 0], x[2, 0, 0], x[3] = 0, torch.nan, torch.inf, 2.0**-140
    values, scale = openmla.quantize(x)
    assert scale[:2].tolist() == [1.0, 2.0**-6] and not values[0].float().any()
    assert {int(code) for code in values[values.isnan()].view(torch.uint8)} == {0x7F}
    assert values[1].isnan().sum() == 1 and values[1, 1, 1].float() == 448
    assert values[2, 0, 0].isnan() and scale[2] == torch.inf
    assert scale[3] > 0 and bool(values[3].float().isfinite().all())


def test_attention_over_what_it_made() -> None:
    torch.manual_seed(1)
    cu = torch.tensor([0, 40, 70], dtype=torch.int32)
    q, k, v = (torch.randn(70, 4, width).bfloat16() for width in (192, 128, 128))
    rope = torch.randn(70, 64).bfloat16()
    exact = openmla.mla_prefill(q, k, rope, v, cu_seqlens_q=cu)
    q8, q_scale = openmla.quantize(q)
    k8, rope8, k_scale = openmla.quantize(k, rope)
    scales = {"q_scale": q_scale, "k_scale": k_scale}
    out = openmla.mla_prefill(q8, k8, rope8, v, cu_seqlens_q=cu, **scales)
    error = (out.float() - exact.float()).norm() / exact.float().norm()
    assert 1e-3 < float(error) < 0.06


def test_views_are_read_where_they_are() -> None:
    kv = torch.randn(9, 3, 256)
    assert torch.equal(
        openmla.quantize(kv[..., :128])[0].view(torch.uint8),
        openmla.quantize(kv[..., :128].clone())[0].view(torch.uint8),
    )


def test_no_tokens() -> None:
    values, scale = openmla.quantize(torch.empty(0, 2, 16))
    assert values.shape == (0, 2, 16) and scale.shape == (0,)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((torch.ones(2, 16),), "x"),
        ((torch.ones(2, 1, 16, dtype=torch.int32),), "x"),
        ((torch.ones(2, 1, 32)[..., ::2],), "x"),
        ((torch.ones(2, 0, 16),), "x"),
        ((torch.ones(2, 1, 16), torch.ones(3, 8)), "rope"),
        ((torch.ones(2, 1, 16), torch.ones(2, 8).bfloat16()), "rope"),
        ((torch.ones(2, 1, 16), torch.ones(2, 0)), "rope"),
    ],
)
def test_wrong_arguments(arguments: tuple[torch.Tensor, ...], named: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{named}"):
        openmla.quantize(*arguments)


def test_no_gradients() -> None:
    with pytest.raises(Unsupported, match="x requires a gradient"):
        openmla.quantize(torch.ones(2, 1, 16, requires_grad=True))


def test_the_operator_is_well_formed_and_compiles() -> None:
    x, rope = torch.randn(5, 2, 16), torch.randn(5, 8)
    outs = [torch.empty(p.shape, dtype=E4M3) for p in (x, rope)]
    operator = torch.ops.openmla.quantize.default
    torch.library.opcheck(
        operator, ([x, rope], outs, torch.empty(5)), test_utils=("test_faketensor",)
    )
    compiled = torch.compile(openmla.quantize, fullgraph=True, backend="aot_eager")
    for eager, other in zip(openmla.quantize(x, rope), compiled(x, rope), strict=True):
        assert torch.equal(eager.float(), other.float())
