"""Top-k of rows of scores on the CPU: a partial sort finds the cut, a scan takes what is above it.

Scores become integers of the same order, so that ties are exact: -0.0 as +0.0, NaN below -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.indexer.operands import SelectOperands, SelectResults
from openmla.sequences import page_rows

NAN_KEY = -(2**31)
KEPT_KEY = 2**31 - 1
LOW_BITS = 0x7FFFFFFF


def select(op: SelectOperands, results: SelectResults) -> None:
    """Write every row."""
    results.out.fill_(-1)
    if results.mask is not None:
        results.mask.zero_()
    for row in range(op.scores.shape[0]):
        start, end = op.windows.of_row(row, op.scores.shape[1])
        positions = _positions(op, row, start, end)
        n = positions.shape[0]
        if results.counts is not None:
            results.counts[row] = n
        results.out[row, :n] = _written(op, row, start, positions)
        if results.mask is not None and n:
            flags = results.mask.new_zeros(32 * results.mask.shape[1])
            flags[positions] = 1
            place = torch.arange(32, dtype=torch.int32, device=flags.device)
            results.mask[row] = (flags.view(-1, 32) << place).sum(1, dtype=torch.int32)


def order_keys(scores: Tensor) -> Tensor:
    """fp32 scores as int32 of the same order.

    >>> order_keys(torch.tensor([-1.0, -0.0, 0.0, torch.inf, torch.nan])).tolist()
    [-1065353217, 0, 0, 2139095040, -2147483648]
    """
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    return torch.where(scores.isnan(), NAN_KEY, torch.where(bits < 0, bits ^ LOW_BITS, bits))


def _positions(op: SelectOperands, row: int, start: int, end: int) -> Tensor:
    """The selected positions, from the window's start, ascending."""
    n, k = end - start, op.topk
    if n <= k:
        return torch.arange(n, device=op.device)
    keys = order_keys(op.scores[row, start:end])
    if op.keep_first + op.keep_last:
        keys[: op.keep_first] = KEPT_KEY
        keys[n - op.keep_last :] = KEPT_KEY
    cut = keys.kthvalue(n - k + 1).values  # counted from the smallest
    best = keys >= cut
    positions = best.nonzero()[:, 0]
    surplus = positions.shape[0] - k
    if surplus:  # ties: the last ones have lost
        best[(keys == cut).nonzero()[-surplus:, 0]] = False
        positions = best.nonzero()[:, 0]
    return positions


def _written(op: SelectOperands, row: int, start: int, positions: Tensor) -> Tensor:
    if op.block_table is not None and op.windows.sequences is not None:
        pages = op.block_table[int(op.windows.sequences[row])]
        reach = int(positions[-1]) + 1 if positions.shape[0] else 0
        return page_rows(pages, op.page_size, 0, reach)[positions].int()
    return positions.int() + (start if op.add_starts else 0)
