"""What neighboring queries see of a source: every row once, and where the rows of each query lie.

Queries t and t + 1 of a sliding window share all rows but two. A query's rows are consecutive among
those of its neighborhood, in its own order: so rows are fetched and converted once, and each query
multiplies a slice of them. It sees the same values at the same alignment as if it were alone.

    begin … end     2 … 6,  3 … 7,  4 … 8        20 … 22       of one request
    stretch         2 … 8                        20 … 22
    rows            0    1    2    3    4    5    6    7       if all pages are there
    places          0 … 4,  1 … 5,  2 … 6         6 … 8

Queries that share nothing, and lists, have their rows one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from openmla.cache import LatentCache
from openmla.kernels.cpu.workers import divide
from openmla.kernels.cpu.workspace import Workspace
from openmla.sources import Listed, Source, Span

AT_ONCE = 256
"""Rows that are dequantized at a time: what is made on the way stays in a core's cache."""
MOST_ROWS = 2**16
"""Rows that are kept dequantized for a call, 64 MB of 512 columns."""
LOOKED_AT = 16
"""Rows of a pool, for each entry of the lists, up to which it pays to mark those that are named."""
FLOPS_PER_COLUMN = 32.0
"""What dequantizing takes, in operations of a matrix product."""


class Seen(NamedTuple):
    """Rows of a source that neighboring queries see."""

    rows: Tensor
    """Physical rows, int64."""
    places: list[slice]
    """By query: which of them it sees."""
    values: Tensor | None = None
    """The rows in fp32, if they have been read."""

    def of(self, first: int, last: int) -> Seen:
        """What queries first … last-1 of these see."""
        return self._replace(places=self.places[first:last])

    def entries(self, first: int, last: int) -> Seen:
        """Entries first … last-1 of what each query sees; of rows to be read, no others."""
        asked = [slice(place.start + first, place.start + last) for place in self.places]
        if self.values is not None:
            return self._replace(places=asked)
        stretches = joined(asked)
        rows = [self.rows[stretch] for stretch in stretches]
        places, number, before = [], 0, 0
        for place in asked:
            while not _covers(stretches[number], place):
                before += rows[number].numel()
                number += 1
            start = before + place.start - stretches[number].start
            places.append(slice(start, start + last - first))
        return Seen(rows[0] if len(rows) == 1 else torch.cat(rows), places)


def seen_by(source: Source, first: int, last: int) -> Seen:
    """What queries first … last-1 see."""
    if isinstance(source, Span):
        return _positions(source, first, last)
    return _entries(source, first, last)


def longest(source: Source) -> int:
    """Most rows that a query asks for, whether they are there or not."""
    if isinstance(source, Listed):
        return source.most
    if not source.begin.numel():
        return 0
    most = source.table_keys
    return max(int((source.end.clamp(max=most) - source.begin.clamp(0, most)).max()), 0)


@dataclass(frozen=True, eq=False, kw_only=True)
class ReadOnce(Listed):
    """Lists of quantized rows, of which those that are named have been dequantized."""

    values: Tensor
    """bf16 [rows that are named, width]."""
    numbers: Tensor
    """int32, by physical row: where its values are; nothing for rows that nobody names."""

    def read(self, rows: Tensor) -> Tensor:
        """The values of physical rows, [len(rows), width]."""
        return self.values.index_select(0, self.numbers.index_select(0, rows))


def read_once(source: Source) -> Source:
    """The source, or quantized rows that its lists name twice and more in the mean, read by now.

    Lists of neighboring queries name many rows again, in an order of their own. Rows that nobody
    names are not read.
    """
    if not isinstance(source, Listed):
        return source
    cache, entries = source.rows, source.indices.numel()
    if not isinstance(cache, LatentCache) or not cache.layout.quantized:
        return source
    if cache.rows > LOOKED_AT * entries:
        return source
    named, count = torch.zeros(cache.rows, dtype=torch.bool, device=cache.device), 0
    queries = max(MOST_ROWS // max(source.most, 1), 1)  # at a time
    for first in range(0, source.indices.shape[0], queries):
        rows = _entries(source, first, first + queries).rows
        named[rows] = True
        count += rows.numel()
    rows = named.nonzero()[:, 0]
    if not 0 < rows.numel() <= min(count // 2, MOST_ROWS):
        return source
    values = torch.empty(rows.numel(), cache.width, dtype=torch.bfloat16, device=cache.device)

    def read(work: Workspace, first: int) -> None:
        some = slice(first, first + AT_ONCE)
        values[some] = cache.read(rows[some])

    divide(read, range(0, rows.numel(), AT_ONCE), FLOPS_PER_COLUMN * values.numel())
    numbers = named.cumsum(0, dtype=torch.int32) - 1
    return ReadOnce(cache, source.indices, source.lengths, values=values, numbers=numbers)


def joined(places: list[slice]) -> list[slice]:
    """Slices in their order, those that overlap or touch the one before as one with it.

    >>> joined([slice(2, 6), slice(3, 7), slice(1, 5), slice(9, 12)])
    [slice(1, 7, None), slice(9, 12, None)]
    """
    found: list[slice] = []
    for place in places:
        before = found[-1] if found else None
        if before is not None and place.start <= before.stop and before.start <= place.stop:
            first, last = min(before.start, place.start), max(before.stop, place.stop)
            found[-1] = slice(first, last)
        else:
            found.append(place)
    return found


def _covers(whole: slice, part: slice) -> bool:
    return bool(whole.start <= part.start and part.stop <= whole.stop)


def _entries(source: Listed, first: int, last: int) -> Seen:
    """List after list, duplicates and all."""
    listed = source.indices[first:last]
    there = (listed >= 0) & (listed < source.count)
    if source.lengths is not None:
        column = torch.arange(source.most, device=listed.device)
        there &= column < source.lengths[first:last, None]
    if bool(there.all()):
        rows, counts = listed.flatten(), [source.most] * listed.shape[0]
    else:
        rows, counts = listed[there], there.sum(1).tolist()
    ends = accumulate(counts)
    return Seen(rows.long(), [slice(end - n, end) for n, end in zip(counts, ends, strict=True)])


class _Stretch:
    """Positions of a request that one query after another asks for."""

    def __init__(self, request: int, asked: slice) -> None:
        self.request, self.asked = request, [asked]
        self.all = asked

    def take(self, request: int, asked: slice) -> bool:
        """Grow by what one more query asks for, if that overlaps or touches these positions."""
        whole = joined([self.all, asked])
        if request != self.request or len(whole) > 1:
            return False
        self.all = whole[0]
        self.asked.append(asked)
        return True


def _positions(span: Span, first: int, last: int) -> Seen:
    """The rows of one stretch of positions after another."""
    requests = span.request[first:last].tolist()
    begins = span.begin[first:last].clamp(min=0).tolist()
    ends = span.end[first:last].clamp(max=span.table_keys).tolist()
    stretches: list[_Stretch] = []
    sees: list[bool] = []
    for request, begin, end in zip(requests, begins, ends, strict=True):
        sees.append(begin < end and 0 <= request < span.block_table.shape[0])
        if sees[-1] and not (stretches and stretches[-1].take(request, slice(begin, end))):
            stretches.append(_Stretch(request, slice(begin, end)))
    rows: list[Tensor] = []
    places: list[slice] = []
    before = 0
    for stretch in stretches:
        found, of_queries = _rows(span, stretch)
        rows.append(found)
        places += [slice(before + own.start, before + own.stop) for own in of_queries]
        before += found.numel()
    if not rows:
        rows.append(span.request.new_empty(0, dtype=torch.int64))
    of_those = iter(places)
    everyone = [next(of_those) if any_there else slice(0, 0) for any_there in sees]
    return Seen(rows[0] if len(rows) == 1 else torch.cat(rows), everyone)


def _rows(span: Span, stretch: _Stretch) -> tuple[Tensor, list[slice]]:
    """The rows that a stretch of positions names, and the place of each query among them."""
    begin, end = stretch.all.start, stretch.all.stop
    size = span.cache.page_size
    first = begin // size
    pages = span.block_table[stretch.request, first : -(-end // size)].long()
    inside = torch.arange(size, device=pages.device)
    here = slice(begin - first * size, end - first * size)
    rows = (pages[:, None] * size + inside).flatten()[here]
    there = (pages >= 0) & (pages < span.cache.num_pages)
    places = [slice(asked.start - begin, asked.stop - begin) for asked in stretch.asked]
    if bool(there.all()):
        return rows, places
    named = there.repeat_interleave(size)[here]
    before = torch.nn.functional.pad(named.cumsum(0), (1, 0))
    return rows[named], [slice(int(before[p.start]), int(before[p.stop])) for p in places]
