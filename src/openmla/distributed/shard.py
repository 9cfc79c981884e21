"""`split`: which tokens of a batch each rank has. Integers only; no process group is needed.

Zigzag. A causal query costs as many keys as it sees, so a rank that has the end of a sequence works
longer than one that has its beginning. Cut into 2 * world pieces, rank r takes pieces r and
2 * world - 1 - r, one that is cheap and one that is dear. 16 tokens on 4 ranks:

    token   0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15
    rank    0  0  1  1  2  2  3  3  3  3  2  2  1  1  0  0

>>> shard = split([16], world=4, rank=1)
>>> [(part.start, part.end) for part in shard.parts], shard.rows().tolist()
([(2, 4), (12, 14)], [2, 3, 12, 13])
>>> [shard.at(rank).pairs() for rank in range(4)]
[34, 34, 34, 34]
>>> [split([16], 4, rank, "contiguous").pairs() for rank in range(4)]
[10, 26, 42, 58]

What does not divide evenly goes one token each to the ranks whose turn it is, and the next sequence
goes on where the last one stopped. So the ranks of a whole batch differ by one token at most, also
where every sequence is shorter than the world:

>>> split([1, 1, 0, 1, 2, 1, 1], world=4, rank=0).counts
(2, 2, 2, 1)

Local order. The cheap pieces of all sequences come first, then the dear ones: two waves. A query of
the first wave sees only keys of the first wave, so it can be computed while the second is still on
its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from openmla.errors import InvalidArgument

Layout = Literal["zigzag", "contiguous"]
LAYOUTS = get_args(Layout)


class Part(NamedTuple):
    """Consecutive new tokens start … end-1 of one sequence."""

    sequence: int
    """Which sequence of the batch."""
    start: int
    """Its first new token, counted from the sequence's first new one."""
    end: int
    """The token after its last."""
    keys: int
    """Keys that its last query sees: the cached prefix, and `end` new ones."""

    @property
    def tokens(self) -> int:
        """Queries of the part."""
        return self.end - self.start

    def pairs(self) -> int:
        """(query, key) pairs under the causal mask."""
        before = self.keys - self.tokens
        return (self.keys * (self.keys + 1) - before * (before + 1)) // 2


@dataclass(frozen=True)
class ContextShard:
    """One rank's share of a batch. `split` makes it; it can be compared and hashed."""

    lengths: tuple[int, ...]
    """New tokens of every sequence."""
    cached: tuple[int, ...]
    """Keys of every sequence that a cache holds already, before its new tokens."""
    world: int
    """Ranks that share the batch."""
    rank: int
    """Which of them this is."""
    layout: Layout
    """How sequences are cut: zigzag or contiguous."""

    def at(self, rank: int) -> ContextShard:
        """The share of another rank of the same batch.

        Args:
            rank: which rank, from 0 to world - 1.

        Raises:
            InvalidArgument: there is no such rank.
        """
        _check_int("rank", rank, 0, self.world - 1)
        return replace(self, rank=rank)

    @cached_property
    def waves(self) -> tuple[tuple[Part, ...], ...]:
        """The parts in local order: two waves in zigzag, one when contiguous or alone."""
        zigzag = self.layout == "zigzag" and self.world > 1
        pieces = (self.rank, 2 * self.world - 1 - self.rank) if zigzag else (self.rank,)
        waves: list[list[Part]] = [[] for _ in pieces]
        turn = 0
        for sequence, (length, cached) in enumerate(zip(self.lengths, self.cached, strict=True)):
            cut = _Cut(length, self.world, self.world * len(pieces), turn)
            for wave, piece in zip(waves, pieces, strict=True):
                start, end = cut.start(piece), cut.start(piece + 1)
                if start < end:
                    wave.append(Part(sequence, start, end, cached + end))
            turn = cut.next_turn
        return tuple(map(tuple, waves))

    @property
    def parts(self) -> tuple[Part, ...]:
        """This rank's parts, in the order of its tokens."""
        return tuple(part for wave in self.waves for part in wave)

    @property
    def counts(self) -> tuple[int, ...]:
        """Tokens of every rank: as even as can be."""
        each, more = divmod(sum(self.lengths), self.world)
        return tuple(each + (rank < more) for rank in range(self.world))

    @property
    def tokens(self) -> int:
        """Tokens of this rank."""
        return self.counts[self.rank]

    @property
    def wave_tokens(self) -> tuple[int, ...]:
        """Tokens of this rank, wave by wave."""
        return tuple(sum(part.tokens for part in wave) for wave in self.waves)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each sequence begins in the batch, and where the last one ends."""
        found = [0]
        for length in self.lengths:
            found.append(found[-1] + length)
        return tuple(found)

    def rows(self) -> Tensor:
        """This rank's tokens as rows of the batch, int64: local = batch[shard.rows()]."""
        starts = [self.offsets[part.sequence] + part.start for part in self.parts]
        return ranges(starts, [part.tokens for part in self.parts])

    def positions(self) -> Tensor:
        """Where this rank's tokens sit in their sequences, cached prefix included: for rope."""
        starts = [part.keys - part.tokens for part in self.parts]
        return ranges(starts, [part.tokens for part in self.parts])

    def pairs(self) -> int:
        """Causal (query, key) pairs of this rank: its share of the work."""
        return sum(part.pairs() for part in self.parts)

    def total_pairs(self) -> int:
        """Causal pairs of all ranks together."""
        whole = zip(self.lengths, self.cached, strict=True)
        return sum(Part(0, 0, length, cached + length).pairs() for length, cached in whole)

    def balance(self) -> float:
        """Work of the busiest rank over that of the mean rank; 1 is perfect."""
        most = max(self.at(rank).pairs() for rank in range(self.world))
        return most * self.world / max(self.total_pairs(), 1)


def split(
    lengths: Sequence[int],
    world: int,
    rank: int,
    layout: Layout = "zigzag",
    *,
    cached: Sequence[int] | None = None,
) -> ContextShard:
    """The share of one rank of a batch. Every rank makes the same call with its own `rank`.

    Args:
        lengths: a list of ints, the new tokens of every sequence.
        world: how many ranks share the batch.
        rank: which of them this is, from 0 to world - 1.
        layout: "zigzag" gives every rank a cheap and a dear piece of each sequence; "contiguous"
            one piece, so that ranks with the ends of sequences work longer.
        cached: a list of ints, how many keys of every sequence a cache holds already, on every
            rank: a prefix that was computed before. None: no sequence has one.

    Raises:
        InvalidArgument: a number is out of range, a list is none, or there is no such layout.
    """
    _check_int("world", world, 1)
    _check_int("rank", rank, 0, world - 1)
    if layout not in LAYOUTS:
        raise InvalidArgument("layout", "one of " + ", ".join(LAYOUTS), repr(layout))
    new = _check_counts("lengths", lengths)
    old = (0,) * len(new) if cached is None else _check_counts("cached", cached)
    if len(old) != len(new):
        raise InvalidArgument("cached", f"{len(new)} entries, as lengths has", len(old))
    return ContextShard(new, old, world, rank, layout)


class _Cut(NamedTuple):
    """One sequence in pieces that differ by one or two tokens.

    All pieces have length // pieces tokens. Of the rest, a whole round goes to the dear pieces (so
    every rank gets one), and what is left of it to the cheap pieces of the ranks whose turn it is.
    """

    length: int
    world: int
    pieces: int
    turn: int

    @property
    def next_turn(self) -> int:
        """The first rank that has not had its turn."""
        return (self.turn + self.length) % self.world

    def start(self, piece: int) -> int:
        """First token of a piece."""
        each, rest = divmod(self.length, self.pieces)
        round_of_all, few = divmod(rest, self.world)
        cheap, last = min(piece, self.world), self.turn + few
        # The turns are turn … last-1, counted round the world.
        had_turns = max(0, min(cheap, last) - self.turn) + max(0, min(cheap, last - self.world))
        return each * piece + had_turns + round_of_all * (piece - cheap)


def ranges(starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Consecutive integers, `sizes[i]` of them from `starts[i]` on, one run after the other.

    >>> ranges([5, 0], [2, 3]).tolist()
    [5, 6, 0, 1, 2]
    """
    first, size = (torch.tensor(x, dtype=torch.int64, device="cpu") for x in (starts, sizes))
    before = size.cumsum(0) - size
    total = torch.arange(int(size.sum()), dtype=torch.int64, device="cpu")
    return total + torch.repeat_interleave(first - before, size)


def _check_int(name: str, value: object, least: int, most: int | None = None) -> None:
    wanted = f"an int of at least {least}" if most is None else f"an int from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(name, wanted, repr(value))
    if value < least or (most is not None and value > most):
        raise InvalidArgument(name, wanted, value)


def _check_counts(name: str, values: object) -> tuple[int, ...]:
    if isinstance(values, Tensor) or not isinstance(values, Sequence):
        raise InvalidArgument(name, "a list of ints, one per sequence", type(values).__name__)
    for value in values:
        _check_int(name, value, 0)
    return tuple(values)
