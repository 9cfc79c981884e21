"""Rotary embedding: a rotation, by angles that Transformers computes too."""

from __future__ import annotations

import doctest
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from openmla.nn import rope
from openmla.nn.rope import Rope

V3 = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}


def config(**changes: Any) -> Any:
    return SimpleNamespace(
        rope_parameters=V3 | changes,
        max_position_embeddings=163840,
        head_dim=64,
        hidden_size=7168,
        num_attention_heads=128,
        standardize_rope_params=lambda: None,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mscale": 0.707, "mscale_all_dim": 0.5},
        {"mscale": None, "mscale_all_dim": None, "factor": 4.0},
        {"attention_factor": 0.9, "truncate": False, "beta_fast": 16, "beta_slow": 2},
        {"factor": None, "rope_theta": 50000.0},
    ],
)
def test_yarn_is_that_of_transformers(changes: dict[str, Any]):
    expected, amplitude = ROPE_INIT_FUNCTIONS["yarn"](config(**changes))
    rope = Rope.of(64, config(**changes))
    cos, sin = rope.cos_sin(torch.tensor([1]), torch.float32)
    assert rope.amplitude == pytest.approx(amplitude)
    assert torch.allclose(torch.atan2(sin, cos)[0], expected, rtol=1e-5)


def test_the_scale_of_scores_grows_with_the_stretch():
    """DeepSeek-V3: (0.1 * ln 40 + 1)^2."""
    assert Rope.of(64, config()).score_factor == pytest.approx(1.3689 * 1.3689, rel=1e-4)
    assert Rope.of(64, config(rope_type="default")).score_factor == 1.0


@pytest.mark.parametrize("interleaved", [True, False])
def test_dot_products_depend_on_the_distance_alone(interleaved: bool):
    rope = Rope(16, 100.0, interleaved)
    q, k = torch.randn(16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)

    def score(at: int, other: int) -> float:
        cos, sin = rope.cos_sin(torch.tensor([at, other]), torch.float64)
        return (rope.turn(q, cos[0], sin[0]) @ rope.turn(k, cos[1], sin[1])).item()

    assert score(3, 9) == pytest.approx(score(43, 49), abs=1e-4)
    assert score(0, 0) == pytest.approx((q @ k).item())
    assert abs(score(3, 9) - score(3, 10)) > 1e-3


def test_pairs_are_neighbors_or_halves():
    """A quarter turn of the only pair."""
    cos, sin = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert Rope(4, 10.0, True).turn(x, cos, sin).tolist() == [-2.0, 3.0, 1.0, 4.0]
    assert Rope(4, 10.0, False).turn(x, cos, sin).tolist() == [-3.0, 2.0, 1.0, 4.0]


def test_last_columns_turn_in_place_and_back() -> None:
    """A result that V's rotation was averaged into is turned back at the query's own position."""
    assert doctest.testmod(rope).failed == 0
    turning, positions = Rope(8, 160000.0), torch.tensor([0, 3, 70000])
    x = torch.randn(3, 2, 20, dtype=torch.float64).float()
    there = turning.turn_last(x, positions)
    assert torch.equal(there[..., :12], x[..., :12]) and torch.equal(there[0], x[0])
    frequency = 160000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    angle = positions.double()[:, None, None] * frequency
    pairs = torch.view_as_complex(x[..., 12:].double().unflatten(-1, (4, 2)))
    expected = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    # An angle of 70000 in float32 is off by 2^-8 at most.
    assert (there[:2, :, 12:] - expected[:2]).abs().max() <= 1e-5
    assert (there[2, :, 12:] - expected[2]).abs().max() <= 0.02
    assert (turning.turn_last(there, positions, back=True) - x).abs().max() <= 1e-6


def test_a_layer_makes_no_frequencies_on_the_host_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would wait for them in every layer, and a captured graph may not."""
    turning, positions = Rope.of(64, config()), torch.arange(5)
    with torch.inference_mode():
        first = turning.cos_sin(positions, torch.float32)
    monkeypatch.setattr(torch, "arange", None)
    again = turning.cos_sin(positions, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    x = torch.ones(5, 32, requires_grad=True)
    (x * again[0]).sum().backward()
    assert x.grad is not None
