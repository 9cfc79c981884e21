"""DeepSeek-V4 of the installed Transformers on openmla, against the model's own attention.

One layer of a window, one of ratio 4 with an indexer, one of ratio 8; float32 on the CPU.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import eager_mask, sliding_window_causal_mask_function

import openmla
from integrations.transformers.test_models import CLOSE, greedy, off_by, padding, prompt
from integrations.transformers.tiny import logits
from integrations.transformers.tiny_v4 import tiny_v4
from openmla.errors import Unsupported
from openmla.integrations.transformers import compressed, optimize, register, restore

OWN = "the model's own attention runs instead"


@pytest.fixture(scope="module")
def shared() -> PreTrainedModel:
    return tiny_v4()


@pytest.fixture
def model(shared: PreTrainedModel) -> Any:
    compressed._warn_once.cache_clear()
    yield shared
    restore(shared)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sources each call of mla_attend had."""
    seen: list[int] = []
    attend = openmla.mla_attend

    def counted(q: Tensor, sources: Any, **options: Any) -> Any:
        seen.append(len(sources))
        return attend(q, sources, **options)

    monkeypatch.setattr(openmla, "mla_attend", counted)
    return seen


@pytest.mark.filterwarnings("error:openmla does not serve")
class TestEqualsTheModel:
    def test_whole_prompts(self, model: PreTrainedModel, calls: list[int]):
        ids = prompt()
        expected = logits(model, ids)
        optimize(model)
        assert off_by(logits(model, ids), expected) <= CLOSE
        assert calls == [1, 2, 2]
        assert off_by(logits(optimize(model, "latent"), ids), expected) <= CLOSE
        restore(model)
        assert torch.equal(logits(model, ids), expected)
        assert len(calls) == 6

    @pytest.mark.parametrize("chunks", [(17, 1, 22), (3, 1, 1, 35), (8, 4, 28)])
    def test_chunks_over_a_cache(self, model: PreTrainedModel, chunks: tuple[int, ...]):
        """Shorter than a compressed row, as long, and longer; shorter than the window."""
        expected = logits(model, prompt(), chunks)
        assert off_by(logits(optimize(model), prompt(), chunks), expected) <= CLOSE

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding(self, model: PreTrainedModel, side: str):
        """Padding too: the model compresses it with the rest."""
        ids = prompt()
        mask = padding(side, ids)
        expected = logits(model, ids, attention_mask=mask)
        assert off_by(logits(optimize(model), ids, attention_mask=mask), expected) <= CLOSE

    def test_packed_sequences(self, model: PreTrainedModel):
        """Positions that begin again: the window ends there, as the model's mask says."""
        ids = prompt(batch=1)
        packed = torch.cat([torch.arange(25), torch.arange(15)])[None]
        expected = logits(model, ids, position_ids=packed, use_cache=False)
        got = logits(optimize(model), ids, position_ids=packed, use_cache=False)
        assert off_by(got, expected) <= CLOSE
        whole = logits(model, ids, use_cache=False)
        assert off_by(whole, expected) > 100 * CLOSE

    def test_greedy_tokens(self, model: PreTrainedModel):
        """32 tokens of a batch padded on the left, over the model's own cache."""
        ids = prompt(length=20)
        mask = padding("left", ids)
        expected = greedy(model, ids, mask)
        assert torch.equal(greedy(optimize(model), ids, mask), expected)

    def test_a_cache_from_before(self, model: PreTrainedModel):
        """What is cached is the same, so that a cache may change hands."""
        ids = prompt()
        expected = logits(model, ids, (21, 19))
        with torch.no_grad():
            first = model(ids[:, :21], use_cache=True)
            optimize(model)
            rest = model(ids[:, 21:], past_key_values=first.past_key_values, use_cache=True)
        assert off_by(rest.logits, expected[:, 21:]) <= CLOSE

    def test_a_copy(self, model: PreTrainedModel, calls: list[int]):
        ids = prompt()
        expected = logits(model, ids)
        assert off_by(logits(copy.deepcopy(optimize(model)), ids), expected) <= CLOSE
        assert len(calls) == 3


def attention_alone(model: PreTrainedModel, x: Tensor) -> Tensor:
    """[layers, B, S, hidden]: routers turn a rounding into another expert."""
    own = model.config._attn_implementation == "eager"
    window, (batch, tokens, _) = model.config.sliding_window, x.shape
    mask = (eager_mask if own else compressed.window_list)(
        batch_size=batch,
        q_length=tokens,
        kv_length=tokens,
        mask_function=sliding_window_causal_mask_function(window),
        local_size=window,
        dtype=model.dtype,
    )
    assert own or mask.shape[2] == min(window, tokens)
    x, positions = x.to(model.dtype), torch.arange(tokens)[None]
    kinds = ("main", "compress")
    turns = {kind: model.model.rotary_emb(x, positions, kind) for kind in kinds}
    with torch.no_grad():
        modules = [layer.self_attn for layer in model.model.layers]
        return torch.stack([m(x, turns, positions, mask)[0].float() for m in modules])


def test_bfloat16_is_as_close_to_float32_as_the_model_itself():
    """Layers of a window and of ratio 8; an indexer turns a rounding into another row."""
    kinds = ["sliding_attention", "heavily_compressed_attention"]
    exact, rounded = (
        tiny_v4(dtype, num_hidden_layers=2, layer_types=kinds)
        for dtype in (torch.float32, torch.bfloat16)
    )
    rounded.load_state_dict(exact.state_dict())
    x = torch.randn(1, 40, 64)
    expected, own = (attention_alone(model, x) for model in (exact, rounded))

    def error(x: Tensor) -> float:
        return (x - expected).square().mean().sqrt().item()

    assert 0 < error(attention_alone(optimize(rounded), x)) <= 1.2 * error(own)


def test_autocast_is_as_close_to_float32_as_the_model_itself(model: PreTrainedModel):
    expected = logits(model, prompt())

    def error() -> float:
        with torch.autocast("cpu", torch.bfloat16):
            return (logits(model, prompt()).float() - expected).norm().item()

    own = error()
    optimize(model)
    assert 0 < error() <= 1.2 * own


class TestOwnAttentionRuns:
    def test_gradients(self, model: PreTrainedModel, calls: list[int]):
        ids = prompt(length=24)

        def gradients() -> list[Tensor]:
            model.zero_grad()
            model(ids, labels=ids).loss.backward()
            return [p.grad.clone() for p in model.parameters() if p.grad is not None]

        expected = gradients()
        optimize(model)
        with pytest.warns(RuntimeWarning, match=f"gradients of compressed rows; {OWN}"):
            got = gradients()
        model.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert not calls

    def test_a_mask_of_ones_own(self, model: PreTrainedModel):
        ids = prompt(length=24)
        mask = torch.full((2, 1, 24, 24), torch.finfo(torch.float32).min).triu(1)
        expected = logits(model, ids, attention_mask=mask)
        optimize(model)
        with pytest.warns(RuntimeWarning, match=f"a mask of one's own .*; {OWN}"):
            assert torch.equal(logits(model, ids, attention_mask=mask), expected)

    def test_weights_that_are_asked_for(self, model: PreTrainedModel):
        ids = prompt(length=24)
        with torch.no_grad():
            expected = model(ids, output_attentions=True)
            optimize(model)
            with pytest.warns(RuntimeWarning, match=f"keyword output_attentions; {OWN}"):
                got = model(ids, output_attentions=True)
        assert torch.equal(got.logits, expected.logits)
        assert all(map(torch.equal, got.attentions, expected.attentions))

    def test_another_attention_meanwhile(self, model: PreTrainedModel, calls: list[int]):
        ids = prompt()
        expected = logits(model, ids)
        optimize(model).set_attn_implementation("eager")
        assert torch.equal(logits(model, ids), expected) and not calls


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"form": "expanded"}, "keeps one row as K and V"),
            ({"fp8_indexer": True}, "fp8_indexer: DeepseekV4Indexer in e4m3"),
            ({"group": object()}, "over several ranks"),
        ],
    )
    def test_options(self, model: PreTrainedModel, options: dict[str, Any], reason: str):
        with pytest.raises(Unsupported, match=reason):
            optimize(model, **options)
        assert model.config._attn_implementation == "eager"

    def test_continuous_batching(self, model: PreTrainedModel):
        with pytest.raises(Unsupported, match="continuous batching of DeepseekV4ForCausalLM"):
            optimize(model).generate_batch(inputs=[[1, 2, 3]])

    def test_a_forward_of_somebody_elses(self, model: PreTrainedModel):
        layer = model.model.layers[0].self_attn
        layer.forward = layer.forward
        try:
            with pytest.raises(Unsupported, match="overridden already"):
                optimize(model)
        finally:
            del layer.forward

    @pytest.mark.parametrize("name", ["openmla", compressed.NAME])
    def test_names_without_optimize(self, model: PreTrainedModel, name: str):
        register()
        model.set_attn_implementation(name)
        try:
            with pytest.raises(Unsupported, match="DeepseekV4Attention"):
                logits(model, prompt())
        finally:
            model.set_attn_implementation("eager")
