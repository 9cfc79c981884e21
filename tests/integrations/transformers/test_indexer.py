"""Indexers of Transformers, exact or in e4m3: what they select, what is left alone or refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from integrations.transformers.tiny import logits, tiny
from nn.test_indexer import TOPK, model_of
from openmla.errors import Unsupported
from openmla.integrations.transformers import indexer, optimize, restore
from openmla.integrations.transformers.indexer import INTERLEAVED, select, why_not
from openmla.nn.indexer import INTERLEAVED as KINDS

TOKENS = 60


def ids(rows: int = 2) -> Tensor:
    return torch.randint(2, 128, (rows, TOKENS), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_selections_are_theirs_but_for_rounding(kind: str, fp8: bool) -> None:
    model = model_of(kind)
    layer = model.model.layers[1].self_attn
    x = torch.randn(2, TOKENS, 64, generator=torch.Generator().manual_seed(6))
    positions = torch.arange(TOKENS)[None]
    cos_sin = model.model.rotary_emb(x, positions)
    mask = torch.ones(2, TOKENS, TOKENS).tril().bool()
    mask[1, :, :7] = False  # padding on the left
    mask[1, :, 30] = False  # and a hole
    with torch.no_grad():
        resid = layer.q_a_layernorm(layer.q_a_proj(x))
        theirs = type(layer.indexer).forward(layer.indexer, x, resid, cos_sin, mask, positions)
        mine = select(layer.indexer, x, resid, cos_sin, mask, fp8=fp8)
    shared = total = 0
    for b in range(2):
        for t in range(TOKENS):
            seen = {int(i) for i in mine[b, t] if i >= 0 and mask[b, t, i]}
            want = {int(i) for i in theirs[b, t] if mask[b, t, i]}
            assert len(seen) == len(want) == min(TOPK, int(mask[b, t].sum()))
            shared, total = shared + len(seen & want), total + len(want)
    assert shared > 0.95 * total if fp8 else shared == total


@pytest.mark.parametrize("kind", KINDS)
def test_of_equal_scores_the_smaller_positions_are_taken(kind: str) -> None:
    """With four heads many scores are exactly 0, and torch.topk takes any of them."""
    model = model_of(kind, index_n_heads=4)
    layer = model.model.layers[1].self_attn
    x = torch.randn(1, TOKENS, 64, generator=torch.Generator().manual_seed(6))
    positions = torch.arange(TOKENS)[None]
    cos_sin = model.model.rotary_emb(x, positions)
    mask = torch.ones(1, TOKENS, TOKENS).tril().bool()
    index, scores = layer.indexer, []
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        resid = layer.q_a_layernorm(layer.q_a_proj(x))
        topk = Tensor.topk
        patch.setattr(Tensor, "topk", lambda s, *a, **o: scores.append(s) or topk(s, *a, **o))
        theirs = type(index).forward(index, x, resid, cos_sin, mask, positions)[0]
        mine = select(index, x, resid, cos_sin, mask)[0]
    [found] = [s[0] for s in scores if s.shape == mask.shape]
    tied = 0
    for t in range(TOPK, TOKENS):
        row, chosen, others = found[t], set(mine[t].tolist()), set(theirs[t].tolist())
        cut = row[theirs[t].long()].min()
        equal = [p for p in range(t + 1) if row[p] == cut]
        assert len(equal) == 1 or cut == 0
        above = {p for p in range(t + 1) if row[p] > cut}
        assert above <= chosen and above <= others
        assert chosen - above == set(equal[: TOPK - len(above)])
        tied += len(equal) > TOPK - len(above)
    assert tied


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_runs_in_chunks_and_gives_its_indexer_back(kind: str) -> None:
    model = model_of(kind)
    want = logits(model, ids())
    optimize(model, fp8_indexer=True)
    own = model.model.layers[1].self_attn.indexer
    assert "forward" in vars(own)
    whole = logits(model, ids())
    chunks = logits(model, ids(), chunks=(25, 34, 1))
    assert torch.allclose(whole, chunks, atol=1e-4)
    early = TOPK - 1  # these queries attend to every key, whatever is selected
    assert torch.allclose(whole[:, :early], want[:, :early], atol=1e-4)
    assert not torch.allclose(whole, want, atol=1e-4)  # tiny models select much by rounding
    restore(model)
    assert "forward" not in vars(own)
    assert torch.equal(logits(model, ids()), want)


@pytest.mark.parametrize("kind", KINDS)
def test_selecting_every_key_is_the_model_itself(kind: str) -> None:
    model = model_of(kind, index_topk=TOKENS)
    padded = torch.ones(2, TOKENS, dtype=torch.long)
    padded[1, :9] = 0
    want = logits(model, ids(), attention_mask=padded)
    optimize(model)
    got = logits(model, ids(), attention_mask=padded)
    restore(model)
    assert torch.allclose(got[0], want[0], atol=1e-4)
    assert torch.allclose(got[1, 9:], want[1, 9:], atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_selections_are_as_exact_as_the_models_unless_asked(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a few queries at a time."""
    model = model_of(kind)
    want = logits(model, ids())
    optimize(model)
    assert torch.allclose(logits(model, ids()), want, atol=1e-5)
    monkeypatch.setattr(indexer, "SCORES_LIMIT", 7 * 4 * TOKENS * model.config.index_n_heads)
    assert torch.allclose(logits(model, ids()), want, atol=1e-5)
    restore(model)


def test_e4m3_that_was_asked_for_is_refused_where_there_is_no_way() -> None:
    with pytest.raises(Unsupported, match="fp8_indexer: DeepseekV32Indexer is 32 wide"):
        optimize(tiny("deepseek_v32"), fp8_indexer=True)


def test_indexers_that_are_left_alone() -> None:
    narrow = tiny("deepseek_v32").model.layers[1].self_attn.indexer
    assert "32 wide" in why_not(narrow, fp8=True) and not why_not(narrow)
    assert set(INTERLEAVED) == {"DeepseekV32Indexer", "GlmMoeDsaIndexer"}
    wide = model_of("deepseek_v32").model.layers[1].self_attn.indexer
    wide.wk = torch.nn.Identity()
    assert "wk is a Identity" in why_not(wide)
