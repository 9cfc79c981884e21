"""Calls of `mla_attend` looked at: one token alone, all rows by lists, rows read in a given way.

The calls themselves are openmla.lab.testing.sources.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from openmla import Listed, Span
from openmla.lab.testing.sources import SourcesCase as Setup
from openmla.lab.testing.sources import ints, new_results, on_device, operands
from openmla.operands import AttendOperands
from openmla.planning import Plan
from openmla.sources import Source

__all__ = [
    "Setup",
    "as_lists",
    "new_results",
    "on_device",
    "one_token",
    "operands",
    "read_by",
    "some_tokens",
]


def read_by(chosen: Plan, way: str) -> Plan:
    """The plan with quantized rows read in a given way: "in_kernel", or once, the "whole" pools.
    Rows that can only be read in one way are."""
    read = chosen.config.cache_read
    if read.mode == "plain" or read.always:
        return chosen
    rows = sum(source.total_k for source in chosen.problem.sources)
    return replace(chosen, config=replace(chosen.config, cache_read=read.by(way, rows, rows)))


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
    turn = op.turn_back and replace(op.turn_back, positions=op.turn_back.positions[here])
    return replace(op, q=op.q[here], sources=tuple(sources), turn_back=turn)


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
