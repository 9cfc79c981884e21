"""`split`: every token once, even shares, two waves. Whole worlds simulated in one process."""

from __future__ import annotations

import doctest
import random

import pytest
import torch

from openmla import InvalidArgument
from openmla.distributed import ContextShard, indexes, shard, split

BATCHES = 1000
MOST_WORK = 1.05
"""Busiest rank over the mean, where a rank has 64 tokens of a sequence or more."""


def drawn(number: int) -> ContextShard:
    """A batch with sequences shorter than the world, none, some that are cached, and long ones."""
    rng = random.Random(number)
    world = round(2 ** rng.uniform(1, 10))
    long = number % 2 == 0
    lengths = []
    for _ in range(rng.randint(1, 4)):
        at_least_64 = 64 * world + rng.choice(
            [0, 1, rng.randrange(2 * world), 10 ** rng.randrange(6)]
        )
        short = rng.choice([0, 1, 2, rng.randrange(world), rng.randrange(5 * world)])
        lengths.append(at_least_64 if long else short)
    cached = [rng.choice([0, 0, 1, 10**5]) for _ in lengths]
    layout = "contiguous" if number % 5 == 4 else "zigzag"
    return split(lengths, world, 0, layout, cached=cached)


def test_random_batches_on_2_to_1024_ranks():
    balanced = 0
    for number in range(BATCHES):
        batch = drawn(number)
        everyone = [batch.at(rank) for rank in range(batch.world)]
        found = sorted(part for one in everyone for part in one.parts)
        # Every token once: the parts of a sequence join without a gap.
        for sequence, length in enumerate(batch.lengths):
            ends = [0, *(part.end for part in found if part.sequence == sequence)]
            starts = [part.start for part in found if part.sequence == sequence]
            assert [*starts, length] == ends, (number, sequence)
        assert all(p.keys == batch.cached[p.sequence] + p.end for p in found)
        # Shares of tokens: as even as can be, so the padding of a collective is one row at most.
        tokens = [sum(part.tokens for part in one.parts) for one in everyone]
        assert tuple(tokens) == batch.counts and max(tokens) - min(tokens) <= 1
        work = [one.pairs() for one in everyone]
        assert sum(work) == batch.total_pairs()
        if batch.layout == "zigzag" and number % 2 == 0:
            balanced += 1
            assert max(work) * batch.world <= MOST_WORK * sum(work), (number, batch.world)
            # The dear pieces, all that a second collective carries, are the same on all ranks.
            assert len({one.wave_tokens[1] for one in everyone}) == 1
    assert balanced > BATCHES / 4


def test_work_by_hand():
    zigzag, contiguous = (split([16], 4, 0, layout) for layout in ("zigzag", "contiguous"))
    assert [zigzag.at(r).pairs() for r in range(4)] == [34] * 4 and zigzag.balance() == 1
    assert [contiguous.at(r).pairs() for r in range(4)] == [10, 26, 42, 58]
    assert contiguous.balance() == 58 / 34
    # With 100 cached keys every query sees 100 more.
    assert split([16], 4, 2, cached=[100]).pairs() == 34 + 4 * 100


def test_a_query_of_the_first_wave_sees_only_rows_of_the_first_wave():
    batch = split([40, 9, 2], 3, 0)
    first = {t for r in range(3) for t in tokens_of(batch.at(r).waves[0])}
    for rank in range(3):
        for part in batch.at(rank).waves[0]:
            assert {(part.sequence, i) for i in range(part.end)} <= first


def tokens_of(parts: tuple[shard.Part, ...]) -> set[tuple[int, int]]:
    return {(part.sequence, i) for part in parts for i in range(part.start, part.end)}


def test_rows_and_positions():
    batch = split([5, 0, 4], 2, 1, cached=[0, 7, 10])
    starts = {0: 0, 2: 5}
    want = [
        (starts[p.sequence] + i, p.keys - p.end + i)
        for p in batch.parts
        for i in range(p.start, p.end)
    ]
    assert batch.rows().tolist() == [row for row, _ in want]
    assert batch.positions().tolist() == [position for _, position in want]
    assert sorted(batch.rows().tolist() + batch.at(0).rows().tolist()) == list(range(9))


def test_one_rank_keeps_the_order_of_the_batch():
    assert split([5, 3], 1, 0).rows().tolist() == list(range(8))


def test_shards_of_one_batch_arrive_where_they_belong():
    """What the ranks of a world of 7 would send, put together by the index tensors."""
    batch, device = split([20, 1, 0, 33], 7, 0), torch.device("cpu")
    sources = [batch.at(rank).rows() for rank in range(7)]
    for wave in (None, 0, 1):
        due = [indexes.arrival(batch.at(rank), wave, device) for rank in range(7)]
        most = due[0].most
        sent = torch.full((7, most), -1)
        for rank, (source, one) in enumerate(zip(sources, due, strict=True)):
            local = source[one.local]
            sent[rank, : len(local)] = local
        got = sent.flatten() if due[0].places is None else sent.flatten()[due[0].places]
        assert got.tolist() == due[0].rows.tolist()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("world", ([4], 0, 0)),
        ("world", ([4], 2.0, 0)),
        ("rank", ([4], 2, 2)),
        ("rank", ([4], 2, True)),
        ("layout", ([4], 2, 0, "ring")),
        ("lengths", ([4, -1], 2, 0)),
        ("lengths", (torch.tensor([4]), 2, 0)),
        ("lengths", (4, 2, 0)),
    ],
)
def test_wrong_arguments_are_named(name: str, arguments: tuple):
    with pytest.raises(InvalidArgument) as raised:
        split(*arguments)
    assert raised.value.name == name


def test_a_prefix_for_every_sequence():
    with pytest.raises(InvalidArgument, match="cached: expected 2 entries"):
        split([4, 5], 2, 0, cached=[3])


def test_examples_in_docstrings():
    assert doctest.testmod(shard).failed == 0 and doctest.testmod(shard).attempted > 5
