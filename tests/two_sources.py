"""Calls of `mla_attend` over DeepSeek-V4's rows, or bf16 rows, whose tokens end at every edge of a
block.

Pages lie as engines have them: all rows of a page, behind them their scales, a gap before the next
page. Rows that nobody sees, scales, gaps and entries that do not count may be poisoned: NaN in the
cache, wild numbers in lists and tables.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from openmla import LatentCache, Listed, Span
from openmla.operands import AttendOperands, Results, Weights
from openmla.planning import Plan
from openmla.sources import Source

ROW, SCALES = 576, 8  # bytes
GAP = 48  # bytes between pages


@dataclass(frozen=True)
class Setup:
    """One call; token t sees first[t] rows of its first source and second[t] of its second."""

    kinds: tuple[str, ...] = ("list", "list")
    first: tuple[int, ...] = (0, 1, 63, 64, 65, 128, 64, 0)
    second: tuple[int, ...] = (65, 64, 0, 1, 63, 66, 64, 0)
    pages: tuple[int, ...] = (64, 2)
    """Rows of a page of each source."""
    formats: tuple[str, ...] = ("fp8_584", "fp8_584")
    heads: int = 3
    sink: bool = True
    lengths: bool = True
    """Whether lists have lengths; without them, entries that do not count are -1."""
    scale: float = 0.05
    seed: int = 0

    @property
    def tokens(self) -> int:
        return len(self.first)


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def v4_cache(pages: int, page_size: int, poisoned: bool, device: Any = "cpu") -> LatentCache:
    """Pages of 584 bytes a row with gaps; NaN or zeros."""
    step = -(-(page_size * (ROW + SCALES) + GAP) // 16) * 16
    raw = torch.full((pages, step), 0xFF if poisoned else 0, dtype=torch.uint8, device=device)
    data = raw.as_strided((pages, page_size, ROW), (step, ROW, 1))
    scales = raw.as_strided((pages, page_size, SCALES), (step, SCALES, 1), page_size * ROW)
    return LatentCache(data, scales, 512, 0, "fp8_584")


def bf16_cache(pages: int, page_size: int, poisoned: bool, device: Any = "cpu") -> LatentCache:
    """Pages of 512 bf16 columns a row with gaps; NaN or zeros."""
    step = page_size * 512 + GAP
    value = torch.nan if poisoned else 0.0
    raw = torch.full((pages, step), value, dtype=torch.bfloat16, device=device)
    return LatentCache(
        raw.as_strided((pages, page_size, 512), (step, 512, 1)), None, 512, 0, "bf16"
    )


CACHES = {"fp8_584": v4_cache, "bf16": bf16_cache}


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _listed(setup: Setup, counts: tuple[int, ...], which: int, seed: int) -> Source:
    """Lists with duplicates, and entries that name nothing: -1, far below, past the pool."""
    draw = generator_of(seed)
    size = setup.pages[which]
    pool = CACHES[setup.formats[which]](-(-200 // size), size, True)
    lists = torch.randint(0, pool.rows, (setup.tokens, max(*counts, 1)), generator=draw).int()
    strange = torch.rand(lists.shape, generator=draw)
    lists[strange < 0.06] = -1
    lists[strange < 0.04] = -(2**31)
    lists[strange < 0.02] = pool.rows
    if not setup.lengths:
        for token, count in enumerate(counts):
            lists[token, count:] = -1
        return Listed(pool, lists)
    # What lies past a length is a row that must not be read.
    lengths = list(counts)
    lengths[0] = lengths[0] or -3
    longest = counts.index(max(counts))
    lengths[longest] = 2**31 - 1
    return Listed(pool, lists, ints(lengths))


def _span(setup: Setup, counts: tuple[int, ...], which: int, seed: int) -> Source:
    """Two requests whose pages lie in any order; pages and requests that are not there."""
    draw = generator_of(seed)
    size = setup.pages[which]
    across = -(-(max(counts) + 40) // size) + 1
    pool = CACHES[setup.formats[which]](2 * across, size, True)
    table = torch.randperm(2 * across, generator=draw).int().view(2, across)
    request, begin, end = [], [], []
    for token, count in enumerate(counts):
        start = int(torch.randint(0, 40, (), generator=draw))
        line = token % 2 if count else (-1, 2, 0)[token % 3]
        request.append(line)
        begin.append(start)
        end.append(start + (count if line in (0, 1) else 30))
    begin[0], end[0] = -(2**31), counts[0]  # from before the first position on
    last = counts.index(max(counts))
    begin[last] = across * size - counts[last]
    end[last] = 2**31 - 1  # past the table
    table[1, 0] = -1
    table[0, 1] = pool.num_pages if size < 4 else 2**32 // size  # 0 in 32 bits, times its rows
    return Span(pool, table, *(ints(x) for x in (request, begin, end)))


KINDS = {"list": _listed, "span": _span}


def operands(setup: Setup, poisoned: bool = True) -> AttendOperands:
    """The call. What nobody sees is NaN if poisoned, else zeros; its rows are the same."""
    counts, sources = (setup.first, setup.second), []
    for i, kind in enumerate(setup.kinds):
        seed = 1000 * i + setup.seed
        source = KINDS[kind](setup, counts[i], i, seed)
        used = torch.cat([source.seen(token) for token in range(setup.tokens)]).unique()
        pool = source.rows
        assert isinstance(pool, LatentCache)
        fresh = CACHES[pool.format](pool.num_pages, pool.page_size, poisoned)
        values = torch.randn(pool.rows, 512, generator=generator_of(seed + 1))[used]
        fresh.append(values, None, used)
        sources.append(replace(source, **{_pool_name(source): fresh}))
    draw = generator_of(setup.seed + 7)
    q = torch.randn(setup.tokens, setup.heads, 512, generator=draw).bfloat16()
    sink = torch.randn(setup.heads, generator=draw) if setup.sink else None
    return AttendOperands(q, tuple(sources), 512, Weights(setup.scale, sink))


def on_device(op: AttendOperands, device: str) -> AttendOperands:
    """The same call elsewhere; its pages keep their gaps."""
    sources: list[Source] = []
    for source in op.sources:
        moved = {n: x.to(device) for n, x in vars(source).items() if isinstance(x, Tensor)}
        pool = source.rows
        assert isinstance(pool, LatentCache)
        fresh = CACHES[pool.format](pool.num_pages, pool.page_size, True, device)
        fresh.data.copy_(pool.data)
        if fresh.scales is not None and pool.scales is not None:
            fresh.scales.copy_(pool.scales)
        sources.append(replace(source, **moved, **{_pool_name(source): fresh}))
    sink = None if op.weights.sink is None else op.weights.sink.to(device)
    weights = replace(op.weights, sink=sink)
    return replace(op, q=op.q.to(device), sources=tuple(sources), weights=weights)


def read_by(chosen: Plan, way: str) -> Plan:
    """The plan with quantized rows read in a given way: "in_kernel", or once, the "whole" pools."""
    read = chosen.config.cache_read
    if read.mode == "plain":
        return chosen
    rows = sum(source.total_k for source in chosen.problem.sources)
    return replace(chosen, config=replace(chosen.config, cache_read=read.by(way, rows, rows)))


def _pool_name(source: Source) -> str:
    return "rows" if isinstance(source, Listed) else "cache"


def one_token(op: AttendOperands, token: int) -> AttendOperands:
    """The call of one token alone, over the same caches."""
    return some_tokens(op, slice(token, token + 1))


def some_tokens(op: AttendOperands, here: slice) -> AttendOperands:
    sources: list[Source] = []
    for source in op.sources:
        if isinstance(source, Listed):
            lengths = None if source.lengths is None else source.lengths[here]
            sources.append(replace(source, indices=source.indices[here], lengths=lengths))
        else:
            asked = {name: getattr(source, name)[here] for name in ("request", "begin", "end")}
            sources.append(replace(source, **asked))
    return replace(op, q=op.q[here], sources=tuple(sources))


def as_lists(op: AttendOperands) -> AttendOperands:
    """The same rows, all of them by lists; -1 for a position of a span that names no row."""
    sources: list[Source] = []
    for source in op.sources:
        if isinstance(source, Listed):
            sources.append(source)
            continue
        rows = [_positions(source, token) for token in range(op.q.shape[0])]
        lists = torch.full((len(rows), max(1, *map(len, rows))), -1, dtype=torch.int32)
        for token, found in enumerate(rows):
            lists[token, : len(found)] = ints(found)
        lengths = ints([len(found) for found in rows])
        sources.append(Listed(source.cache, lists, lengths))
    return replace(op, sources=tuple(sources))


def _positions(span: Span, token: int) -> list[int]:
    """The physical row of every position that a token asks for."""
    size, line = span.cache.page_size, int(span.request[token])
    if not 0 <= line < span.block_table.shape[0]:
        return []
    first, stop = max(int(span.begin[token]), 0), min(int(span.end[token]), span.table_keys)
    pages = [int(span.block_table[line, at // size]) for at in range(first, stop)]
    inside = [at % size for at in range(first, stop)]
    there = [0 <= page < span.cache.num_pages for page in pages]
    return [p * size + i if ok else -1 for p, i, ok in zip(pages, inside, there, strict=True)]


def new_results(op: AttendOperands) -> Results:
    """Outputs full of NaN."""
    shape, device = op.q.shape[:2], op.q.device
    out = torch.full((*shape, op.d_v), torch.nan, dtype=torch.bfloat16, device=device)
    return Results(out, torch.full(shape, torch.nan, device=device))
