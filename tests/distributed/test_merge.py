"""Pools sharded over ranks: parts merge to the whole, with the same bits on every rank."""

from __future__ import annotations

import doctest

import pytest
import torch

from distributed import on_ranks
from distributed.on_ranks import Batch
from distributed.ranks import Ranks
from distributed.test_attention import truth_of
from openmla import InvalidArgument, reference
from openmla.distributed import local_indices, merge, merge_over_ranks
from openmla.lab.testing.build import Outcome
from openmla.lab.testing.compare import compare


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sharded_pool_gives_the_same_as_a_whole_one(ranks: Ranks, dtype: torch.dtype):
    batch = Batch(dtype=dtype)
    found = ranks.run(on_ranks.merged, batch)
    outs, lses, whole, states = zip(*found, strict=True)
    assert all(x.equal(whole[0]) for x in whole) and all(x.equal(states[0]) for x in states)
    truth = truth_of("sparse", batch, {})
    if dtype == torch.float32:
        verdict = compare(Outcome(whole[0], states[0]), truth, columns=576)
        assert verdict.ok, verdict.report()
    # One rounding after the parts were made, however many they are.
    exact, _ = reference.merge(list(outs), list(lses))
    error, half_unit = (whole[0].double() - exact).abs(), torch.finfo(dtype).eps / 2
    assert bool((error <= half_unit * exact.abs() + 1e-6).all())
    assert whole[0][5].eq(0).all() and states[0][5].eq(-torch.inf).all()


def test_no_queries(ranks: Ranks):
    for out, lse in ranks.run(on_ranks.no_queries_merged):
        assert out.shape == (0, 2, 4) and lse.shape == (0, 2)


def test_one_rank_alone_keeps_its_part():
    out, lse = torch.randn(3, 2, 4), torch.randn(3, 2)
    got = merge_over_ranks(out, lse)
    assert got[0].equal(out) and got[1].equal(lse)


def test_lists_are_cut_to_the_rows_of_a_shard():
    lists = torch.tensor([[0, 3, 4, 9], [-1, 8, 7, 2**31 - 1]], dtype=torch.int32)
    got = local_indices(lists, 3, 8)
    assert got.tolist() == [[-1, 0, 1, -1], [-1, -1, 4, -1]] and got.dtype == torch.int32
    with pytest.raises(InvalidArgument, match="first <= last"):
        local_indices(lists, 8, 3)


def test_examples_in_docstrings():
    assert doctest.testmod(merge).failed == 0
