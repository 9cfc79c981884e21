"""Scores of the indexer on the CPU.

A few queries at a time: [queries * heads, 128] x [128, block] products in fp32, relu, and the
weighted sum over the heads. Blocks begin at fixed keys; blocks and groups of queries are padded to
their full size, so that the bits of a score depend neither on other queries nor on how many keys
follow. Keys of a sequence are widened once per block, for all of its queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from openmla.indexer.cache import IndexCache
from openmla.indexer.operands import ScoresOperands
from openmla.indexer.problem import DIM
from openmla.planning.host.indexer import CpuIndexConfig
from openmla.sequences import page_rows


def scores(config: CpuIndexConfig, op: ScoresOperands, out: Tensor) -> None:
    """Write the columns of every window and no others."""
    work = _Workspace(config, op.q.shape[1])
    for line, queries in _by_sequence(op):
        windows = {row: op.windows.of_row(row, op.columns(out)) for row in queries}
        last = max(end for _, end in windows.values())
        first = min((start for start, end in windows.values() if start < end), default=last)
        for key in range(first // work.size * work.size, last, work.size):
            stop = min(key + work.size, last)
            work.take_keys(*_keys(op, line, key, stop))
            seeing = [row for row in queries if windows[row][0] < stop and windows[row][1] > key]
            for at in range(0, len(seeing), work.group):
                rows = seeing[at : at + work.group]
                sums = work.sums(op, rows)
                for i, row in enumerate(rows):
                    low, high = max(windows[row][0], key), min(windows[row][1], stop)
                    out[row, low:high] = sums[i, low - key : high - key]


class _Workspace:
    """One block of keys and one group of queries, in fp32."""

    def __init__(self, config: CpuIndexConfig, heads: int) -> None:
        self.size, self.group, self.heads = config.block_keys, config.group_queries, heads
        make: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        self.keys = torch.zeros(self.size, DIM, **make)
        self.scales = torch.zeros(self.size, **make)
        self.q = torch.zeros(self.group, heads, DIM, **make)
        self.weights = torch.zeros(self.group, 1, heads, **make)
        self.products = torch.zeros(self.group * heads, self.size, **make)

    def take_keys(self, values: Tensor, scales: Tensor) -> None:
        """The keys of a block; what was there before stays behind the last, and nobody reads it."""
        self.keys[: values.shape[0]] = values
        self.scales[: values.shape[0]] = scales

    def sums(self, op: ScoresOperands, rows: list[int]) -> Tensor:
        """Scores of a group of queries, [group, block]."""
        for i, row in enumerate(rows):
            self.q[i], self.weights[i, 0] = op.q[row], op.weights[row]
        torch.mm(self.q.view(-1, DIM), self.keys.T, out=self.products).relu_()
        by_query = self.products.view(self.group, self.heads, self.size)
        return torch.bmm(self.weights, by_query)[:, 0].mul_(self.scales)


def _by_sequence(op: ScoresOperands) -> Iterator[tuple[int, list[int]]]:
    """(line of the block table, its queries); contiguous keys are one sequence."""
    if op.windows.sequences is None:
        if op.q.shape[0]:
            yield 0, list(range(op.q.shape[0]))
        return
    lines: dict[int, list[int]] = {}
    for row, line in enumerate(op.windows.sequences.tolist()):
        lines.setdefault(line, []).append(row)
    yield from lines.items()


def _keys(op: ScoresOperands, line: int, first: int, stop: int) -> tuple[Tensor, Tensor]:
    if isinstance(op.keys, IndexCache):
        assert op.block_table is not None
        return op.keys.read(page_rows(op.block_table[line], op.keys.page_size, first, stop))
    values, scales = op.keys
    return values[first:stop], scales[first:stop]
