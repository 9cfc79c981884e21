"""`MLAAttention` against the attention modules of Transformers, with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from integrations.transformers.tiny import COMMON, EXTRA, tiny
from openmla import LatentCache
from openmla.errors import InvalidArgument, Unsupported
from openmla.nn import Batch, MLAAttention, MLAConfig
from openmla.nn.config import TURNED
from openmla.planning import form

CLOSE = 2e-6
DENSE = [k for k in TURNED if k not in EXTRA or "index_topk" not in EXTRA[k]]
SPARSE = [k for k in TURNED if k not in DENSE]
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 128,
}


class Theirs:
    """The second layer's attention module of a tiny model, one sequence at a time."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.config = model.config
        self.module = model.model.layers[1].self_attn
        self._rotary = model.model.rotary_emb
        model.set_attn_implementation("eager")

    @torch.no_grad()
    def __call__(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """[tokens, hidden] of a whole sequence; its first keys replaced by `rows`, if given."""
        if rows is not None:
            self.module.expand_kv = MethodType(_expand_with(rows), self.module)
        out = self.trained(x)
        self.module.__dict__.pop("expand_kv", None)
        return out

    def trained(self, x: Tensor) -> Tensor:
        """Likewise, with gradients."""
        out: Tensor = self.module(x[None], **self._arguments(x), past_key_values=None)[0][0]
        return out

    @torch.no_grad()
    def selected(self, x: Tensor) -> Tensor | None:
        """[tokens, topk] of the indexer, -1 for keys of the future; None without an indexer."""
        if not hasattr(self.module, "indexer"):
            return None
        kw = self._arguments(x)
        kw["attention_mask"] = kw["attention_mask"][:, 0]
        q_resid = self.module.q_a_layernorm(self.module.q_a_proj(x[None]))
        keys = self.module.indexer(x[None], q_resid, past_key_values=None, **kw)[0]
        return torch.where(keys > torch.arange(len(x))[:, None], -1, keys)

    def _arguments(self, x: Tensor) -> dict[str, Any]:
        positions = torch.arange(len(x))[None]
        hidden = torch.full((len(x), len(x)), torch.finfo(x.dtype).min).triu(1)
        return {
            "position_embeddings": self._rotary(x[None], positions),
            "attention_mask": hidden[None, None],
            "position_ids": positions,
        }


def _expand_with(rows: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    def expand_kv(self: Any, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        latent, rope = latent.clone(), rope.clone()
        latent[0, 0, : len(rows)] = rows[:, : latent.shape[3]]
        rope[0, 0, : len(rows)] = rows[:, latent.shape[3] :]
        return type(self).expand_kv(self, latent, rope)

    return expand_kv


def both(kind: str) -> tuple[Theirs, MLAAttention]:
    theirs = Theirs(tiny(kind))
    return theirs, MLAAttention.from_config(theirs.config).load(theirs.module).requires_grad_(False)


def hidden(*lengths: int) -> list[Tensor]:
    return [torch.randn(n, COMMON["hidden_size"]) for n in lengths]


def off_by(a: Tensor, b: Tensor) -> float:
    assert torch.isfinite(a).all()
    return (a - b).abs().max().item()


@pytest.mark.parametrize("kind", TURNED)
def test_whole_prompts(kind: str):
    """Two sequences at once, without a cache."""
    theirs, ours = both(kind)
    sequences = hidden(90, 31)
    batch = Batch.of([90, 31])
    chosen = [theirs.selected(x) for x in sequences]
    indices = None if chosen[0] is None else torch.cat(chosen)
    got = ours(torch.cat(sequences), batch.positions, batch=batch, indices=indices)
    assert off_by(got, torch.cat([theirs(x) for x in sequences])) <= CLOSE


@pytest.mark.parametrize("format", ["bf16", "fp8_block64"])
@pytest.mark.parametrize("kind", ["deepseek_v3", *SPARSE])
def test_chunks_over_a_paged_cache(kind: str, format: str):
    """Each chunk is compared with a whole pass over the rows that the cache holds by then."""
    theirs, ours = both(kind)
    sequences = hidden(171, 34)
    dims = ours.config.dims
    pages = {"page_size": 16, "latent": dims.latent, "rope": dims.rope, "format": format}
    cache = LatentCache.allocate(num_pages=24, **pages)
    table = torch.randperm(24).view(2, 12).int()
    context, forms = [0, 0], []
    for new in ([10, 5], [60, 20], [100, 8], [1, 1]):
        batch = Batch.of(new, context, table)
        so_far = [x[:n] for x, n in zip(sequences, batch.keys, strict=True)]
        x = torch.cat([s[c:] for s, c in zip(so_far, context, strict=True)])
        indices = None
        if kind in SPARSE:
            # Of the sequence so far: among equal scores, top-k's choice depends on their number.
            chosen = [theirs.selected(s)[c:] for s, c in zip(so_far, context, strict=True)]
            widest = max(s.shape[1] for s in chosen)
            indices = torch.cat([pad(s, (0, widest - s.shape[1]), value=-1) for s in chosen])
        got = ours(x, batch.positions, cache, batch, indices)
        choice = ours.choose(batch).form
        for i, out in enumerate(got.split(new)):
            # New tokens are expanded as they are; everything else was read from the cache.
            stored = context[i] if choice == "expanded" else context[i] + new[i]
            places = torch.arange(stored)
            rows = cache.gather(table[i, places // 16].long() * 16 + places % 16).float()
            expected = theirs(so_far[i], rows)[context[i] :]
            assert off_by(out, expected) <= CLOSE
        forms.append(choice)
        context = list(batch.keys)
    last = ["sparse"] * 3 if kind in SPARSE else ["expanded", "expanded", "latent"]
    assert forms == ["expanded", *last]


def test_a_long_context_is_expanded_in_pieces(monkeypatch: pytest.MonkeyPatch):
    """Pieces of 64 keys, of which one sequence has three and the other none."""
    _, ours = both("deepseek_v3")
    x = torch.cat(hidden(200, 100))
    pool = {"num_pages": 40, "page_size": 16, "latent": 64, "rope": 16}
    table = torch.arange(40).view(2, 20).int()
    first = Batch.of([180, 0], block_table=table)
    second = Batch.of([100, 100], [180, 0], table)

    def run() -> Tensor:
        cache = LatentCache.allocate(**pool)
        ours(x[:180], first.positions, cache, first)
        return ours(torch.cat([x[180:200], x[100:180], x[200:]]), second.positions, cache, second)

    whole = run()
    monkeypatch.setattr(form, "EXPANDED_BYTES", 0)
    assert ours.choose(second).form == "expanded"
    assert off_by(run(), whole) <= CLOSE


def test_yarn_stretches_frequencies_and_scores():
    model = tiny("deepseek_v3")
    config = type(model.config)(**COMMON | {"rope_parameters": dict(YARN)})
    torch.manual_seed(0)
    theirs = Theirs(type(model)._from_config(config).eval())
    ours = MLAAttention.from_config(config).load(theirs.module).requires_grad_(False)
    x = hidden(200)[0]
    assert ours.config.scale != pytest.approx(48**-0.5)
    assert off_by(ours(x, torch.arange(200)), theirs(x)) <= CLOSE


def test_queries_need_not_be_compressed():
    model = tiny("deepseek_v3")
    config = type(model.config)(**COMMON | {"q_lora_rank": None})
    theirs = Theirs(type(model)._from_config(config).eval())
    ours = MLAAttention.from_config(config).load(theirs.module).requires_grad_(False)
    x = hidden(40)[0]
    assert off_by(ours(x, torch.arange(40)), theirs(x)) <= CLOSE


def test_weights_of_a_state_dict():
    model = tiny("deepseek_v32")
    _, ours = both("deepseek_v32")
    other = MLAAttention.from_config(model.config)
    other.load(model.state_dict(), prefix="model.layers.1.self_attn.")
    pairs = zip(ours.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load(model.state_dict(), prefix="model.layers.1.mlp.")


def test_an_unknown_model_is_refused():
    with pytest.raises(Unsupported, match="no MLA layer for 'hy_v4'"):
        MLAConfig.of(SimpleNamespace(model_type="hy_v4"))
    config = type(tiny("deepseek_v3").config)(**COMMON)
    config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4}
    with pytest.raises(Unsupported, match="rotary embedding 'longrope'"):
        MLAConfig.of(config)


def test_wrong_arguments_are_named():
    _, ours = both("deepseek_v32")
    x, positions = hidden(20)[0], torch.arange(20)
    with pytest.raises(InvalidArgument, match=r"indices.*more than 12 keys"):
        ours(x, positions)
    with pytest.raises(InvalidArgument, match=r"x: expected \[19, hidden\]"):
        ours(x, positions, batch=Batch.of([19]))
    with pytest.raises(InvalidArgument, match="positions"):
        ours(x, positions[1:])
    with pytest.raises(InvalidArgument, match="cache: expected the cache that holds"):
        ours(x, positions, batch=Batch.of([20], [4]))
    cache = LatentCache.allocate(num_pages=2, page_size=16, latent=64, rope=16)
    with pytest.raises(InvalidArgument, match="one with a block_table"):
        ours(x, positions, cache)


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe_lite"])
def test_it_trains(kind: str):
    """Gradients of every weight, and of x, are those of the module, over two sequences at once."""
    theirs, _ = both(kind)
    module = theirs.module.requires_grad_(True)
    ours = MLAAttention.from_config(theirs.config).load(module)
    batch, sequences = Batch.of([30, 9]), hidden(30, 9)
    x = torch.cat(sequences).requires_grad_()
    ours(x, batch.positions, batch=batch).square().sum().backward()
    expected = [s.requires_grad_() for s in sequences]
    torch.cat([theirs.trained(s) for s in expected]).square().sum().backward()
    weights = dict(module.named_parameters())
    pairs = [(p.grad, weights[name].grad) for name, p in ours.named_parameters()]
    pairs += [(x.grad, torch.cat([s.grad for s in expected]))]
    assert all(off_by(got, want) <= CLOSE * want.abs().max() for got, want in pairs)
    assert all(got.any() for got, _ in pairs)


def test_it_trains_under_autocast():
    """Weights in float32, projections in bfloat16: what is attended to has one type."""
    _, ours = both("deepseek_v3")
    ours.requires_grad_(True)
    x, positions = hidden(20)[0], torch.arange(20)
    exact = ours(x, positions).detach()
    with torch.autocast("cpu", torch.bfloat16):
        out = ours(x, positions)
    assert off_by(out, exact) <= 0.02 * exact.abs().max()
    out.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in ours.parameters())


def test_given_keys_after_the_query_are_not_seen():
    """As the bits of a layer that trains hide them, so do the rows of one that serves."""
    _, ours = both("deepseek_v32")
    x, positions = hidden(20)[0], torch.arange(20)
    every = torch.arange(20).repeat(20, 1)
    lists = torch.stack([row[torch.randperm(20)[:12]] for row in every])
    lists[:, 0] = positions  # each query sees a key at least
    lists = torch.stack([pad(row.unique(), (0, 12 - len(row.unique())), value=-1) for row in lists])
    earlier = torch.where(lists <= positions[:, None], lists, -1)
    served = ours(x, positions, indices=lists.int())
    assert torch.equal(served, ours(x, positions, indices=earlier.int()))
    ours.requires_grad_(True)
    assert off_by(ours(x, positions, indices=lists.int()), served) <= CLOSE


@pytest.mark.parametrize("batch", [Batch.of([]), Batch.of([0, 0])])
@pytest.mark.parametrize("kind", TURNED)
def test_a_batch_without_tokens(kind: str, batch: Batch):
    _, ours = both(kind)
    ours.indexer = None
    assert ours(torch.empty(0, 64), batch.positions, batch=batch).shape == (0, 64)
    ours.requires_grad_(True)
    x = torch.empty(0, 64, requires_grad=True)
    ours(x, batch.positions, batch=batch).sum().backward()
    assert x.grad is not None


def test_gradients_of_caches_are_refused():
    theirs, _ = both("deepseek_v3")
    ours = MLAAttention.from_config(theirs.config)
    cache = LatentCache.allocate(num_pages=2, page_size=16, latent=64, rope=16)
    batch = Batch.of([4], block_table=torch.tensor([[0, 1]]).int())
    with pytest.raises(Unsupported, match="a cache does not carry one"):
        ours(hidden(4)[0], torch.arange(4), cache, batch)
