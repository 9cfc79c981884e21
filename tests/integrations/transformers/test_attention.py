"""What runs on openmla and what goes to SDPA: never a wrong result, and one warning."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, StaticCache

import openmla
from integrations.transformers.tiny import logits, set_attention, tiny
from openmla.errors import Unsupported
from openmla.integrations.transformers import optimize, restore
from openmla.integrations.transformers.attention import _warn_once, attention

CLOSE = 2e-6
CHUNKS = (17, 1, 22)


@pytest.fixture(autouse=True)
def _warn_again() -> None:
    _warn_once.cache_clear()


@pytest.fixture(params=["deepseek_v3", "deepseek_v32"])
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    yield from fresh(request.param)


@pytest.fixture
def v3() -> Iterator[PreTrainedModel]:
    yield from fresh("deepseek_v3")


def fresh(kind: str) -> Iterator[PreTrainedModel]:
    found = tiny(kind)
    set_attention(found, "sdpa")
    yield found
    restore(found)
    found.eval()
    for layer in found.model.layers:
        layer.self_attn.attention_dropout = 0.0


def prompt(batch: int = 2, length: int = 40) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(2, 128, (batch, length))


def same(a: Tensor, b: Tensor) -> bool:
    return bool(torch.isfinite(a).all()) and (a - b).abs().max().item() <= CLOSE


def falls_back(reason: str) -> Any:
    return pytest.warns(RuntimeWarning, match=f"does not serve {reason}; torch's SDPA runs")


def test_gradients_of_the_latent_form_are_those_of_sdpa(v3: PreTrainedModel):
    def gradients() -> list[Tensor]:
        v3.zero_grad()
        v3(prompt(), labels=prompt()).loss.backward()
        return [p.grad.clone() for p in v3.parameters() if p.grad is not None]

    expected = gradients()
    optimize(v3, form="latent")
    with falls_back("gradients of the latent form"):
        got = gradients()
    assert len(got) == len(expected)
    assert all(same(a, b) for a, b in zip(got, expected, strict=True))
    v3.zero_grad()


def test_dropout_is_that_of_sdpa(model: PreTrainedModel):
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5

    ids = prompt()

    def run() -> Tensor:
        torch.manual_seed(3)
        return logits(model, ids)

    expected = run()
    assert not same(logits(model, ids), expected)  # it does drop
    optimize(model)
    with falls_back("dropout"):
        assert same(run(), expected)


def test_packed_sequences_do_not_see_each_other(v3: PreTrainedModel):
    """Positions that start again without a mask: Transformers makes a 4-D mask of them."""
    ids, positions = prompt(1), torch.cat([torch.arange(15), torch.arange(25)])[None]
    alone = torch.cat([logits(v3, ids[:, :15]), logits(v3, ids[:, 15:])], dim=1)
    optimize(v3)
    with falls_back("a 4-D mask"):
        packed = logits(v3, ids, position_ids=positions, use_cache=False)
    assert same(packed, alone)


def test_a_4d_mask_of_the_user(model: PreTrainedModel):
    seen = torch.ones(40, 40, dtype=torch.bool).tril()
    seen[20:, 3:9] = False
    ids, mask = prompt(), seen.expand(2, 1, 40, 40)
    expected = logits(model, ids, attention_mask=mask)
    optimize(model)
    if hasattr(model.config, "index_topk"):  # selected keys: the mask is looked up
        assert same(logits(model, ids, attention_mask=mask), expected)
        return
    with falls_back("a 4-D mask"):
        assert same(logits(model, ids, attention_mask=mask), expected)


def test_a_mask_of_numbers_over_selected_keys():
    """What is neither 0 nor -inf is a bias, which a list of keys cannot carry."""
    model = tiny("deepseek_v32")
    set_attention(model, "sdpa")
    numbers = torch.zeros(2, 1, 40, 40).masked_fill(~torch.ones(40, 40).tril().bool(), -1e9)
    numbers[..., 5] -= 1.5
    expected = logits(model, prompt(), attention_mask=numbers)
    optimize(model)
    with falls_back("a mask of numbers"):
        assert same(logits(model, prompt(), attention_mask=numbers), expected)
    restore(model)


def test_an_unknown_keyword_is_left_to_sdpa(v3: PreTrainedModel):
    layer = v3.model.layers[0].self_attn
    q, k, v = torch.randn(1, 4, 5, 48), torch.randn(1, 4, 9, 48), torch.randn(1, 4, 9, 24)
    k[..., 32:] = k[:, :1, :, 32:]
    with torch.no_grad():
        plain, _ = attention(layer, q, k, v, None, scaling=0.2, position_ids=torch.arange(5))
        with falls_back("the keyword cu_seq_lens_q"):
            other, _ = attention(layer, q, k, v, None, scaling=0.2, cu_seq_lens_q=torch.arange(2))
        with falls_back("attention that is not causal"):
            full, _ = attention(layer, q, k, v, None, scaling=0.2, is_causal=False)
    assert same(plain, other)  # 5 queries at the end of 9 keys, not at their start
    expected = nn.functional.scaled_dot_product_attention(q, k, v, scale=0.2)
    assert same(full, expected.transpose(1, 2))


def test_flags_that_are_not_set_change_nothing(v3: PreTrainedModel):
    optimize(v3)
    ids = prompt()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = logits(v3, ids)
        got = logits(v3, ids, output_attentions=False, output_hidden_states=True)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("form", ["", "auto"])
def test_selected_keys_without_a_mask_are_causal_still(form: str):
    """Called by hand, as no model does: top-k lists name keys of the future."""
    model = tiny("deepseek_v32")
    layer = model.model.layers[0].self_attn
    q, latent, rope = torch.randn(1, 4, 6, 48), torch.randn(1, 1, 6, 64), torch.randn(1, 1, 6, 16)
    everything = torch.arange(6).expand(1, 6, 6).int()
    with torch.no_grad():
        k, v = type(layer).expand_kv(layer, latent, rope)
        expected = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2)
        if form:
            optimize(model, form)
            out, _ = attention(layer, q, latent, rope, None, scaling=0.2, indices=everything)
            restore(model)
        else:
            with falls_back("selected keys.*"):
                out, _ = attention(layer, q, k, v, None, scaling=0.2, indices=everything)
    assert same(out, expected.transpose(1, 2))


def test_other_attention_is_left_to_sdpa():
    """The eyes of a model that was given "openmla" as a whole."""
    eye = nn.Module()
    eye.is_causal = False
    q = torch.randn(1, 2, 6, 8)
    with falls_back("Module is not MLA"):
        out, _ = attention(eye, q, q, q, None, scaling=0.3)
    expected = nn.functional.scaled_dot_product_attention(q, q, q, scale=0.3)
    assert same(out, expected.transpose(1, 2))


def poisoned(model: PreTrainedModel) -> StaticCache:
    """A static cache of 64 tokens whose unused rows hold NaN."""
    cache = StaticCache(model.config, max_cache_len=64)
    logits(model, prompt(length=1), past_key_values=cache)
    cache.reset()
    for layer in cache.layers:
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    return cache


@pytest.mark.parametrize("form", ["auto", "expanded", "latent"])
def test_a_static_cache_is_longer_than_what_it_holds(v3: PreTrainedModel, form: str):
    expected = logits(v3, prompt(), CHUNKS)
    optimize(v3, form)
    cache, parts = poisoned(v3), []
    for part in prompt().split(CHUNKS, dim=1):
        parts.append(logits(v3, part, past_key_values=cache))
    assert same(torch.cat(parts, dim=1), expected)


def test_a_mask_as_long_as_the_static_cache(v3: PreTrainedModel):
    """Its columns past the last token must not be taken for the queries'."""
    ids = prompt()
    keep = torch.ones_like(ids)
    keep[0, :13] = 0
    whole = nn.functional.pad(keep, (0, 24))
    expected = logits(v3, ids, attention_mask=keep)[keep.bool()]
    optimize(v3)
    cache = poisoned(v3)
    first = logits(v3, ids[:, :30], past_key_values=cache, attention_mask=whole)
    second = logits(v3, ids[:, 30:], past_key_values=cache, attention_mask=whole)
    assert same(torch.cat([first, second], dim=1)[keep.bool()], expected)


class Spy:
    """Notes the calls of one public function and lets them pass."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._call = getattr(openmla, name)
        patch.setattr(openmla, name, self)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls.append(args)
        return self._call(*args, **options)


def test_auto_expands_a_prompt_and_attends_to_rows_afterwards(monkeypatch: pytest.MonkeyPatch):
    model = tiny("deepseek_v3", torch.bfloat16)
    optimize(model)
    dense, latent = (Spy(monkeypatch, n) for n in ("mla_prefill", "mla_prefill_latent"))
    logits(model, prompt(), (39, 1))
    restore(model)
    assert len(dense.calls) == len(latent.calls) == 2  # one per layer
    _, k_nope, k_rope, v = dense.calls[0]
    assert k_rope.shape == (78, 16)  # one rope row per token, for all heads
    assert k_nope.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()  # views of one
    assert latent.calls[0][0].shape == (2, 4, 80)


def test_selected_keys_run_the_sparse_call(monkeypatch: pytest.MonkeyPatch):
    model = tiny("deepseek_v32")
    optimize(model)
    sparse = Spy(monkeypatch, "mla_prefill_sparse")
    logits(model, prompt())
    restore(model)
    rows = sparse.calls[0][2]
    assert rows.shape == (80, 12)
    assert (rows <= torch.arange(80)[:, None]).all()  # early queries name no keys of the future
    assert rows[0].tolist().count(-1) == 11


def test_a_sink_cannot_go_to_sdpa():
    model = tiny("hy_v4")
    optimize(model)
    layer = model.model.layers[0].self_attn
    rows = torch.randn(1, 1, 6, 64), torch.randn(1, 1, 6, 16)
    with pytest.raises(Unsupported, match=r"dropout, in a model with attention sinks"):
        attention(layer, torch.randn(1, 4, 6, 48), *rows, None, dropout=0.5, s_aux=layer.sinks)
    restore(model)
