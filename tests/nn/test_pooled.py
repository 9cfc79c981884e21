"""A layer of GLM-5.3-Flash: against its definition in float64, and the module of Transformers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import openmla
from integrations.transformers.tiny import COMMON, EXTRA, EYES, _named
from nn import exact
from openmla.distributed import split
from openmla.errors import InvalidArgument, Unsupported
from openmla.indexer.cache import quantize
from openmla.indexer.groups_reference import tokens_of_pools
from openmla.lab.testing.indexer import BOUND, selection_fits
from openmla.nn import Batch, MLAAttention, PoolCache, PoolIndexer, PoolIndexerConfig
from openmla.nn.indexer import PAGE, fold, hadamard
from openmla.planning.form import FormChoice

CLOSE = 2e-6
LENGTHS, POOL, TOPK = (61, 23), 4, 12
CUTS = {
    "whole": [LENGTHS],
    "chunks": [(17, 0), (3, 5), (18, 3), (0, 1), (23, 14)],
    "then one by one": [(40, 2), *[(1, 1)] * 21],
}
SETTINGS: dict[str, Any] = {
    "model_type": "glm5_next_text",
    "hidden_size": 64,
    "num_attention_heads": 3,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 0,
    "v_head_dim": 24,
    "q_lora_rank": 48,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": TOPK,
    "index_kpool": POOL,
    "index_kpool_always_select_tail": True,
    "rms_norm_eps": 1e-5,
}


def drawn(layer: MLAAttention) -> MLAAttention:
    """No parameter is zero or one."""
    torch.manual_seed(1)
    for name, parameter in layer.named_parameters():
        if "norm" in name and "bias" not in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=1.0 if name.endswith("_ape") else 0.1)
    return layer.requires_grad_(False)


def untrained(**more: Any) -> MLAAttention:
    return drawn(MLAAttention.from_config(SimpleNamespace(**{**SETTINGS, **more})))


def hidden() -> list[Tensor]:
    torch.manual_seed(5)
    return [torch.randn(n, 64) for n in LENGTHS]


class Ours:
    """A layer with shuffled pages, and lines of state in another order."""

    def __init__(self, layer: MLAAttention, scales: Any = "ue8m0", **options: Any) -> None:
        self.layer = layer
        pages = {"num_pages": 24, "page_size": 8}
        widths = {"latent": layer.config.dims.latent, "rope": 0}
        self.cache = openmla.LatentCache.allocate(**pages, **widths, **options)
        self.pools = PoolCache.allocate(**pages, requests=3, pool=POOL, scales=scales)
        self.pools.keys.data.fill_(0xFF)  # NaN, wherever no key is
        self.pools.state.kv.fill_(7.0)  # what was there before must not matter
        g = torch.Generator().manual_seed(2)
        self.table = torch.randperm(24, generator=g)[:18].view(2, 9).int()
        self.requests = torch.tensor([2, 0])
        self.lists: list[list[list[int]]] = [[] for _ in LENGTHS]
        layer.indexer.register_forward_hook(self._note)

    def _note(self, module: Any, given: Any, found: Any) -> None:
        rows = iter((found[0] if isinstance(found, tuple) else found).tolist())
        for line, new in enumerate(given[3].new):
            self.lists[line] += [[p for p in next(rows) if p >= 0] for _ in range(new)]

    def __call__(self, xs: list[Tensor], context: list[int]) -> list[Tensor]:
        new = [len(x) for x in xs]
        batch = Batch.of(new, context, self.table)
        pools = self.pools.of(self.requests)
        out = self.layer(torch.cat(xs), batch.positions, self.cache, batch, index_cache=pools)
        return list(out.split(new))

    def stored(self, line: int, share: float, block: int = 1) -> exact.Stored:
        """Rows of a sequence as the cache has them."""
        place = torch.arange(LENGTHS[line])
        rows = self.cache.gather(self.table[line].long()[place // 8] * 8 + place % 8)
        return exact.cached(rows.float(), share, block)


def in_parts(ours: Any, xs: list[Tensor], cuts: list[tuple[int, ...]]) -> list[Tensor]:
    """Whole sequences, a few tokens of each at a time."""
    context, found = [0] * len(xs), [[] for _ in xs]
    for new in cuts:
        part = [x[c : c + n] for x, c, n in zip(xs, context, new, strict=True)]
        for out, whole in zip(ours(part, context), found, strict=True):
            whole.append(out)
        context = [c + n for c, n in zip(context, new, strict=True)]
    return [torch.cat(parts) for parts in found]


def judge_lists(layer: MLAAttention, x: Tensor, lists: list[list[int]], scales: str) -> None:
    """Every list is the tail and the best pools, by float64 scores of keys as they are stored."""
    indexer: Any = layer.indexer
    exact_k = torch.nn.functional.layer_norm(
        exact.times(x.double(), indexer.wk),
        (128,),
        indexer.k_norm.weight.double(),
        indexer.k_norm.bias.double(),
        1e-6,
    )
    gates = x.double() @ indexer.index_kpool_compress_gate.double().T
    keys = []
    for p in range(len(x) // POOL):
        at = slice(p * POOL, (p + 1) * POOL)
        weights = (gates[at] + indexer.index_kpool_compress_ape.double()).exp()
        keys.append((weights / weights.sum(0) * exact_k[at]).sum(0))
    pooled = torch.stack(keys).float()
    if scales == "mxfp4":
        pool = openmla.IndexCache.allocate(num_pages=1, page_size=len(pooled), scales="mxfp4")
        pool.append(pooled, torch.arange(len(pooled)))
        k = pool.gather(torch.arange(len(pooled)))[0].double()
    else:
        values, scale = quantize(pooled, "ue8m0")
        k = values.double() * scale.double()[:, None]
    q, folded = fold(*indexer.project(x, layer.compress_queries(x)))
    for t, found in enumerate(lists):
        ready, tail = (t + 1) // POOL, tokens_of_pools([], t + 1, POOL)
        pools = [place // POOL for place in found[: len(found) - len(tail) : POOL]]
        assert found == tokens_of_pools(pools, t + 1, POOL)
        products = (q[t].double() @ k[:ready].T).relu()
        magnitude = folded[t].double().abs() @ (q[t].double().abs() @ k[:ready].abs().T)
        chosen = torch.full((TOPK // POOL,), -1)
        chosen[: len(pools)] = torch.tensor(pools, dtype=torch.int64)
        scores = folded[t].double() @ products
        assert selection_fits(chosen, scores, BOUND * magnitude, TOPK // POOL)


@pytest.mark.parametrize("scales", ["ue8m0", "mxfp4"])
@pytest.mark.parametrize("cuts", CUTS)
def test_equals_the_definition(cuts: str, scales: str) -> None:
    xs, ours = hidden(), Ours(untrained(), scales)
    got = in_parts(ours, xs, CUTS[cuts])
    for line, (x, out, lists) in enumerate(zip(xs, got, ours.lists, strict=True)):
        judge_lists(ours.layer, x, lists, scales)
        expected = exact.mla(ours.layer, x, lists, ours.stored(line, 2**-8))[: len(out)]
        assert (out - expected).abs().max() <= CLOSE


def test_the_cut_of_a_prompt_changes_no_list() -> None:
    xs = hidden()
    first = Ours(untrained())
    whole = in_parts(first, xs, CUTS["whole"])
    for cuts in ("chunks", "then one by one"):
        ours = Ours(untrained())
        parts = in_parts(ours, xs, CUTS[cuts])
        for a, b, lists, others in zip(parts, whole, ours.lists, first.lists, strict=True):
            assert lists == others[: len(lists)]
            assert (a - b[: len(a)]).abs().max() <= CLOSE


def test_rows_of_528_bytes() -> None:
    """Rows of 512 columns, as FlashMLA's kernels of GLM-5.3-Flash have them."""
    (x, _), layer = hidden(), untrained(kv_lora_rank=512)
    ours = Ours(layer, format="fp8_528_v32")
    (out, _) = ours([x, x[:0]], [0, 0])
    expected = exact.mla(layer, x, ours.lists[0], ours.stored(0, 0.04, block=128))
    assert (out - expected).abs().max() <= 5e-6
    plain = exact.mla(layer, x, ours.lists[0], lambda rows: rows)
    assert (plain - expected).abs().max() > 1e-4


def test_as_many_tokens_as_are_selected_are_all_seen() -> None:
    """Three pools and the tail are 15 tokens: up to there no key is scored, and none is lost."""
    (x, _), ours = hidden(), Ours(untrained())
    most = TOPK + POOL - 1
    dense = ours([x[:most], x[:0]], [0, 0])[0]
    assert not ours.lists[0]
    every = [list(range(t + 1)) for t in range(most)]
    expected = exact.mla(ours.layer, x[:most], every, lambda rows: rows)
    assert (dense - expected).abs().max() <= CLOSE
    ours([x[most : most + 1], x[:0]], [most, 0])
    judge_lists(ours.layer, x[: most + 1], [*every, ours.lists[0][0]], "ue8m0")
    assert len(ours.lists[0][0]) == TOPK


def test_fresh_sequences_need_no_cache() -> None:
    xs, layer = hidden(), untrained()
    batch = Batch.of(LENGTHS)
    got = layer(torch.cat(xs), batch.positions, batch=batch).split(LENGTHS)
    indices = layer.indexer(
        torch.cat(xs), layer.compress_queries(torch.cat(xs)), batch.positions, batch
    )
    for x, out, rows in zip(xs, got, indices.split(LENGTHS), strict=True):
        lists = [[p for p in row if p >= 0] for row in rows.tolist()]
        judge_lists(layer, x, lists, "ue8m0")
        assert (out - exact.mla(layer, x, lists, lambda rows: rows)).abs().max() <= CLOSE


def test_pools_that_fill_their_pages_beside_tokens_that_fill_none() -> None:
    """A token more takes no place among the keys of pools."""
    layer, tokens = untrained(), PAGE * POOL + 1
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(7))
    rows = layer.indexer(x, layer.compress_queries(x), None, Batch.of([tokens]))
    assert int((rows[-1] >= 0).sum()) == TOPK + 1


def test_a_rotation_leaves_scores_as_they_are() -> None:
    layer = untrained()
    (x, _), indexer = hidden(), layer.indexer
    q, _ = indexer.project(x, layer.compress_queries(x))
    indexer.config = replace(indexer.config, hadamard=True)
    turned, _ = indexer.project(x, layer.compress_queries(x))
    assert torch.equal(turned, hadamard(q)) and not torch.equal(turned, q)
    rotated = indexer(x, layer.compress_queries(x), None, Batch.of([61]))
    assert rotated.shape == (61, TOPK + POOL - 1)
    assert int((rotated[-1] >= 0).sum()) == TOPK + 61 % POOL


def test_equals_the_module_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights; its indexer is given our lists, which e4m3 keys may change near the cut."""
    config = _named("glm5_next", "configuration", "Config")
    text = {**COMMON, **EXTRA["glm5_next"], "index_head_dim": 128, "index_topk": TOPK}
    torch.manual_seed(0)
    made = config(text_config=text, vision_config=EYES["glm5_next"])
    model = _named("glm5_next", "modeling", "ForConditionalGeneration")._from_config(made).eval()
    model.set_attn_implementation("eager")
    module = next(m for m in model.modules() if type(m).__name__ == "Glm5NextTextAttention")
    layer = MLAAttention.from_config(module.config).load(module)
    drawn(layer)
    module.load_state_dict(layer.state_dict())
    x = hidden()[0]
    indices = layer.indexer(x, layer.compress_queries(x), None, Batch.of([61]))
    keep = torch.ones(1, 61, dtype=torch.bool)
    with torch.no_grad():
        residual = module.q_a_layernorm(module.q_a_proj(x[None]))
        theirs = module.indexer(x[None], residual, keep, None)[0]
        monkeypatch.setattr(module.indexer, "forward", lambda **_: indices[None])
        expected = module(x[None], keep)[0][0]
    assert (layer(x, torch.arange(61)) - expected).abs().max() <= CLOSE
    same = sum(
        {*a} == {*b} for a, b in zip(indices.tolist(), theirs.tolist(), strict=True)
    )  # in e4m3, few others
    assert same >= 55


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail=False"),
        ({"index_head_dim": 64}, "an indexer 64 wide"),
        ({"model_type": "glm_moe_dsa"}, "no indexer of pools for 'glm_moe_dsa'"),
    ],
)
def test_what_is_not_served_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        PoolIndexerConfig.of(SimpleNamespace(**{**SETTINGS, **change}))


def test_wrong_caches() -> None:
    layer, (x, _) = untrained(), hidden()
    table = torch.arange(9, dtype=torch.int32)[None]
    batch = Batch.of([20], block_table=table)
    given = x[:20], batch.positions
    cache = openmla.LatentCache.allocate(num_pages=9, page_size=8, latent=64, rope=0)
    pools = PoolCache.allocate(num_pages=9, page_size=8, requests=1, pool=POOL)
    with pytest.raises(InvalidArgument, match="index_cache: expected a PoolCache"):
        layer(*given, cache, batch, index_cache=pools.keys)
    with pytest.raises(InvalidArgument, match="index_cache: expected pools of 4 tokens, got 8"):
        other = PoolCache.allocate(num_pages=9, page_size=8, requests=1, pool=8)
        layer(*given, cache, batch, index_cache=other)
    with pytest.raises(InvalidArgument, match=r"index_cache.requests: expected \[1\]"):
        layer(*given, cache, batch, index_cache=pools.of(torch.tensor([0, 1])))
    with pytest.raises(InvalidArgument, match="index_cache: expected 1 requests, got 0 lines"):
        none = PoolCache.allocate(num_pages=9, page_size=8, requests=0, pool=POOL)
        layer(*given, cache, batch, index_cache=none)
    with pytest.raises(InvalidArgument, match="pages for 5 keys, of 1 rows each, got 3 pages"):
        short = PoolCache.allocate(num_pages=9, page_size=4, requests=1, pool=POOL)
        narrow = Batch.of([20], block_table=table[:, :3])
        layer(*given, cache, narrow, index_cache=short)
    with pytest.raises(InvalidArgument, match="page_size: expected a multiple of 4 tokens, got 6"):
        PoolCache.allocate(num_pages=9, page_size=6, requests=1, pool=POOL)
    with pytest.raises(InvalidArgument, match="index_cache: expected an IndexCache"):
        dsa = SETTINGS | {
            "model_type": "glm_moe_dsa",
            "qk_rope_head_dim": 16,
            "attention_bias": False,
            "rope_parameters": {"rope_theta": 1e4},
        }
        MLAAttention.from_config(SimpleNamespace(**dsa))(*given, cache, batch, index_cache=pools)
    with pytest.raises(Unsupported, match="an indexer of pools, with a sequence over several"):
        layer(*given, shard=split([20], 1, 0))
    with pytest.raises(Unsupported, match="scores pools of tokens"):
        layer.forward_and_loss(*given)


def test_bits_are_made_for_the_masked_form_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as wide as a sequence: over a long one, lists alone."""
    forms: list[tuple[str, bool]] = []
    select, xs = PoolIndexer.forward, hidden()

    def noted(self: PoolIndexer, *given: Any, return_mask: bool = False) -> Any:
        forms.append((form, return_mask))
        return select(self, *given, return_mask=return_mask)

    monkeypatch.setattr(PoolIndexer, "forward", noted)
    found = []
    for form in ("sparse", "masked"):
        ours, choice = Ours(untrained()), FormChoice(form, "")
        monkeypatch.setattr(ours.layer, "choose", lambda *_, choice=choice: choice)
        found.append(in_parts(ours, xs, CUTS["chunks"][:1])[0])
    assert forms == [("sparse", False), ("masked", True)]
    assert (found[0] - found[1]).abs().max() <= CLOSE
