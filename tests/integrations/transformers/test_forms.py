"""The parts of the forms: projection from either side, and lists of selected keys."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from openmla.errors import Unsupported
from openmla.integrations.transformers.forms import Heads, unique, visible

HEADS, NOPE, ROPE, V, LATENT = 3, 4, 2, 5, 8


def heads(projection: nn.Module | None = None) -> Heads:
    return Heads(NOPE, V, projection or nn.Linear(LATENT, HEADS * (NOPE + V), bias=False))


@torch.no_grad()
def test_absorbed_queries_score_rows_as_queries_score_keys():
    layer = heads()
    query, latent = torch.randn(2, HEADS, 7, NOPE + ROPE), torch.randn(2, 1, 6, LATENT)
    k_nope = layer.expand(latent.flatten(0, 2))[0].unflatten(0, (2, 6))
    expected = torch.einsum("bhsn,bthn->bhst", query[..., :NOPE], k_nope)
    absorbed = layer.absorb(query)
    got = torch.einsum("bshl,btl->bhst", absorbed[..., :LATENT], latent[:, 0])
    assert torch.allclose(got, expected, atol=1e-6)
    assert torch.equal(absorbed[..., LATENT:], query[..., NOPE:].transpose(1, 2))


@torch.no_grad()
def test_released_sums_of_rows_are_sums_of_values():
    layer = heads()
    weights, latent = torch.rand(2, HEADS, 7, 6), torch.randn(2, 1, 6, LATENT)
    v = layer.expand(latent.flatten(0, 2))[1].unflatten(0, (2, 6))
    expected = torch.einsum("bhst,bthv->bshv", weights, v)
    got = layer.release(torch.einsum("bhst,btl->bshl", weights, latent[:, 0]))
    assert torch.allclose(got, expected, atol=1e-6)


def test_a_biased_projection_cannot_move_to_the_queries():
    layer = heads(nn.Linear(LATENT, HEADS * (NOPE + V)))
    with pytest.raises(Unsupported, match="kv_b_proj has a bias"):
        layer.absorb(torch.randn(1, HEADS, 1, NOPE + ROPE))


def test_visible_drops_what_the_mask_hides():
    mask = torch.ones(3, 3, dtype=torch.bool).tril()[None, None]
    indices = torch.tensor([[[2, 0], [1, 2], [2, 0]]], dtype=torch.int32)
    assert visible(indices, mask).tolist() == [[[-1, 0], [1, -1], [2, 0]]]


def test_unique_keeps_one_of_equals():
    rows = unique(torch.tensor([[[3, 1, 3, -1, 1, 3]]]))
    assert sorted(rows.flatten().tolist()) == [-1, -1, -1, -1, 1, 3]
