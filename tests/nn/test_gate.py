"""Kimi-K3's layer: columns that are not turned, a gate on the result, 96 heads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import openmla
from integrations.transformers.tiny import tiny
from nn import exact
from nn.test_pooled import CLOSE, CUTS, LENGTHS, drawn, hidden, in_parts
from openmla.errors import Unsupported
from openmla.nn import Batch, MLAAttention, MLAConfig

SETTINGS: dict[str, Any] = {
    "model_type": "kimi_k3",
    "hidden_size": 64,
    "num_attention_heads": 96,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "q_lora_rank": 24,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "rms_norm_eps": 1e-5,
}


def gated() -> MLAAttention:
    return drawn(MLAAttention.from_config(SimpleNamespace(**SETTINGS)))


def causal(tokens: int) -> list[range]:
    return [range(t + 1) for t in range(tokens)]


class Ours:
    """A layer with shuffled pages of bf16 rows."""

    def __init__(self, layer: MLAAttention) -> None:
        self.layer = layer
        pages = {"num_pages": 24, "page_size": 8, "format": "bf16"}
        self.cache = openmla.LatentCache.allocate(**pages, latent=32, rope=8)
        g = torch.Generator().manual_seed(2)
        self.table = torch.randperm(24, generator=g)[:18].view(2, 9).int()

    def __call__(self, xs: list[Tensor], context: list[int]) -> list[Tensor]:
        new = [len(x) for x in xs]
        batch = Batch.of(new, context, self.table)
        return list(self.layer(torch.cat(xs), batch.positions, self.cache, batch).split(new))


def test_equals_the_definition() -> None:
    """Several sequences at once; the position of a token is nowhere in its row."""
    layer, xs = gated(), hidden()
    assert layer.config.heads == 96 and layer.config.gate and layer.config.rope is None
    batch = Batch.of(LENGTHS)
    got = layer(torch.cat(xs), batch.positions, batch=batch).split(LENGTHS)
    for x, out in zip(xs, got, strict=True):
        expected = exact.mla(layer, x, causal(len(x)), lambda rows: rows)
        assert (out - expected).abs().max() <= CLOSE * expected.abs().max()


@pytest.mark.parametrize("cuts", ["chunks", "then one by one"])
def test_parts_over_a_cache(cuts: str) -> None:
    """Rows of earlier parts are bf16; those of a part itself are, where it attends to its cache."""
    layer, xs = gated(), hidden()
    got = in_parts(Ours(layer), xs, CUTS[cuts])
    for x, out in zip(xs, got, strict=True):
        rounded = exact.mla(layer, x, causal(len(x)), lambda rows: rows.bfloat16().float())
        whole = exact.mla(layer, x, causal(len(x)), lambda rows: rows)
        n, largest = len(out), whole.abs().max()
        between = (rounded - whole).abs().max()
        nearest = torch.minimum((out - rounded[:n]).abs(), (out - whole[:n]).abs()).max()
        assert nearest <= 2 * between and between < 0.01 * largest


def test_the_gate_is_of_the_hidden_state() -> None:
    """Without it the same layer gives another result; a weight of zeros halves it."""
    layer, (x, _) = gated(), hidden()
    plain = MLAAttention.from_config(SimpleNamespace(**SETTINGS | {"mla_use_output_gate": False}))
    kept = {k: v for k, v in layer.state_dict().items() if k != "g_proj.weight"}
    plain.load(kept).requires_grad_(False)
    for norm in (plain.q_a_layernorm, plain.kv_a_layernorm):
        norm.eps = 1e-5
    without = plain(x, torch.arange(61))
    assert (layer(x, torch.arange(61)) - without).abs().max() > 0.1
    layer.g_proj.weight.zero_()
    torch.testing.assert_close(layer(x, torch.arange(61)), without / 2, rtol=0, atol=CLOSE)


def test_gradients_pass_the_gate() -> None:
    layer = gated().requires_grad_(True)
    layer(hidden()[0], torch.arange(61)).square().sum().backward()
    step, weight = 1e-3, layer.g_proj.weight
    assert weight.grad is not None and layer.kv_b_proj.weight.grad is not None
    sums = []
    for sign in (1, -1):
        with torch.no_grad():
            weight[0, 0] += sign * step
            sums.append(float(layer(hidden()[0], torch.arange(61)).double().square().sum()))
            weight[0, 0] -= sign * step
    slope = (sums[0] - sums[1]) / (2 * step)
    assert abs(slope - float(weight.grad[0, 0])) <= 0.05 * abs(slope)


def test_equals_kimi_linear_of_transformers() -> None:
    """The same layer without a gate."""
    model = tiny("kimi_linear")
    module = next(m for m in model.modules() if type(m).__name__ == "KimiLinearAttention")
    layer = MLAAttention.from_config(module.config).load(module).requires_grad_(False)
    x = torch.randn(33, module.hidden_size)
    hidden_keys = torch.full((33, 33), torch.finfo(x.dtype).min).triu(1)
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = module(x[None], hidden_keys[None, None])[0][0]
    model.set_attn_implementation(before)
    assert (layer(x, torch.arange(33)) - expected).abs().max() <= CLOSE


def test_turned_columns_are_refused() -> None:
    with pytest.raises(Unsupported, match="mla_use_nope=False"):
        MLAConfig.of(SimpleNamespace(**SETTINGS | {"mla_use_nope": False}))
