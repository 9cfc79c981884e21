"""The tensors of one step of the indexer, checked and bundled, as kernels receive them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from openmla.indexer.cache import IndexCache
from openmla.indexer.problem import IndexProblem
from openmla.operands import aligned_16

if TYPE_CHECKING:
    from openmla.kernels.call import Call

Keys = IndexCache | tuple[Tensor, Tensor]
"""A paged cache; or contiguous values e4m3 [keys, 128] with their scales fp32 [keys]."""


SCORES_STEP = 4
"""Rows of scores begin at multiples of so many elements, 16 bytes."""


@dataclass(frozen=True, eq=False)
class Requests:
    """What windows over a paged cache follow from."""

    cu_seqlens_q: Tensor
    cache_lengths: Tensor
    first: int = 0
    """Number of the first query in cu_seqlens_q."""
    least: int = 0
    """Windows of at most so many keys count as empty."""


@dataclass(frozen=True, eq=False)
class Windows:
    """Which columns a query sees: start … end - 1. int32 [total_q] each.

    A window is clipped to the columns there are; one that ends before it starts is empty.
    """

    starts: Tensor
    ends: Tensor
    sequences: Tensor | None = None
    """The line of the block table that a query's keys are in."""
    longest: Tensor | None = None
    """int32 [1]: no window ends after it. Where it is not known, the width of the scores counts."""
    requests: Requests | None = None
    """What they follow from, over pages; None for windows of the caller."""

    def part(self, first: int, stop: int) -> Windows:
        """The windows of queries first … stop - 1."""
        rows = slice(first, stop)
        of = None if self.sequences is None else self.sequences[rows]
        asked = self.requests
        if asked is not None:
            asked = replace(asked, first=asked.first + first)
        return replace(
            self, starts=self.starts[rows], ends=self.ends[rows], sequences=of, requests=asked
        )

    def longer_than(self, least: int) -> Windows:
        """These windows, of which those that end at `least` or before are empty."""
        ends = torch.where(self.ends > least, self.ends, 0)
        asked = self.requests
        return replace(self, ends=ends, requests=asked and replace(asked, least=least))

    def of_row(self, row: int, width: int) -> tuple[int, int]:
        """(start, end) of one query, end >= start; reads values, so for the CPU."""
        start = max(int(self.starts[row]), 0)
        return start, max(min(int(self.ends[row]), width), start)


@dataclass(frozen=True, eq=False)
class FoundWindows:
    """Windows that a call uses; on a GPU, a launch may have to write them first."""

    seen: Windows
    scored: Windows
    """The windows of `seen` that need scores; the others are empty."""
    call: Call | None = None
    """The launch that writes them; None where they are written."""
    made: list[tuple[Call, Any]] = field(default_factory=list)
    """What `write` launched, with its compiled kernel; empty before."""

    def write(self) -> None:
        """Launch what writes them, once."""
        if self.call is not None and not self.made:
            self.made.append((self.call, self.call.run()))


@dataclass(frozen=True, eq=False)
class ScoresOperands:
    """Queries e4m3 [total_q, heads, 128], weights fp32 [total_q, heads], keys."""

    q: Tensor
    weights: Tensor
    keys: Keys
    windows: Windows
    block_table: Tensor | None = None
    seen: Windows | None = None
    """Where a kernel that finds windows over pages itself writes them: all of them, also those that
    need no scores, for a selection that follows. None: where `windows` are."""

    @property
    def device(self) -> torch.device:
        """Where the step runs."""
        return self.q.device

    def columns(self, out: Tensor) -> int:
        """Columns that can be written: those of `out` that are keys."""
        if isinstance(self.keys, IndexCache):
            assert self.block_table is not None
            places = self.block_table.shape[1] * self.keys.page_size
            return min(out.shape[1], places) if self.keys.rows else 0
        return min(out.shape[1], self.keys[0].shape[0])

    def problem(self, out: Tensor) -> IndexProblem:
        """This step without its tensors."""
        keys = self.keys
        stored = keys.data if isinstance(keys, IndexCache) else keys[0]
        own = self.windows.requests is None  # windows of the caller
        return IndexProblem(
            form="scores",
            heads=self.q.shape[1],
            page_size=keys.page_size if isinstance(keys, IndexCache) else 0,
            total_q=self.q.shape[0],
            width=out.shape[1],
            # A kernel that shares keys among the queries of a request finds windows by itself.
            batch=0 if self.block_table is None or own else self.block_table.shape[0],
            key_dtype=keys.key_dtype if isinstance(keys, IndexCache) else "e4m3",
            aligned_16=aligned_16(self.q, stored),
        )


@dataclass(frozen=True, eq=False)
class SelectOperands:
    """Scores fp32 [total_q, width], and how a selected column is written."""

    scores: Tensor
    topk: int
    windows: Windows
    block_table: Tensor | None = None
    page_size: int = 0
    """Rows of a page: selected positions are written as physical rows. 0: as positions."""
    add_starts: bool = False
    keep_first: int = 0
    keep_last: int = 0

    @property
    def device(self) -> torch.device:
        """Where the step runs."""
        return self.scores.device

    def problem(self, results: SelectResults) -> IndexProblem:
        """This step without its tensors."""
        return IndexProblem(
            form="select",
            page_size=self.page_size,
            topk=self.topk,
            add_starts=self.add_starts,
            keeps=self.keep_first + self.keep_last > 0,
            wants_counts=results.counts is not None,
            wants_mask=results.mask is not None,
            total_q=self.scores.shape[0],
            width=self.scores.shape[1],
            aligned_16=aligned_16(self.scores),
        )


@dataclass(frozen=True, eq=False)
class SelectResults:
    """Where a selection is written.

    out int32 [total_q, topk]; counts int32 [total_q]; mask int32 [total_q, words]: bit s % 32 of
    word s // 32 says that position s is selected.
    """

    out: Tensor
    counts: Tensor | None = None
    mask: Tensor | None = None

    def part(self, first: int, stop: int) -> SelectResults:
        """The results of queries first … stop - 1."""
        rows = slice(first, stop)
        counts, mask = (x if x is None else x[rows] for x in (self.counts, self.mask))
        return SelectResults(self.out[rows], counts, mask)


IndexOperands = ScoresOperands | SelectOperands
