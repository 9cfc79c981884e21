"""The definition of the indexer: float64, one row at a time, no tricks. It is written to be read.

Every other path is judged against this file. `calls` lets it run as a backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openmla.indexer.cache import IndexCache
from openmla.indexer.operands import IndexOperands, ScoresOperands, SelectOperands, SelectResults
from openmla.planning import Plan
from openmla.sequences import page_rows


@dataclass(frozen=True, eq=False)
class ScoresTruth:
    """Exact scores, float64 [total_q, width], NaN outside the windows."""

    scores: Tensor
    magnitude: Tensor
    """k_scale * sum over heads of |weight| * sum(|q| * |k|): what errors of products scale with."""

    @staticmethod
    def empty(total_q: int, width: int) -> ScoresTruth:
        """Nothing is seen yet."""
        make: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
        return ScoresTruth(
            torch.full((total_q, width), torch.nan, **make), torch.zeros(total_q, width, **make)
        )


def scores(op: ScoresOperands, out: Tensor) -> ScoresTruth:
    """k_scale * sum over heads of weight * relu(q . k) in every window, for `out`'s columns."""
    truth = ScoresTruth.empty(*out.shape)
    for row in range(op.q.shape[0]):
        start, end = op.windows.of_row(row, op.columns(out))
        k, k_scale = (x.double().cpu() for x in keys_of(op, row, start, end))
        q, w = op.q[row].double().cpu(), op.weights[row].double().cpu()[:, None]
        truth.scores[row, start:end] = (w * (q @ k.T).clamp_min(0)).sum(0) * k_scale
        truth.magnitude[row, start:end] = (w.abs() * (q.abs() @ k.abs().T)).sum(0) * k_scale.abs()
    return truth


def keys_of(op: ScoresOperands, row: int, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Values and scales of the keys that columns start … end - 1 of a row are."""
    if not isinstance(op.keys, IndexCache):
        values, scales = op.keys
        return values[start:end], scales[start:end]
    assert op.block_table is not None and op.windows.sequences is not None
    pages = op.block_table[int(op.windows.sequences[row])]
    return op.keys.read(page_rows(pages, op.keys.page_size, start, end))


def select(op: SelectOperands) -> list[list[int]]:
    """For every row its selected positions, counted from the window's start, ascending.

    Largest first; equal scores (-0.0 equals 0.0) by smaller position; NaN after -inf. Positions
    that are kept come before every score. A row of at most topk keys is selected whole.
    """
    chosen = []
    for row in range(op.scores.shape[0]):
        start, end = op.windows.of_row(row, op.scores.shape[1])
        n = end - start
        if n <= op.topk:
            chosen.append(list(range(n)))
            continue
        values = op.scores[row, start:end].double().tolist()

        def rank(s: int, values: list[float] = values, n: int = n) -> tuple[bool, bool, float, int]:
            kept = s < op.keep_first or s >= n - op.keep_last
            is_nan = values[s] != values[s]
            return not kept, is_nan, 0.0 if is_nan else -values[s], s

        chosen.append(sorted(sorted(range(n), key=rank)[: op.topk]))
    return chosen


def write_selection(op: SelectOperands, results: SelectResults, chosen: list[list[int]]) -> None:
    """Positions as they are asked for, then -1; counts; bits."""
    results.out.fill_(-1)
    if results.mask is not None:
        results.mask.zero_()
    for row, positions in enumerate(chosen):
        p = torch.tensor(positions, dtype=torch.int64, device="cpu")
        if results.counts is not None:
            results.counts[row] = len(positions)
        if not positions:
            continue
        results.out[row, : len(positions)] = written(op, row, p).to(results.out)
        if results.mask is not None:
            results.mask[row] = bits(p, results.mask.shape[1]).to(results.mask.device)


def written(op: SelectOperands, row: int, positions: Tensor) -> Tensor:
    """Positions of a row as physical rows (-1 past the end of the table), as columns of the scores,
    or as they are."""
    if op.block_table is not None and op.windows.sequences is not None:
        pages = op.block_table[int(op.windows.sequences[row])].cpu().long()
        entry = positions // op.page_size
        page = pages[entry.clamp(max=len(pages) - 1)]
        rows = page * op.page_size + positions % op.page_size
        return torch.where(entry < len(pages), rows, -1)
    return positions + max(int(op.windows.starts[row]), 0) if op.add_starts else positions


def bits(positions: Tensor, words: int) -> Tensor:
    """Positions as bits of int32 words.

    >>> bits(torch.tensor([0, 2, 31, 32]), 2).tolist()
    [-2147483643, 1]
    """
    flags = torch.zeros(32 * words, dtype=torch.int64, device="cpu")
    flags[positions] = 1
    unsigned = (flags.view(words, 32) << torch.arange(32, device="cpu")).sum(1)
    return torch.where(unsigned < 2**31, unsigned, unsigned - 2**32).int()


@dataclass(frozen=True, eq=False)
class ReferenceCall:
    """One step, to be computed here and now."""

    operands: IndexOperands
    results: Any

    def run(self) -> None:
        """Write what the windows say."""
        if isinstance(self.operands, SelectOperands):
            write_selection(self.operands, self.results, select(self.operands))
            return
        out: Tensor = self.results
        exact = scores(self.operands, out).scores
        for row in range(out.shape[0]):
            start, end = self.operands.windows.of_row(row, self.operands.columns(out))
            out[row, start:end] = exact[row, start:end].to(out)


def calls(plan: Plan, operands: IndexOperands, results: Any) -> Iterator[ReferenceCall]:
    """The one call."""
    yield ReferenceCall(operands, results)
