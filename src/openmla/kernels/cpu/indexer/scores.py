"""Scores of the indexer on the CPU.

One query at a time: [heads, 128] x [128, block] products in fp32, relu, and the weighted sum over
the heads. Blocks begin at fixed keys and are padded to their full size, so that the bits of a score
depend neither on other queries nor on how many keys follow. Keys of a sequence are widened once
per block, for all of its queries.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from openmla.indexer.cache import IndexCache
from openmla.indexer.operands import ScoresOperands
from openmla.indexer.problem import DIM
from openmla.planning.host.indexer import CpuIndexConfig
from openmla.sequences import page_rows


def scores(config: CpuIndexConfig, op: ScoresOperands, out: Tensor) -> None:
    """Write the columns of every window and no others."""
    size = config.block_keys
    block = torch.zeros(size, DIM, dtype=torch.float32)
    scales = torch.zeros(size, dtype=torch.float32)
    for line, queries in _by_sequence(op):
        windows = {row: op.windows.of_row(row, op.columns(out)) for row in queries}
        last = max(end for _, end in windows.values())
        first = min((start for start, end in windows.values() if start < end), default=last)
        for key in range(first // size * size, last, size):
            stop = min(key + size, last)
            values, factors = _keys(op, line, key, stop)
            block[: stop - key], scales[: stop - key] = values, factors
            for row, (start, end) in windows.items():
                low, high = max(start, key), min(end, stop)
                if low < high:
                    products = torch.mm(op.q[row].float(), block.T).relu_()
                    sums = torch.mv(products.T, op.weights[row]).mul_(scales)
                    out[row, low:high] = sums[low - key : high - key]


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
