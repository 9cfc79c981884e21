"""`Indexer` against the indexers of Transformers, and `MLAAttention` with one of its own."""

from __future__ import annotations

import doctest
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from integrations.transformers.tiny import COMMON, EXTRA, _named
from nn.test_mla import Theirs
from openmla import IndexCache, LatentCache
from openmla.errors import InvalidArgument, Unsupported
from openmla.indexer.cache import quantize
from openmla.lab.testing.indexer import BOUND, selection_fits
from openmla.nn import Batch, Indexer, IndexerConfig, MLAAttention, indexer
from openmla.nn.indexer import INTERLEAVED, fold, hadamard, own_pages
from openmla.planning import form

TOKENS, TOPK = 60, EXTRA["deepseek_v32"]["index_topk"]
KINDS = list(INTERLEAVED)


def test_examples() -> None:
    assert doctest.testmod(indexer).failed == 0


def model_of(kind: str, **more: Any) -> Any:
    """A tiny model whose indexer is 128 wide."""
    config = _named(kind, "configuration", "Config")
    sizes = COMMON | EXTRA[kind] | {"index_head_dim": 128} | more
    torch.manual_seed(0)
    return _named(kind, "modeling", "ForCausalLM")._from_config(config(**sizes)).eval()


def both(kind: str) -> tuple[Theirs, MLAAttention]:
    theirs = Theirs(model_of(kind))
    return theirs, MLAAttention.from_config(theirs.config).load(theirs.module).eval()


def hidden(tokens: int = TOKENS) -> Tensor:
    return torch.randn(tokens, COMMON["hidden_size"], generator=torch.Generator().manual_seed(3))


def projected(layer: MLAAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    assert layer.indexer is not None
    with torch.no_grad():
        return layer.indexer.project(x, layer.compress_queries(x), torch.arange(len(x)))


def scores_of(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("th,ths->ts", weights, torch.einsum("thd,sd->ths", q, k).relu())


@pytest.mark.parametrize("kind", KINDS)
def test_projections_select_what_theirs_selects(kind: str) -> None:
    """In the same precision: halves for V3.2, pairs for GLM-5."""
    theirs, layer = both(kind)
    x = hidden()
    scores = scores_of(*projected(layer, x))
    seen = torch.ones(TOKENS, TOKENS).tril().bool()
    best = scores.masked_fill(~seen, -torch.inf).topk(TOPK, -1).indices
    want = theirs.selected(x)
    for t in range(TOKENS):
        mine = {int(i) for i in best[t] if i <= t}
        assert mine == {int(i) for i in want[t] if i >= 0}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_selection_is_that_of_quantized_keys(kind: str) -> None:
    _, layer = both(kind)
    x, positions = hidden(), torch.arange(TOKENS)
    got = layer.indexer(x, layer.compress_queries(x), positions, Batch.of([TOKENS]))
    q, k, weights = projected(layer, x)
    (q8, folded), (k8, scales) = fold(q, weights), quantize(k, "ue8m0")
    q8, k8 = q8.double(), k8.double()
    exact = scores_of(q8, k8, folded.double()) * scales.double()
    magnitude = scores_of(q8.abs(), k8.abs(), folded.double().abs()) * scales.double()
    for t in range(TOKENS):
        assert selection_fits(got[t], exact[t, : t + 1], BOUND * magnitude[t, : t + 1], TOPK)
    near = scores_of(q, k, weights)
    assert (exact - near).abs().max() < 0.1 * near.abs().max()


@torch.no_grad()
def test_a_compiled_layer_selects_the_same() -> None:
    _, layer = both("glm_moe_dsa")
    x, positions = hidden(), torch.arange(TOKENS)
    expected = layer(x, positions)
    torch._dynamo.reset()
    compiled: Any = torch.compile(layer, backend="aot_eager")
    assert (compiled(x, positions) - expected).abs().max() <= 2e-6


def test_a_rotation_of_nothing() -> None:
    assert hadamard(torch.empty(0, 3, 128)).shape == (0, 3, 128)


def test_a_hadamard_rotation_keeps_the_scores() -> None:
    _, layer = both("deepseek_v32")
    x = hidden()
    plain = scores_of(*projected(layer, x))
    config = IndexerConfig(**{**vars(layer.config.indexer), "hadamard": True})
    rotated = Indexer(config)
    rotated.load_state_dict(layer.indexer.state_dict())
    layer.indexer = rotated
    q, k, weights = projected(layer, x)
    assert torch.allclose(scores_of(q, k, weights), plain, atol=1e-5)
    assert torch.allclose(hadamard(hadamard(x)), x, atol=1e-5)
    assert not torch.allclose(hadamard(x), x, atol=0.1)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_layer_selects_for_itself_and_masked_is_sparse(kind: str) -> None:
    _, layer = both(kind)
    x, batch = hidden(), Batch.of([TOKENS])
    indices = layer.indexer(x, layer.compress_queries(x), batch.positions, batch)
    want = layer(x, batch.positions, batch=batch, indices=indices)
    outs = {}
    for name in ("sparse", "masked"):
        with patch.dict(form.SPARSE_RATES, {1: 1e9 if name == "sparse" else 1e-9}):
            assert layer.choose(batch, x.device).form == name
            outs[name] = layer(x, batch.positions, batch=batch)
    assert torch.equal(outs["sparse"], want)
    assert torch.allclose(outs["masked"], want, atol=2e-6)
    everything = layer(x[:TOPK], torch.arange(TOPK))
    assert torch.allclose(want[:TOPK], everything, atol=2e-6)
    assert not torch.allclose(want[TOPK + 20 :], torch.zeros(()), atol=1e-4)


@pytest.mark.parametrize("lengths", [[70, 5, 0, 128], [0, 0], []])
def test_fresh_sequences_have_rows_of_their_own(lengths: list[int]) -> None:
    """As many pages as the longest of them needs."""
    cache, batch = own_pages(Batch.of(lengths))
    rows = batch.slots(cache.page_size)
    assert len(rows.unique()) == sum(lengths)
    assert bool(((rows >= 0) & (rows < cache.rows)).all())


@pytest.mark.parametrize("rate", [1e9, 1e-9], ids=["sparse", "masked"])
@pytest.mark.parametrize("piece", [0, 100], ids=["whole", "pieces"])
@torch.no_grad()
def test_chunks_over_caches_are_the_whole(rate: float, piece: int) -> None:
    """Two sequences of different lengths, in three chunks; pages of another order than keys. A
    piece has the keys of 16 bytes of a mask at least, 128, even where fewer fill the memory."""
    _, layer = both("glm_moe_dsa")
    lengths, pages = (200, 70), 8
    xs = [hidden(n) for n in lengths]
    table = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(1)).int()
    table = table.view(2, pages)
    dims = layer.config.dims
    cache = LatentCache.allocate(
        num_pages=2 * pages, page_size=32, latent=dims.latent, rope=dims.rope
    )
    keys = IndexCache.allocate(num_pages=2 * pages, page_size=32)
    outs: list[list[Tensor]] = [[], []]
    done = [0, 0]
    with (
        patch.dict(form.SPARSE_RATES, {1: rate}),
        patch.object(form, "EXPANDED_BYTES", piece * 4 * 56 * 4 * 2 or form.EXPANDED_BYTES),
    ):
        for new in ([8, 5], [60, 40], [132, 25]):
            batch = Batch.of(new, done, table)
            x = torch.cat([xs[b][done[b] : done[b] + n] for b, n in enumerate(new)])
            out = layer(x, batch.positions, cache, batch, index_cache=keys)
            for b, part in enumerate(out.split(new)):
                outs[b].append(part)
            done = [d + n for d, n in zip(done, new, strict=True)]
        for b, x in enumerate(xs):
            whole = layer(x, torch.arange(len(x)))
            error = (torch.cat(outs[b]) - whole).abs().max() / whole.abs().max()
            assert error < 0.02, error  # rows of the cache are bf16


def test_what_is_missing_is_named() -> None:
    _, layer = both("deepseek_v32")
    x, table = hidden(20), torch.zeros(1, 1, dtype=torch.int32)
    cache = LatentCache.allocate(
        num_pages=1, page_size=64, latent=layer.config.dims.latent, rope=layer.config.dims.rope
    )
    batch = Batch.of([20], [20], table)
    with pytest.raises(InvalidArgument, match="index_cache"):
        layer(x, batch.positions, cache, batch)
    layer.indexer = None
    with pytest.raises(InvalidArgument, match="indices"):
        layer(x, torch.arange(20))


def test_other_indexers_are_refused() -> None:
    narrow = model_of("deepseek_v32", index_head_dim=32).config
    with pytest.raises(Unsupported, match="32 wide"):
        IndexerConfig.of(narrow)
    assert MLAAttention.from_config(narrow).indexer is None
