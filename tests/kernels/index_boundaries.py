"""Cases that plans of the indexer ask for: lengths at their edges, uneven memory, one row alone.

As kernels/boundaries.py does for attention. A plan of scores knows how many queries a tile has, how
many keys a block, how many blocks a ring and how many keys a piece of work; a plan of a selection
how many scores a chunk and a list hold. From that, and from heads and pages, follow

    at_edges(plan, …)      requests of one query less than a tile, as many, and one more; over one
                           key less than a block, a ring or a piece, as many, and one more
    windows_at_edges(…)    windows over contiguous keys that begin and end there
    uneven(op)             the same call in tensors with gaps of their own, NaN in them; strides of
                           one query or page that are never used are such as no copy could have
    lone_query(op)         all queries are zero but one of a tile, all keys but the last of a block
    rows_at_edges(plan)    rows of scores that end around chunks, lists and rings of a selection
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

import torch
from torch import Tensor

from indexer import cases
from indexer.score_cases import paged, pair
from kernels.boundaries import UnevenMemory
from openmla.indexer.cache import IndexCache
from openmla.indexer.operands import ScoresOperands, SelectOperands, Windows
from openmla.indexer.windows import paged_windows
from openmla.planning import Plan

LOUD = 64.0


@dataclass(frozen=True)
class ScoreEdges:
    """Where the tiles of a plan of scores end."""

    queries: int
    """Queries that share a block of keys."""
    keys: int
    """Keys of a block."""
    ring: int
    """Blocks after which a ring begins again."""
    piece: int
    """Keys of a piece of work; 0 where requests are divided by blocks."""

    @property
    def lengths(self) -> list[int]:
        """One less than each, as many, and one more."""
        ends = {self.keys, self.keys * self.ring, self.piece or self.keys}
        return sorted({end + step for end in ends for step in (-1, 0, 1)})


WAVES, KEYS_OF_WAVE = 4, 32  # of CDNA4


def edges_of(plan: Plan) -> ScoreEdges:
    """The edges of a plan of scores."""
    config = plan.config
    if plan.backend == "cdna4":
        return ScoreEdges(config.queries, WAVES * KEYS_OF_WAVE, 2, config.chunk)
    if plan.backend == "portable":
        return ScoreEdges(config.queries, config.BN, config.num_stages, config.chunk)
    piece = 0 if getattr(config, "shared_queries", 0) else config.chunk
    return ScoreEdges(config.block_queries, config.BN, config.stages, piece)


def at_edges(
    edges: ScoreEdges, heads: int, page_size: int, scales: str = "ue8m0", few: int = 0
) -> ScoresOperands:
    """Requests over pages with as many queries and keys as fill a tile, a block, a ring, a piece, a
    page, and one less and more. few: each has so many queries at most, as in decode."""
    pages = [n for n in (page_size - 1, page_size, page_size + 1) if 0 < n <= edges.lengths[-1]]
    k_lens = sorted({n for n in (*edges.lengths, *pages) if n > 0})
    tile = edges.queries
    counts = (few, 1) if few else (tile - 1, 1, tile + 1, tile)
    q_lens = list(islice(cycle([n for n in counts if n]), len(k_lens)))
    fitting = [min(q, k) for q, k in zip(q_lens, k_lens, strict=True)]
    return paged(fitting, k_lens, heads, page_size, scales)


def at_some_edges(
    edges: ScoreEdges, heads: int, page_size: int, scales: str = "ue8m0", few: int = 0
) -> ScoresOperands:
    """The fewest requests that meet every kind of edge: a tile and one query more or less, a block
    and one key more or less, and one key more than a ring."""
    block, tile = edges.keys, edges.queries
    k_lens = [block - 1, block, block + 1, block * edges.ring + 1]
    q_lens = [few, 1, few, few] if few else [max(tile - 1, 1), 1, tile, tile + 1]
    return paged(q_lens, k_lens, heads, page_size, scales)


def single(heads: int, page_size: int, scales: str = "ue8m0") -> ScoresOperands:
    """One query over a pool of one page that lacks one key of being full."""
    count = page_size - 1
    pool = IndexCache.allocate(num_pages=1, page_size=page_size, scales=scales)  # type: ignore[arg-type]
    pool.data.fill_(0xFF)
    pool.append(cases.keys(count), torch.arange(count))
    offsets, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [count]))
    windows = paged_windows(offsets, lengths, 1)
    table = torch.zeros(1, 1, dtype=torch.int32)
    return ScoresOperands(*cases.queries(1, heads), pool, windows, table)


def windows_at_edges(edges: ScoreEdges, heads: int) -> ScoresOperands:
    """Windows over contiguous keys from and to every edge, one of them empty, one of one key, as
    many queries as a tile has and one more."""
    ends = edges.lengths
    keys = ends[-1] + 1
    starts = [0, *ends, 0, ends[0]]
    stops = [ends[0], *(min(n + 1, keys) for n in ends), keys, ends[0]]
    most = max(edges.queries + 1, len(starts))
    return pair(list(islice(cycle(starts), most)), list(islice(cycle(stops), most)), keys, heads)


def uneven(op: ScoresOperands) -> ScoresOperands:
    """The same call in uneven memory full of NaN."""
    memory = UnevenMemory()
    keys = op.keys
    if isinstance(keys, IndexCache):
        data = memory.new(tuple(keys.data.shape), torch.uint8)
        keys = replace(keys, data=data.copy_(keys.data))
    else:
        keys = _copy(memory, keys[0]), keys[1]
    table = None if op.block_table is None else _copy(memory, op.block_table)
    q, weights = _copy(memory, op.q), _copy(memory, op.weights)
    return replace(op, q=q, weights=weights, keys=keys, block_table=table)


def _copy(memory: UnevenMemory, x: Tensor) -> Tensor:
    fresh = memory.new(tuple(x.shape), x.dtype)
    raw = (x.view(torch.uint8), fresh.view(torch.uint8)) if x.element_size() == 1 else (x, fresh)
    raw[1].copy_(raw[0])
    return fresh


def uneven_rows(shape: Sequence[int], dtype: torch.dtype, unwritten: float) -> Tensor:
    """Where results are written: rows that lie apart, and all that lies between them unwritten."""
    memory = UnevenMemory()
    rows = memory.new(shape, dtype)
    for raw in memory.buffers:
        raw.view(dtype).fill_(unwritten)  # type: ignore[arg-type]
    return rows


def gaps_of(rows: Tensor, unwritten: float) -> bool:
    """Whether anything between rows was written."""
    base = rows.untyped_storage()
    every = torch.empty(0, dtype=rows.dtype).set_(base)  # type: ignore[call-overload]
    copy = every.clone()
    copy.as_strided(rows.shape, rows.stride(), rows.storage_offset()).fill_(unwritten)
    return bool((copy != unwritten).any())


def lone_query(op: ScoresOperands, edges: ScoreEdges) -> ScoresOperands:
    """All queries are zero but the last of each tile, and only one head of it is not; its weight is
    loud."""
    q, weights = op.q.clone(), op.weights.clone()
    keep = torch.zeros(q.shape[:2], dtype=torch.bool)
    keep[edges.queries - 1 :: edges.queries, q.shape[1] - 1] = True
    keep[-1, 0] = True
    q.view(torch.uint8)[~keep] = 0
    weights[keep] *= LOUD
    return replace(op, q=q, weights=weights)


@dataclass(frozen=True)
class SelectEdges:
    """Where the chunks of a plan of a selection end."""

    chunk: int
    """Scores that are read at once."""
    list_size: int
    """Scores of a row that is cut in registers, and of the list of a longer one."""
    ring: int
    """Chunks in flight."""

    @property
    def widths(self) -> list[int]:
        """One less than each, as many, and one more."""
        ends = {self.chunk, self.list_size, self.list_size + self.chunk, self.chunk * self.ring}
        return sorted({end + step for end in ends for step in (-1, 0, 1)})


def select_edges(plan: Plan) -> SelectEdges:
    """The edges of a plan of a selection."""
    config = plan.config
    if plan.kernel.name == "select" and plan.backend == "portable":
        return SelectEdges(config.block, config.block, 2)
    return SelectEdges(config.chunk, config.list_size, config.stages)


def rows_at_edges(edges: SelectEdges, kind: str, topk: int, **how: object) -> SelectOperands:
    """A row of scores for every width around an edge, from the first column or a few later, over
    two lines of a table."""
    widths = edges.widths
    starts = [n % 5 for n in range(len(widths))]
    ends = [start + width for start, width in zip(starts, widths, strict=True)]
    columns = -(-max(ends) // 4) * 4
    scores = cases.scores_of(kind, len(widths), columns)
    lines = torch.arange(len(widths), dtype=torch.int32) % 2
    first, last = (torch.tensor(x, dtype=torch.int32) for x in (starts, ends))
    inside = (torch.arange(columns) >= first[:, None]) & (torch.arange(columns) < last[:, None])
    # What lies beside a window would be selected first.
    scores = torch.where(inside, scores, torch.inf)
    return SelectOperands(scores, topk, Windows(first, last, lines), **how)  # type: ignore[arg-type]


def ties_at(op: SelectOperands, edge: int) -> SelectOperands:
    """All scores are alike but one that is larger, in the last place before an edge, and one in the
    first place behind it: of those that are equal, the topk - 2 first are selected."""
    scores = op.scores.clone()
    inside = scores != torch.inf
    scores[inside] = -1.0
    for row in range(scores.shape[0]):
        start, end = op.windows.of_row(row, scores.shape[1])
        for place in (edge - 1, edge):
            if start + place < end:
                scores[row, start + place] = 3.0
    return replace(op, scores=scores)
