"""Scores of the indexer on the CPU.

A few queries at a time: [queries * heads, 128] x [128, block] products in fp32, relu, and the
weighted sum over the heads. Blocks begin at fixed keys; blocks and groups of queries are padded to
their full size, so that the bits of a score depend neither on other queries nor on how many keys
follow. Queries are widened once per batch of them, keys once per block and batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from openmla.indexer.cache import IndexCache
from openmla.indexer.operands import ScoresOperands
from openmla.indexer.problem import DIM
from openmla.kernels.cpu.indexer.plan import CpuIndexConfig
from openmla.sequences import page_rows


def scores(config: CpuIndexConfig, op: ScoresOperands, out: Tensor) -> None:
    """Write the columns of every window and no others."""
    work = _Workspace(config, op.q.shape[1])
    for line, queries in _by_sequence(op):
        for at in range(0, len(queries), config.batch_queries):
            _score_batch(work, op, line, queries[at : at + config.batch_queries], out)


def _score_batch(
    work: _Workspace, op: ScoresOperands, line: int, rows: list[int], out: Tensor
) -> None:
    """Some queries of a sequence, against all blocks of keys that any of them sees."""
    windows = [op.windows.of_row(row, op.columns(out)) for row in rows]
    last = max(end for _, end in windows)
    first = min((start for start, end in windows if start < end), default=last)
    if first < last:
        work.take_queries(op, rows)
    for key in range(first // work.size * work.size, last, work.size):
        stop = min(key + work.size, last)
        work.take_keys(*_keys(op, line, key, stop))
        for at in range(0, len(rows), work.group):
            seen = windows[at : at + work.group]
            if any(start < stop and end > key for start, end in seen):
                _write(out, rows[at : at + work.group], seen, work.sums(at), key, stop)


def _write(
    out: Tensor, rows: list[int], windows: list[tuple[int, int]], sums: Tensor, key: int, stop: int
) -> None:
    """The scores of keys key … stop - 1, those inside of the windows."""
    together = rows[-1] - rows[0] == len(rows) - 1
    if together and all(start <= key and end >= stop for start, end in windows):
        out[rows[0] : rows[-1] + 1, key:stop] = sums[: len(rows), : stop - key]
        return
    for i, (row, (start, end)) in enumerate(zip(rows, windows, strict=True)):
        low, high = max(start, key), min(end, stop)
        if low < high:
            out[row, low:high] = sums[i, low - key : high - key]


class _Workspace:
    """One block of keys and a batch of queries, in fp32."""

    def __init__(self, config: CpuIndexConfig, heads: int) -> None:
        self.size, self.group, self.heads = config.block_keys, config.group_queries, heads
        make: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        self.keys = torch.zeros(self.size, DIM, **make)
        self.scales = torch.zeros(self.size, **make)
        self.q = torch.zeros(config.batch_queries, heads, DIM, **make)
        self.weights = torch.zeros(config.batch_queries, 1, heads, **make)
        self.products = torch.zeros(self.group * heads, self.size, **make)

    def take_queries(self, op: ScoresOperands, rows: list[int]) -> None:
        """A batch; what was there before stays behind the last, and its scores are not read."""
        which = torch.tensor(rows, device="cpu")
        values = op.q.view(torch.uint8)[which].view(op.q.dtype)
        self.q[: len(rows)], self.weights[: len(rows), 0] = values, op.weights[which]

    def take_keys(self, values: Tensor, scales: Tensor) -> None:
        """The keys of a block; what was there before stays behind the last, and is not read."""
        self.keys[: values.shape[0]] = values
        self.scales[: values.shape[0]] = scales

    def sums(self, at: int) -> Tensor:
        """Scores of the group of queries that begins with number `at`, [group, block]."""
        q, weights = self.q[at : at + self.group], self.weights[at : at + self.group]
        torch.mm(q.view(-1, DIM), self.keys.T, out=self.products).relu_()
        by_query = self.products.view(self.group, self.heads, self.size)
        return torch.bmm(weights, by_query)[:, 0].mul_(self.scales)


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
