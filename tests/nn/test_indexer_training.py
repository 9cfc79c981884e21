"""`nn.Indexer` learns what attention looks at, and a DSA layer trains over what it selected."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from formula import same_bits
from nn.test_indexer import TOPK, both, hidden
from openmla import InvalidArgument, Unsupported
from openmla.nn import Batch, MLAAttention

BATCH = Batch.of([40, 25])


def layer_of(kind: str = "deepseek_v32") -> MLAAttention:
    return both(kind)[1].train().requires_grad_()


def exact_loss(layer: MLAAttention, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """By torch's own functions in float64, a sequence at a time."""
    layer, x = layer.double(), x.double()
    assert layer.indexer is not None
    found, first = [], 0
    for n in BATCH.new:
        rows, places = slice(first, first + n), torch.arange(n)
        compressed = layer.compress_queries(x[rows])
        q, latent, rope = layer.project(x[rows], places, compressed)
        k_nope, _ = layer.expand(latent)
        k = torch.cat([k_nope, rope[:, None].expand(-1, k_nope.shape[1], -1)], dim=-1)
        scores = torch.einsum("thd,shd->hts", q, k) * layer.config.scale
        seen = torch.ones(n, n, dtype=torch.bool).tril()
        if mask is not None:
            seen &= ((mask[rows][:, places // 32] >> (places % 32)) & 1).bool()
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).mean(0).detach()
        index_q, index_k, w = layer.indexer.project(x[rows], compressed.detach(), places)
        products = torch.einsum("thd,sd->ths", index_q, index_k).relu()
        index = torch.einsum("th,ths->ts", w.double(), products).masked_fill(~seen, -torch.inf)
        share = index.log_softmax(-1).masked_fill(~seen, 0.0)
        found.append(torch.xlogy(weights, weights).sum(-1) - (weights * share).sum(-1))
        first += n
    return torch.cat(found)


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize("sparse", [False, True])
def test_the_loss_and_its_gradients(kind: str, sparse: bool) -> None:
    layer, x = layer_of(kind), hidden(65)
    assert layer.indexer is not None
    mask = None
    if sparse:
        compressed = layer.compress_queries(x)
        _, mask = layer.indexer(x, compressed, BATCH.positions, BATCH, return_mask=True)
        assert max(BATCH.new) > TOPK
    out, loss = layer.forward_and_loss(x, BATCH.positions, BATCH, sparse)
    loss.sum().backward()
    got = {n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None}
    assert got and all(name.startswith("indexer.") for name in got)  # nothing else learns from it
    layer.zero_grad()
    exact = exact_loss(layer, x, mask)
    exact.sum().backward()
    assert (loss.double() - exact).abs().max() <= 1e-5
    for name, p in layer.named_parameters():
        if name in got:
            assert (got[name] - p.grad).abs().max() <= 1e-4 * p.grad.abs().max(), name
    assert not any(p.grad is None for n, p in layer.named_parameters() if n in got)
    assert out.shape == x.shape


def test_the_output_is_that_of_the_layer() -> None:
    layer, x = layer_of(), hidden(65)
    few = Batch.of([TOPK - 1] * 5 + [65 - 5 * (TOPK - 1)])
    plain = layer(x, few.positions, batch=few)
    out, _ = layer.forward_and_loss(x, few.positions, few)
    assert same_bits(out.detach(), plain.detach())
    trained = layer(x, BATCH.positions, batch=BATCH)  # masked: it has gradients
    out, _ = layer.forward_and_loss(x, BATCH.positions, BATCH, sparse=True)
    assert same_bits(out.detach(), trained.detach())


def test_a_layer_over_selected_keys_trains() -> None:
    """Masked where inference gathers rows: the same attention, and gradients of it."""
    layer, x = layer_of(), hidden(65).requires_grad_()
    out = layer(x, BATCH.positions, batch=BATCH)
    with torch.no_grad():
        sparse = layer(x, BATCH.positions, batch=BATCH)
    assert (out - sparse).abs().max() <= 1e-5
    out.square().sum().backward()
    missing = [n for n, p in layer.named_parameters() if p.grad is None]
    assert missing == [n for n, _ in layer.named_parameters() if n.startswith("indexer.")]
    assert bool(x.grad.any())


def test_lists_of_the_caller_train_as_well() -> None:
    layer, x = layer_of(), hidden(65)
    assert layer.indexer is not None
    lists = layer.indexer(x, layer.compress_queries(x), BATCH.positions, BATCH)
    own = layer(x, BATCH.positions, batch=BATCH)
    given = layer(x, BATCH.positions, batch=BATCH, indices=lists)
    assert same_bits(own.detach(), given.detach()) and given.requires_grad


def test_a_key_that_lists_name_twice_is_refused() -> None:
    """Gathered it would count twice, by bits once: a layer would serve what it did not train."""
    layer, x = layer_of(), hidden(65)
    lists = torch.full((65, 5), -1)
    lists[:, 0] = 0
    assert layer(x, BATCH.positions, batch=BATCH, indices=lists).requires_grad
    lists[7, 3] = 0
    said = "every key at most once in a line, got key 0 twice in line 7"
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients), pytest.raises(InvalidArgument, match=said):
            layer(x, BATCH.positions, batch=BATCH, indices=lists)


def test_bits_of_lists() -> None:
    indices = torch.tensor([[0, 39, -1], [39, 40, 2], *[[5, 5, 31]] * 38, *[[24, 1, 25]] * 25])
    bits = BATCH.selected_bits(indices)
    assert bits.shape == (65, 2)
    assert bits[0].tolist() == [1, 1 << 7] and bits[1].tolist() == [4, 1 << 7]
    assert bits[2].tolist() == [(1 << 5) - (1 << 31), 0]
    assert bits[64].tolist() == [2 + (1 << 24), 0]


def test_warm_up_brings_the_loss_down() -> None:
    layer, x = layer_of(), hidden(65)
    assert layer.indexer is not None
    layer.requires_grad_(False)
    layer.indexer.requires_grad_(True)
    optimizer = torch.optim.Adam(layer.indexer.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        _, loss = layer.forward_and_loss(x, BATCH.positions, BATCH)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        losses.append(loss.mean().item())
    assert losses[-1] < 0.7 * losses[0]


def test_a_layer_without_an_indexer_has_no_such_loss() -> None:
    layer = layer_of()
    layer.indexer = None
    with pytest.raises(Unsupported, match="in a layer that has none"):
        layer.forward_and_loss(hidden(5), torch.arange(5))
