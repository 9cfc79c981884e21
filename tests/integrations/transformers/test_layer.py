"""The shorter `forward` of DeepSeek-V3's module: what the module's own gives, caches included."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

from integrations.transformers.tiny import kinds, tiny
from openmla.integrations.transformers import attention, layer, optimize, restore

SERVED = ("deepseek_v3", "glm4_moe_lite", "youtu")


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("interleaved", [False, True])
def test_turning_in_place_is_their_rotation(interleaved: bool):
    q, angles = numbers(2, 5, 3, 24), numbers(2, 5, 4)
    cos, sin = (torch.cat([f(angles)] * 2, dim=-1) for f in (torch.cos, torch.sin))
    theirs = apply_rotary_pos_emb_interleave if interleaved else apply_rotary_pos_emb
    heads_first = q[..., 16:].transpose(1, 2)
    want, _ = theirs(heads_first, heads_first, cos, sin)
    before = q[..., :16].clone()
    layer.turn_(q[..., 16:], layer._turns(cos, sin)[:, :, None], interleaved)
    assert torch.allclose(q[..., 16:].transpose(1, 2), want, atol=1e-6)
    assert torch.equal(q[..., :16], before)
    assert layer._turns(cos, sin) is layer._turns(cos, sin)  # made once for all layers


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", SERVED)
def test_a_layer_gives_and_caches_what_its_own_does(kind: str, interleaved: bool):
    model = copy.deepcopy(tiny(kind))
    model.config.rope_interleave = interleaved
    module = model.model.layers[1].self_attn
    x, found = numbers(2, 12, 64), []
    for change in (restore, optimize):
        change(model)
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            found.append((run(model, module, x, cache), cache.layers[1]))
    (want, theirs), (got, mine) = found
    assert "forward" in vars(module)
    assert torch.allclose(got, want, atol=1e-6)
    for name in ("keys", "values"):
        assert torch.allclose(getattr(mine, name), getattr(theirs, name), atol=1e-6)


def run(model: Any, module: Any, x: Tensor, cache: DynamicCache) -> Tensor:
    positions = torch.arange(x.shape[1])[None]
    turned = model.model.rotary_emb(x, positions)
    out: Tensor = module(x, turned, None, cache, position_ids=positions)[0]
    return out


def test_modules_with_a_forward_of_their_own_keep_it():
    served = set()
    for kind in kinds():
        for module in tiny(kind).modules():
            if hasattr(type(module), "expand_kv") and layer.serves(module):
                served.add(type(module).__name__)
    assert served == set(layer.CLASSES)

    class DeepseekV3Attention:
        def forward(self, hidden_states: Tensor, something_new: int) -> None: ...

    assert not layer.serves(DeepseekV3Attention())


def test_gradients_take_the_modules_own_forward(monkeypatch: pytest.MonkeyPatch):
    model = copy.deepcopy(tiny("deepseek_v3"))
    monkeypatch.setattr(layer, "attention", None)
    optimize(model)
    monkeypatch.setattr(attention, "_warn_once", lambda _: None)
    module = model.model.layers[1].self_attn
    out = run(model, module, numbers(2, 12, 64), DynamicCache(config=model.config))
    assert out.requires_grad
    with torch.no_grad(), pytest.raises(TypeError, match="NoneType"):
        run(model, module, numbers(2, 12, 64), DynamicCache(config=model.config))
