"""Spans of a drawn call of `mla_attend`: which request each query reads, from where to where.

They crowd what spans may do: begin with a page, end with one, be empty, be all of a request. Mixed
ones also begin before the first position, end past the table, run backwards, and name requests that
the table does not have and pages that the pool does not have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.lab.testing.case import CaseSource
from openmla.lab.testing.values import Draw

MOST_REQUESTS = 3
"""Lines of a table at most."""
LEAST_INT, MOST_INT = -(2**31), 2**31 - 1
STRANGE = 0.3
"""Share of mixed spans that are not plain, and of mixed pages that do not exist."""


class SpanDraw:
    """The table and the spans of one source: `lines` requests of `across` pages each."""

    def __init__(self, draw: Draw, source: CaseSource, lines: int, across: int) -> None:
        self.draw, self.source, self.lines, self.across = draw, source, lines, across
        self.keys = across * source.page_size
        """Positions that a line of the table can name."""

    def pages(self, pool: int) -> Tensor:
        """int64 [lines, across]: pages in any order, of which some are shared or do not exist."""
        shape, kind = (self.lines, self.across), self.source.index_kind
        count = self.lines * self.across
        if kind == "duplicates":
            return self.draw.integers(0, max(pool, 1), *shape)
        pages = self.draw.permutation(pool)[:count].view(shape)
        if kind != "mixed":
            return pages
        # The last one is 0 in 32 bits, once it is multiplied by the rows of a page.
        wraps = min(2**32 // self.source.page_size, MOST_INT)
        wrong = torch.tensor([-1, pool, LEAST_INT, MOST_INT, wraps], device="cpu")
        wrong = wrong[self.draw.integers(0, len(wrong), *shape)]
        kept = self.draw.integers(0, 100, *shape) >= 100 * STRANGE
        return torch.where(kept, pages, wrong)

    def spans(self, tokens: int) -> tuple[list[int], list[int], list[int]]:
        """Request, begin and end of each query."""
        found = [self._strange() if self._is_strange() else self._plain() for _ in range(tokens)]
        request, begin, end = ([span[i] for span in found] for i in range(3))
        return request, begin, end

    def _is_strange(self) -> bool:
        share = {"mixed": STRANGE, "invalid": 1.0}.get(self.source.index_kind, 0.0)
        return self._below(100) < 100 * share

    def _plain(self) -> tuple[int, int, int]:
        """Positions that have pages: as many as a span may have, one less, none, or any number; at
        the beginning, at the end, from the beginning of a page, or anywhere."""
        rows, size = self.source.rows, self.source.page_size
        most = min(self.source.topk, rows)
        length = (most, most, max(most - 1, 0), 0, self._below(most + 1))[self._below(5)]
        last = rows - length
        anywhere = self._below(last + 1)
        begin = (0, last, anywhere // size * size, anywhere, anywhere)[self._below(5)]
        return self._below(self.lines), begin, begin + length

    def _strange(self) -> tuple[int, int, int]:
        """What shows nothing of a request, or no more of it than exists. Of an invalid source,
        nothing."""
        line, begin, end = self._plain()
        nothing = (
            (-1, begin, end),
            (self.lines, begin, end),
            (MOST_INT, LEAST_INT, MOST_INT),
            (LEAST_INT, begin, end),
            (line, begin + 1, begin - self._below(3)),
            (line, MOST_INT, LEAST_INT),
            (line, LEAST_INT, -self._below(2)),
            (line, self.keys + self._below(2), MOST_INT),
        )
        length = min(end - begin, self.keys)
        cut = (
            (line, -1 - self._below(5), length),
            (line, LEAST_INT, length),
            (line, self.keys - length, MOST_INT),
            (line, self.keys - length, self.keys + 1),
        )
        choices = nothing if self.source.index_kind == "invalid" else (*nothing, *cut, *cut)
        return choices[self._below(len(choices))]

    def _below(self, n: int) -> int:
        return int(self.draw.integers(0, n))
