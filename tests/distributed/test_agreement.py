"""Ranks that disagree raise on every rank and can go on; a rank that is gone ends the call."""

from __future__ import annotations

import doctest

import pytest

from distributed import on_ranks
from distributed.ranks import Ranks
from openmla.distributed import agreement

# What the last rank does differently, and what every rank is told.
MISTAKES = {
    "lengths": "lengths: expected the same on every rank, got 5 for sequence 1 on rank 0, 6 on",
    "sequences": "lengths: expected the same on every rank, got 3 sequences on rank 0, 4 on",
    "cached": "cached: expected the same on every rank, got 0 for sequence 1 on rank 0, 1 on",
    "layout": "layout: expected the same on every rank, got zigzag on rank 0, contiguous on",
    "dtype": "dtype: expected the same on every rank, got torch.bfloat16 on rank 0, torch.float16",
    "width": "width: expected the same on every rank, got 512 + 64 on rank 0, 512 + 32 on",
    "format": "cache: expected the same on every rank, got fp8_656 on rank 0, fp8_block64 on",
    "call": "call: expected the same on every rank, got send_latent on rank 0, gather_latent on",
    "own rows": "latent: expected torch.bfloat16",
    "pages": "block_table: expected rows 0 to 47",
    "rank": "shard: expected that of rank",
}
ITS_OWN = ("own rows", "pages", "rank")
"""Mistakes that the rank finds by itself; the others are told by it."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_rank_is_told_and_the_group_lives_on(ranks: Ranks, mistake: str):
    told = ranks.run(on_ranks.errors, mistake)
    assert [kind for kind, _ in told] == ["InvalidArgument"] * ranks.world
    for rank, (_, said) in enumerate(told):
        assert MISTAKES[mistake] in said
        if mistake in ITS_OWN and rank < ranks.world - 1:
            assert said.startswith(f"rank {ranks.world - 1}: expected arguments that pass")
        elif mistake not in ITS_OWN:
            assert said.endswith(f"on rank {ranks.world - 1}")


def told_of_a_lost_peer(told: list[tuple[bool, tuple[str, str, float]]]) -> bool:
    for rank, (fine, (kind, said, seconds)) in enumerate(told):
        assert fine and kind == "PeerLost" and seconds < 30
        assert said.startswith(f"gather_latent on rank {rank} of 3: another rank has ended")
    return len(told) == 2


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_a_peer_that_is_late_ends_the_call_by_the_timeout(ranks: Ranks):
    *told, late = ranks.outcomes(on_ranks.outlived, "is late")
    assert late == (True, ("", "", 0.0)) and told_of_a_lost_peer(told)


def test_a_peer_that_dies_ends_the_call():
    with Ranks(3) as ranks:
        *told, dead = ranks.outcomes(on_ranks.outlived, "dies")
    assert dead == (False, "") and told_of_a_lost_peer(told)


def test_one_rank_asks_nobody():
    agreement.check_together("a call", None, 1, lambda: {"lengths": (1,)})


def test_examples_in_docstrings():
    assert doctest.testmod(agreement).failed == 0
