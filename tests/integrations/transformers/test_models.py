"""Every MLA model of the installed Transformers on openmla, against the model's own attention.

float32 on the CPU, where eager and SDPA themselves differ by some 5e-7.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from integrations.transformers.tiny import kinds, logits, selects_keys, set_attention, tiny
from openmla.errors import Unsupported
from openmla.integrations.transformers import optimize, register, restore
from openmla.integrations.transformers.attention import _warn_once

CLOSE = 2e-6
KINDS = kinds()
NO_SDPA = ("hy_v4",)  # has attention sinks
DENSE = [k for k in KINDS if not selects_keys(k)]
SPARSE = [k for k in KINDS if selects_keys(k)]
pytestmark = pytest.mark.filterwarnings("error:openmla does not serve")
register()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(kind: str) -> Iterator[PreTrainedModel]:
    found = tiny(kind)
    set_attention(found, "eager")
    _warn_once.cache_clear()
    yield found
    restore(found)


def forms(kind: str) -> tuple[str, ...]:
    return ("auto", "latent") if selects_keys(kind) else ("auto", "expanded", "latent")


def prompt(batch: int = 2, length: int = 40) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(2, 128, (batch, length))


def padding(side: str, ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    if side == "left":
        mask[0, :13] = 0
    else:
        mask[0, -13:] = 0
    return mask


def off_by(a: Tensor, b: Tensor) -> float:
    assert torch.isfinite(a).all()
    return (a - b).abs().max().item()


def test_the_kinds_are_found():
    assert {"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_linear"} <= {*KINDS}


def test_whole_prompts(kind: str, model: PreTrainedModel):
    ids = prompt()
    expected = logits(model, ids)
    for form in forms(kind):
        optimize(model, form)
        assert off_by(logits(model, ids), expected) <= CLOSE
    restore(model)
    assert torch.equal(logits(model, ids), expected)


def test_without_optimize(kind: str, model: PreTrainedModel):
    """`register` alone: dense models run mla_prefill; models that select keys are left to SDPA."""
    ids = prompt()
    expected = logits(model, ids)
    set_attention(model, "openmla")
    if kind in NO_SDPA:
        with pytest.raises(Unsupported, match="attention sinks"):
            logits(model, ids)
        return
    warns = pytest.warns(RuntimeWarning, match="SDPA runs instead")
    with warns if selects_keys(kind) else nullcontext():
        assert off_by(logits(model, ids), expected) <= CLOSE


def test_chunks_over_a_cache(kind: str, model: PreTrainedModel):
    """17 tokens, one, and the rest; against the same chunks, where indexers see the same scores."""
    ids, chunks = prompt(), (17, 1, 22)
    set_attention(model, "eager" if kind in NO_SDPA else "sdpa")
    expected = logits(model, ids, chunks)
    for form in forms(kind):
        optimize(model, form)
        assert off_by(logits(model, ids, chunks), expected) <= CLOSE


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(kind: str, model: PreTrainedModel, side: str):
    ids = prompt()
    mask = padding(side, ids)
    expected = logits(model, ids, attention_mask=mask)[mask.bool()]
    for form in forms(kind):
        optimize(model, form)
        got = logits(model, ids, attention_mask=mask)[mask.bool()]
        assert off_by(got, expected) <= CLOSE


def greedy(model: PreTrainedModel, ids: Tensor, mask: Tensor, **more: object) -> Tensor:
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=32, do_sample=False, disable_compile=True, **more
    )


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_tokens(kind: str, model: PreTrainedModel, cache: str):
    """32 tokens of a batch padded on the left.

    Against the same kind of cache: indexers of Transformers 5.22 select other keys over a static
    one, whatever attends to them.
    """
    ids = prompt(length=20)
    mask = padding("left", ids)
    expected = greedy(model, ids, mask, cache_implementation=cache)
    optimize(model)
    assert torch.equal(greedy(model, ids, mask, cache_implementation=cache), expected)


BFLOAT = [k for k in ("minicpm3", "youtu") if k in KINDS]
"""Without experts: a router turns a rounding into another expert, in any implementation."""


@pytest.mark.parametrize("form", ["expanded", "latent"])
@pytest.mark.parametrize("kind", BFLOAT)
def test_bfloat16_is_as_close_to_float32_as_the_model_itself(kind: str, form: str):
    """Padding included, so that the pages of the latent form are compacted. In bf16 both round."""
    ids = prompt(length=100)
    mask = padding("left", ids)
    exact, rounded = tiny(kind), tiny(kind, torch.bfloat16)
    rounded.load_state_dict(exact.state_dict())
    set_attention(exact, "eager")
    expected = logits(exact, ids, attention_mask=mask)[mask.bool()]

    def error() -> float:
        got = logits(rounded, ids, attention_mask=mask)[mask.bool()].float()
        return (got - expected).square().mean().sqrt().item()

    set_attention(rounded, "eager")
    own = error()
    optimize(rounded, form)
    try:
        assert error() <= 1.2 * own
    finally:
        restore(rounded)


def test_autocast_is_about_as_close_to_float32_as_the_model_itself(
    kind: str, model: PreTrainedModel
):
    """Projections are in bfloat16 there, what norms and rope make of them in float32. Where a model
    has experts, or selects keys, a rounding may turn into another one, in any implementation."""
    exact = logits(model, prompt(), attention_mask=padding("left", prompt()))

    def error() -> float:
        with torch.autocast("cpu", torch.bfloat16):
            got = logits(model, prompt(), attention_mask=padding("left", prompt()))
        return (got.float() - exact)[:, 13:].norm().item()

    own = error()
    optimize(model)
    assert 0 < error() <= (1.1 if kind in BFLOAT else 2) * own
