"""Where the rows of a query come from: `Listed` and `Span`, the sources of `mla_attend`; and how
its results are turned back, `TurnBack`.

A list names physical rows, one query at a time: what an indexer selected. A span is the positions
begin … end-1 of one request, found through its block table: a sliding window, all compressed rows
so far, the tokens of an image. No list is built for it.

    block_table[3] = [7, 2], pages of 4:     position  0  1  2  3 | 4  5  6  7
                                             row      28 29 30 31 | 8  9 10 11
    request[t] = 3, begin[t] = 2, end[t] = 6: query t sees rows 30, 31, 8, 9

What does not exist is ignored, since no launch waits for the values of these tensors: of a list,
negative entries, those past the rows and those at or past `lengths`; of a span, positions before 0
or past its table, those whose page is none of the pool's, and every position of a request that the
table does not have (-1 for padding).

Rows that are K and V at once have their last columns turned by their own positions, and a weighted
sum of them is turned likewise. `TurnBack` undoes that, for each query by its own position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openmla.cache import LatentCache


@dataclass(frozen=True, eq=False)
class Listed:
    """Rows that each query lists: what `mla_prefill_sparse` attends to."""

    rows: LatentCache | Tensor
    """A cache, or plain rows [rows, width]."""
    indices: Tensor
    """int32 [total_q, n], physical rows: page * page_size + offset in a cache."""
    lengths: Tensor | None = None
    """int32 [total_q]: how many entries of a list count."""

    @property
    def count(self) -> int:
        """Rows that an index may name."""
        return self.rows.rows if isinstance(self.rows, LatentCache) else self.rows.shape[0]

    @property
    def has_rows(self) -> bool:
        """Whether a query could see a row: there are rows, and entries that may name them."""
        return bool(self.count and self.indices.numel())

    @property
    def most(self) -> int:
        """The most rows that a query can see."""
        return self.indices.shape[1]

    def read(self, rows: Tensor) -> Tensor:
        """The values of physical rows, [len(rows), width]."""
        if isinstance(self.rows, LatentCache):
            return self.rows.read(rows)
        return self.rows.index_select(0, rows)

    def seen(self, token: int) -> Tensor:
        """The physical rows that count for a query, int64, in the order of its list."""
        listed = self.indices[token]
        if self.lengths is not None:
            listed = listed[: max(int(self.lengths[token]), 0)]
        return listed[(listed >= 0) & (listed < self.count)].long()


@dataclass(frozen=True, eq=False)
class Span:
    """Consecutive positions of a request's pages, its own range for each query."""

    cache: LatentCache
    block_table: Tensor
    """int32 [requests, pages]: the pages of each request."""
    request: Tensor
    """int32 [total_q]: which line of the table a query reads."""
    begin: Tensor
    """int32 [total_q]: the first position."""
    end: Tensor
    """int32 [total_q]: the position after the last."""

    @property
    def rows(self) -> LatentCache:
        """The cache, under the name that `Listed` has for it."""
        return self.cache

    @property
    def count(self) -> int:
        """Rows of the pool."""
        return self.cache.rows

    @property
    def has_rows(self) -> bool:
        """Whether a query could see a row: there are rows, and entries that may name them."""
        return bool(self.count and self.block_table.numel())

    @property
    def table_keys(self) -> int:
        """Positions that a line of the table can name."""
        return self.block_table.shape[1] * self.cache.page_size

    @property
    def most(self) -> int:
        """The most rows that a query can see; most spans are much shorter."""
        return self.table_keys

    def read(self, rows: Tensor) -> Tensor:
        """The values of physical rows, [len(rows), width]."""
        return self.cache.read(rows)

    def seen(self, token: int) -> Tensor:
        """The physical rows that count for a query, int64, in the order of their positions."""
        request, size = int(self.request[token]), self.cache.page_size
        if not 0 <= request < self.block_table.shape[0]:
            return torch.empty(0, dtype=torch.int64, device=self.request.device)
        begin = max(int(self.begin[token]), 0)
        end = min(int(self.end[token]), self.table_keys)
        keys = torch.arange(begin, max(begin, end), device=self.request.device)
        page = self.block_table[request][keys // size].long()
        there = (page >= 0) & (page < self.cache.num_pages)
        return (page * size + keys % size)[there]


Source = Listed | Span


@dataclass(frozen=True, eq=False)
class TurnBack:
    """Turns the last columns of every result back, by minus the angle of the query's position.

    With n columns and their pairs (a, b) = columns (0, 1), (2, 3), ... of them, pair i becomes

        a * cos_i + b * sin_i,  b * cos_i - a * sin_i

    in the sums as they are, before these are rounded to the type of the output. cos_i and sin_i are
    columns i and n/2 + i of the line of the table that the position names. A position that the
    table does not have means an angle of 0: no memory outside the table is read.

    >>> quarter = TurnBack(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([1, 0, 7]))
    >>> quarter.cos_sin(slice(0, 3))[1].flatten().tolist()
    [1.0, 0.0, 0.0]
    """

    table: Tensor
    """fp32 [positions, n]: cosines of n/2 pairs, then their sines, what engines call cos_sin_cache;
    n is the number of columns that turn."""
    positions: Tensor
    """int32 or int64 [total_q]: the line of the table that each query turns by."""

    @property
    def columns(self) -> int:
        """How many columns turn."""
        return self.table.shape[1]

    def cos_sin(self, tokens: slice) -> tuple[Tensor, Tensor]:
        """Cosines and sines of some queries' pairs, [tokens, columns / 2] each."""
        position = self.positions[tokens].long()
        there = (position >= 0) & (position < self.table.shape[0])
        half = self.columns // 2
        lines = self.table.new_zeros(position.shape[0], self.columns)
        lines[:, :half] = 1.0
        lines[there] = self.table[position[there]]
        return lines[:, :half], lines[:, half:]
