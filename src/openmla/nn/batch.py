"""`Batch`: which sequences a forward pass is about, and where their keys lie in the cache.

Lengths are ints on the host, because choices are made by them; what kernels read is on the device.
One batch serves every layer of a forward pass.

>>> batch = Batch.of(new=[2, 1], context=[0, 3])        # a fresh prompt, and one token after three
>>> batch.positions.tolist(), batch.cu_seqlens.tolist(), batch.cache_lengths.tolist()
([0, 1, 3], [0, 2, 3], [2, 4])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, overload

import torch
from torch import Tensor

from openmla import checks
from openmla.errors import InvalidArgument
from openmla.kept import kept

MOST_KEPT = 64
"""Tensors of lengths: a few of every batch in flight."""


class _MadeOnce:
    """A property whose value a batch keeps: functools.cached_property without its lock, which
    torch.compile does not enter (Python 3.11 has one)."""

    def __init__(self, make: Callable[[Batch], Tensor]) -> None:
        self.make, self.name, self.__doc__ = make, make.__name__, make.__doc__

    @overload
    def __get__(self, batch: None, owner: Any) -> _MadeOnce: ...
    @overload
    def __get__(self, batch: Batch, owner: Any) -> Tensor: ...
    def __get__(self, batch: Batch | None, owner: Any) -> _MadeOnce | Tensor:
        if batch is None:
            return self
        made = batch.__dict__[self.name] = self.make(batch)
        return made


@kept(MOST_KEPT)
def integers(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[n] of a device: one tensor for all who ask for these numbers, who only read it."""
    return torch.tensor(values, dtype=dtype, device=device)


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences with new tokens, some of them after a context that the cache holds.

    Batches of equal lengths share tensors: nobody may write to them. So a batch like an earlier one
    is made without a copy from the host, also while a graph is captured.
    """

    new: tuple[int, ...]
    """New tokens of each sequence."""
    context: tuple[int, ...]
    """Keys of each sequence before its new tokens."""
    cu_seqlens: Tensor
    """int32 [sequences + 1]: where each sequence's new tokens begin among all."""
    block_table: Tensor | None
    """int32 [sequences, max_pages]: the pages of each sequence, its new tokens' included."""

    @staticmethod
    def of(
        new: Sequence[int],
        context: Sequence[int] | None = None,
        block_table: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> Batch:
        """A batch from lengths.

        Args:
            new: ints, the new tokens of each sequence.
            context: ints, the keys of each sequence before its new tokens; 0 each if None.
            block_table: int32 [sequences, max_pages], the pages of each sequence, its new tokens'
                included; None without a cache.
            device: where the batch's tensors are made; with a block_table, they are made where it
                is.

        Raises:
            InvalidArgument: a length is no count, or the arguments differ in their sequences.
        """
        before = tuple(context) if context is not None else (0,) * len(new)
        if len(before) != len(new):
            raise InvalidArgument("context", f"{len(new)} lengths, as new has", len(before))
        for name, lengths in (("new", new), ("context", before)):
            if any(type(n) is not int or n < 0 for n in lengths):
                raise InvalidArgument(name, "ints of at least 0", list(lengths))
        if block_table is not None:
            shape = (len(new), "max_pages")
            checks.tensor("block_table", block_table, shape, (torch.int32, torch.int64))
            device = block_table.device
        here = torch.empty(0, device=device).device  # with its number, where a name has none
        return Batch(tuple(new), before, _cumulative(new, here), block_table)

    @property
    def tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(self.new)

    @property
    def keys(self) -> tuple[int, ...]:
        """Keys of each sequence, new ones included."""
        return tuple(n + c for n, c in zip(self.new, self.context, strict=True))

    @_MadeOnce
    def cache_lengths(self) -> Tensor:
        """`keys` as int32 [sequences]."""
        return integers(self.keys, torch.int32, self.cu_seqlens.device)

    @_MadeOnce
    def positions(self) -> Tensor:
        """int64 [tokens]: each new token's place in its sequence."""
        return self.span(self.context, self.keys)[1]

    @_MadeOnce
    def sequences(self) -> Tensor:
        """int64 [tokens]: the sequence each new token belongs to."""
        return self.span(self.context, self.keys)[0]

    def slots(self, page_size: int) -> Tensor:
        """int64 [tokens]: the physical row of each new token.

        Args:
            page_size: rows per page of the cache.

        Raises:
            InvalidArgument: the batch has no block_table, or one without pages for all keys.
        """
        return self._physical(self.sequences, self.positions, page_size)

    def context_rows(self, start: int, stop: int, page_size: int) -> tuple[Tensor, Tensor]:
        """Physical rows of contexts' keys start to stop, and their cu_seqlens int32.

        Args:
            start: the first key, counted from the sequence's first.
            stop: the key after the last; a context that is shorter gives what it has.
            page_size: rows per page of the cache.

        Raises:
            InvalidArgument: the batch has no block_table, or one without pages for all keys.
        """
        return self._rows(self.context, start, stop, page_size)

    def key_rows(self, start: int, stop: int, page_size: int) -> tuple[Tensor, Tensor]:
        """Physical rows of all keys start to stop, new ones too, and their cu_seqlens int32.

        Args:
            start: the first key, counted from the sequence's first.
            stop: the key after the last; a sequence that is shorter gives what it has.
            page_size: rows per page of the cache.

        Raises:
            InvalidArgument: the batch has no block_table, or one without pages for all keys.
        """
        return self._rows(self.keys, start, stop, page_size)

    def _rows(
        self, ends: Sequence[int], start: int, stop: int, page_size: int
    ) -> tuple[Tensor, Tensor]:
        first = [min(start, end) for end in ends]
        last = [min(stop, end) for end in ends]
        lengths = [b - a for a, b in zip(first, last, strict=True)]
        rows = self._physical(*self.span(first, last), page_size)
        return rows, _cumulative(lengths, self.cu_seqlens.device)

    def selected_rows(self, indices: Tensor, page_size: int | None) -> Tensor:
        """int32 [tokens, topk]: physical rows of keys named by their place in the sequence.

        Without pages, rows of the new tokens themselves. An index outside the sequence, or of a key
        after the query, names none.

        Args:
            indices: int [tokens, topk], places in the query's own sequence; -1 for none.
            page_size: rows per page of the cache; None without pages.

        Raises:
            InvalidArgument: a page_size is given, and the batch has no block_table, or one without
                pages for all keys.
        """
        inside = (indices >= 0) & (indices <= self.positions[:, None])
        places = torch.where(inside, indices, 0).long()
        if page_size is None:
            rows = places + self.cu_seqlens[self.sequences, None]
        else:
            rows = self._physical(self.sequences[:, None], places, page_size)
        return torch.where(inside, rows, -1).to(torch.int32)

    def selected_bits(self, indices: Tensor) -> Tensor:
        """int32 [tokens, words], as mla_prefill's key_mask: the same keys as bits of 32 to a word.

        A bit cannot say how often a key is named.

        Args:
            indices: int [tokens, topk], places in the query's own sequence; one outside of it
                counts not.

        >>> Batch.of([2]).selected_bits(torch.tensor([[0, -1], [1, 0]])).tolist()
        [[1], [3]]
        """
        words = -(-max(self.keys, default=0) // 32)
        inside = (indices >= 0) & (indices < self.cache_lengths[self.sequences, None])
        places = torch.where(inside, indices, 32 * words).long()
        flags = places.new_zeros(len(indices), 32 * words + 1, dtype=torch.int32)
        flags = flags.scatter_(1, places, 1)[:, :-1].view(len(indices), words, 32)
        shifts = torch.arange(32, dtype=torch.int32, device=flags.device)
        return (flags << shifts).sum(-1, dtype=torch.int32)

    def span(self, first: Sequence[int], last: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The (sequence, place), int64, of places first[i] … last[i]-1 of each sequence i.

        Args:
            first: ints, the first place of each sequence.
            last: ints, the place after the last.
        """
        device = self.cu_seqlens.device
        lengths = tuple(b - a for a, b in zip(first, last, strict=True))
        total = sum(lengths)
        counts = integers(lengths, torch.int64, device)
        sequence = torch.repeat_interleave(counts, output_size=total)
        ends = accumulate(lengths)
        starts = tuple(b - end for b, end in zip(last, ends, strict=True))
        offset = integers(starts, torch.int64, device)
        return sequence, torch.arange(total, device=device) + offset[sequence]

    def _physical(self, sequence: Tensor, place: Tensor, page_size: int) -> Tensor:
        if self.block_table is None:
            raise InvalidArgument("block_table", "the pages of each sequence in the cache", None)
        require_pages("block_table", self.block_table, page_size, self.keys)
        page = self.block_table[sequence, place // page_size].long()
        return page * page_size + place % page_size


def require_pages(name: str, table: Tensor, page_size: int, lengths: Sequence[int]) -> None:
    """Refuse a table that is too narrow: looking past its lines would end a GPU's process.

    Args:
        name: what the caller calls the table.
        table: [sequences, max_pages].
        page_size: rows per page.
        lengths: rows of each sequence.

    Raises:
        InvalidArgument: a sequence has more rows than a line of the table has places for.
    """
    longest = max(lengths, default=0)
    if table.shape[1] * page_size < longest:
        expected = f"pages for {longest} keys, of {page_size} rows each"
        raise InvalidArgument(name, expected, f"{table.shape[1]} pages")


def _cumulative(lengths: Sequence[int], device: torch.device) -> Tensor:
    return integers((0, *accumulate(lengths)), torch.int32, device)
