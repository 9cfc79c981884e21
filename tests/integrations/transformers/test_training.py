"""Models that are trained on openmla: gradients of the model's own attention, repeatable."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import openmla
from formula import same_bits
from integrations.transformers.tiny import set_attention, tiny
from openmla.errors import Unsupported
from openmla.integrations.transformers import optimize, register
from openmla.integrations.transformers.attention import _warn_once
from openmla.integrations.transformers.masks import bits

CLOSE, FLOOR = 1e-5, 1e-8
"""Share of a gradient's largest element, in float32; and what is left of those that cancel."""
KINDS = ("deepseek_v3", "deepseek_v2", "deepseek_v32", "hy_v4", "minicpm3", "kimi_linear")


@pytest.fixture(autouse=True)
def _warn_again() -> Iterator[None]:
    """Nothing here may go to SDPA unless a test says so."""
    _warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="openmla does not serve")
        yield


def fresh(kind: str) -> PreTrainedModel:
    """A model of its own, on the attention that Transformers writes out in full."""
    model = copy.deepcopy(tiny(kind))
    set_attention(model, "eager")
    return model


def prompt(batch: int = 2, length: int = 40) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(2, 128, (batch, length))


def gradients(
    model: PreTrainedModel, ids: Tensor | None = None, keep: Tensor | None = None
) -> dict[str, Tensor]:
    """Gradients of the model's own loss, padding left out, by the names of its parameters."""
    ids = prompt() if ids is None else ids
    labels = ids
    if keep is not None:  # what padding predicts is nobody's: the first token after it, too
        known = keep.bool() & keep.bool().roll(1, dims=1)
        labels = ids.masked_fill(~known, -100)
    model.zero_grad()
    model(ids, attention_mask=keep, labels=labels, use_cache=False).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        off = (got[name] - want).abs().max()
        assert off <= CLOSE * want.abs().max() + FLOOR, (name, off.item(), want.abs().max().item())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_eager_attention(kind: str) -> None:
    model = fresh(kind)
    expected = gradients(model)
    assert any("kv_b_proj" in name for name in expected)
    assert_close(gradients(optimize(model)), expected)


@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v32"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(kind: str, side: str) -> None:
    model, keep = fresh(kind), torch.ones(2, 40, dtype=torch.int64)
    keep[0, slice(13) if side == "left" else slice(27, None)] = 0
    expected = gradients(model, keep=keep)
    assert_close(gradients(optimize(model), keep=keep), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast(kind: str) -> None:
    """As near to gradients in float32 as the model's own attention comes there."""
    model = fresh(kind)
    exact = gradients(model)

    def error() -> float:
        with torch.autocast("cpu", torch.bfloat16):
            found = gradients(model)
        assert found.keys() == exact.keys()
        return sum(
            (found[n] - x).norm().item() / (x.norm().item() + FLOOR) for n, x in exact.items()
        )

    own = error()
    optimize(model)
    assert 0 < error() <= 1.3 * own


def test_without_optimize_the_model_puts_k_together() -> None:
    model = fresh("deepseek_v3")
    expected = gradients(model)
    register()
    set_attention(model, "openmla")
    assert_close(gradients(model), expected)


@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v32"])
def test_gradient_checkpointing_changes_no_bit(kind: str) -> None:
    model = optimize(fresh(kind)).train()
    plain, again = gradients(model), gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    recomputed = gradients(model)
    for name, want in plain.items():
        assert same_bits(again[name], want) and same_bits(recomputed[name], want), name


@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v32", "hy_v4"])
@pytest.mark.parametrize("how", ["positions", "mask"])
def test_sequences_packed_into_one_row(kind: str, how: str) -> None:
    """Transformers makes a 4-D mask of positions that begin again; others make their own."""
    ids, lengths = prompt(1, 40), torch.tensor([23, 17])
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    owner = torch.repeat_interleave(torch.arange(2), lengths)
    mask = (owner[:, None] == owner) & (positions[0] <= positions[0, :, None])

    def step(model: PreTrainedModel) -> dict[str, Tensor]:
        given = {"attention_mask": mask[None, None]} if how == "mask" else {}
        model.zero_grad()
        model(ids, labels=ids, position_ids=positions, use_cache=False, **given).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    model = fresh(kind)
    if how == "mask":  # eager attention adds masks
        expected = sum_of(model, ids, [23, 17])
    else:
        expected = step(model)
    assert_close(step(optimize(model)), expected)


def sum_of(model: PreTrainedModel, ids: Tensor, lengths: list[int]) -> dict[str, Tensor]:
    """Gradients of one loss over sequences that are computed one by one."""
    model.zero_grad()
    parts = torch.cat([model(part, use_cache=False).logits[0] for part in ids.split(lengths, 1)])
    torch.nn.functional.cross_entropy(parts[:-1], ids[0, 1:]).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


class Adapted(nn.Module):
    """A projection that is frozen, and a low-rank one beside it."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, 4, bias=False)
        self.up = nn.Linear(4, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


@pytest.mark.parametrize("names", [("kv_b_proj",), ("q_b_proj", "kv_a_proj_with_mqa")])
def test_adapters_around_projections(names: tuple[str, ...]) -> None:
    """The only parameters that need gradients may lie inside the projection that openmla calls."""
    model = fresh("deepseek_v3").requires_grad_(False)
    for layer in model.model.layers:
        for name in names:
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
    expected = gradients(model)
    assert expected and all("down" in n or "up" in n for n in expected)
    assert_close(gradients(optimize(model)), expected)


def test_a_call_without_a_backward_goes_to_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh("deepseek_v3")
    expected = gradients(model)
    optimize(model)

    def refused(*args: object, **options: object) -> Tensor:
        raise Unsupported("no kernel", "another")

    monkeypatch.setattr(openmla, "mla_prefill", refused)
    with pytest.warns(RuntimeWarning, match=r"serve gradients here \(no kernel\); torch's SDPA"):
        got = gradients(model)
    assert_close(got, expected)


def test_bits_of_seen_keys() -> None:
    torch.manual_seed(0)
    seen = torch.rand(2, 1, 3, 70) < 0.5
    words = bits(seen)
    assert words.shape == (6, 3) and words.dtype == torch.int32
    column = torch.arange(70)
    found = (words[:, column // 32] >> (column % 32)) & 1
    assert torch.equal(found.bool(), seen.view(6, 70))
