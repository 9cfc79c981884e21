"""Pools with their tail, and candidate blocks, by their definitions."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
from torch import Tensor

from integrations.transformers.tiny import tiny
from openmla import InvalidArgument, select_topk
from openmla.compressor import compress_rows
from openmla.indexer import groups
from openmla.indexer.groups import expand_pools, select_blocks, select_in_blocks
from openmla.indexer.groups_reference import best_blocks, best_in_blocks, tokens_of_pools

BACKENDS = ("cpu", "reference")
KINDS = ("random", "coarse", "infinite", "nan", "equal")


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def drawn(kind: str, rows: int = 24, width: int = 77) -> tuple[Tensor, Tensor]:
    """Scores, and how many of them each row sees: none, one, … all."""
    g = torch.Generator().manual_seed(KINDS.index(kind))
    scores = torch.randn(rows, width, generator=g)
    if kind == "coarse":
        scores = scores.round()
    elif kind == "equal":
        scores.fill_(1.0)
    elif kind != "random":
        odd = torch.rand(rows, width, generator=g)
        scores[odd < 0.2] = torch.inf if kind == "infinite" else torch.nan
        scores[odd > 0.8] = -torch.inf
    return scores, torch.linspace(0, width, rows).int()


def listed(row: Tensor) -> list[int]:
    """What a row names; -1 stands behind it and nowhere else."""
    found = row.tolist()
    count = sum(x >= 0 for x in found)
    assert found[count:] == [-1] * (len(found) - count)
    return found[:count]


def test_examples() -> None:
    assert doctest.testmod(groups).failed == 0


@pytest.mark.parametrize("pool", [1, 2, 4, 16])
def test_pools_are_expanded_with_their_tail(pool: int) -> None:
    lengths = torch.arange(0, 70, dtype=torch.int32)
    scores = torch.randn(70, 70, generator=torch.Generator().manual_seed(pool))
    pools = select_topk(scores, 3, ends=lengths // pool)
    assert isinstance(pools, Tensor)
    got = expand_pools(pools, lengths, pool)
    assert got.dtype == torch.int32 and got.shape == (70, 4 * pool - 1)
    for row, which, length in zip(got, pools.tolist(), lengths.tolist(), strict=True):
        assert listed(row) == tokens_of_pools(which, length, pool)
        # As many as a query sees, until they are more than three pools and the tail.
        assert len(listed(row)) == (length if length // pool <= 3 else 3 * pool + length % pool)


def test_equals_the_indexer_of_transformers() -> None:
    """GLM-5.3-Flash: keys pooled by gates, scores of pools, the tail. The cut is at no equal
    scores: 16 heads."""
    model = tiny("glm5_next")
    indexer: Any = next(m for m in model.modules() if type(m).__name__ == "Glm5NextTextIndexer")
    torch.manual_seed(3)
    x, residual = torch.randn(1, 43, 64), torch.randn(1, 43, indexer.q_lora_rank)
    saved = {name: p.detach().clone() for name, p in indexer.named_parameters()}
    with torch.no_grad():
        indexer.index_kpool_compress_ape.normal_()
        indexer.index_kpool_compress_gate.normal_(std=0.2)
        expected = indexer(x, residual, torch.ones(1, 43, dtype=torch.bool), None)[0]
        pool, dim = indexer.index_kpool, indexer.head_dim
        keys = indexer.k_norm(indexer.wk(x[0]))[:40]
        gates = (x[0] @ indexer.index_kpool_compress_gate.T)[:40]
        bias = indexer.index_kpool_compress_ape
        pooled = compress_rows(keys, gates, bias, ratio=pool)
        q = indexer.wq_b(residual[0]).view(43, -1, dim)
        weights = indexer.weights_proj(x[0]) * (indexer.n_heads * dim) ** -0.5
        scores = torch.einsum("th,thp->tp", weights, (q @ pooled.T).relu())
        for name, p in indexer.named_parameters():
            p.copy_(saved[name])
    assert (pool, pooled.shape[0]) == (4, 10)
    lengths = torch.arange(1, 44, dtype=torch.int32)
    chosen = select_topk(scores.contiguous(), indexer.index_topk // pool, ends=lengths // pool)
    assert isinstance(chosen, Tensor)
    got = expand_pools(chosen, lengths, pool)
    assert got.shape == expected.shape
    for ours, theirs in zip(got, expected, strict=True):
        assert listed(ours) == sorted(t for t in theirs.tolist() if t >= 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_and_keys_inside_of_them(kind: str, backend: str) -> None:
    scores, ends = drawn(kind)
    blocks = select_blocks(scores, 4, block=8, ends=ends, backend=backend)
    others, _ = drawn("coarse")
    chosen = select_in_blocks(others, blocks, 6, block=8, ends=ends, backend=backend)
    for t, end in enumerate(ends.tolist()):
        expected = best_blocks(scores[t, :end].tolist(), 4, 8)
        assert listed(blocks[t]) == expected
        assert listed(chosen[t]) == best_in_blocks(others[t, :end].tolist(), expected, 6, 8)
        if end:
            assert (end - 1) // 8 in expected  # the newest, whatever it scores


def test_the_last_block_may_be_the_only_one() -> None:
    assert select_blocks(torch.tensor([[5.0, 1.0, 0.0]]), 1, block=1).tolist() == [[2]]


@pytest.mark.parametrize("kind", KINDS)
def test_enough_blocks_change_nothing(kind: str) -> None:
    scores, ends = drawn(kind)
    blocks = select_blocks(scores, 10, ends=ends)
    assert torch.equal(
        select_in_blocks(scores, blocks, 6, ends=ends), select_topk(scores, 6, ends=ends)
    )


def test_scores_outside_of_blocks_are_not_read() -> None:
    scores = torch.randn(1, 64)
    blocks = ints(1, 7).view(1, 2)
    expected = select_in_blocks(scores, blocks, 3)
    scores[:, :8], scores[:, 16:56] = torch.nan, torch.inf
    assert torch.equal(select_in_blocks(scores, blocks, 3), expected)


def test_nothing_to_select_from() -> None:
    none = torch.empty(2, 0)
    assert select_blocks(none, 3).tolist() == [[-1] * 3] * 2
    assert select_in_blocks(none, ints(-1, -1).view(2, 1), 2).tolist() == [[-1, -1]] * 2
    assert expand_pools(torch.empty(1, 0, dtype=torch.int32), ints(6), 4).tolist() == [[4, 5, -1]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: expand_pools(ints(1, 2), ints(1), 4), "pools: expected"),
        (lambda s: expand_pools(ints(1).view(1, 1), ints(1, 2), 4), "lengths: expected"),
        (lambda s: expand_pools(ints(1).view(1, 1), ints(4), 0), "pool: expected an int"),
        (lambda s: select_blocks(s.double(), 2), "scores: expected"),
        (lambda s: select_blocks(s, 0), "count: expected an int of at least 1"),
        (lambda s: select_blocks(s, 2, block=0), "block: expected an int of at least 1"),
        (lambda s: select_blocks(s, 2, ends=ints(1)), "ends: expected"),
        (lambda s: select_blocks(s.requires_grad_(), 2), "scores: expected no gradient"),
        (lambda s: select_in_blocks(s, ints(0, 1).view(1, 2), 2), "blocks: expected"),
        (lambda s: select_in_blocks(s, ints(0, 1).view(2, 1), 0), "topk: expected an int"),
    ],
)
def test_wrong_arguments(call: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        call(torch.zeros(2, 9))
