"""Cases of the indexer's scores for kernels in the simulator: windows, heads, pages."""

from __future__ import annotations

from dataclasses import replace

import torch

from indexer import cases
from openmla.indexer.cache import quantize
from openmla.indexer.operands import ScoresOperands, Windows
from openmla.indexer.windows import paged_windows

UNWRITTEN = 12345.0
SCHEDULES = [("early", 0), ("late", 0), ("random", 1), ("unfair", 2)]


def paged(
    q_lens: list[int], k_lens: list[int], heads: int, page_size: int, scales: str = "ue8m0"
) -> ScoresOperands:
    case = cases.paged(q_lens, k_lens, heads=heads, page_size=page_size, scales=scales)
    o = case.options
    windows = paged_windows(o["cu_seqlens_q"], o["cache_lengths"], case.q.shape[0])
    return ScoresOperands(case.q, case.weights, case.keys, windows, o["block_table"])


def pair(starts: list[int], ends: list[int], keys: int, heads: int) -> ScoresOperands:
    q, weights = cases.queries(len(starts), heads)
    windows = Windows(*(torch.tensor(x, dtype=torch.int32) for x in (starts, ends)))
    return ScoresOperands(q, weights, quantize(cases.keys(keys), "fp32"), windows)


def among_many(keys: int, scored: int) -> ScoresOperands:
    """A few of many contiguous keys are scored."""
    op = pair([0, 1], [scored, scored - 1], scored, 64)
    values, scales = op.keys
    more = values.new_zeros(keys, values.shape[1]), scales.new_zeros(keys)
    for x, few in zip(more, op.keys, strict=True):
        x[:scored] = few
    return replace(op, keys=more)


SCORE_CASES = {
    "causal, several pieces": pair([0] * 11, list(range(590, 601)), 600, 64),
    "random windows": pair(
        [3, 130, 64, 500, 20, 0, -7, 299, 300, 1],
        [5, 400, 64, 601, 10, 300, 128, 301, 450, 64],
        600,
        64,
    ),
    "32 heads": pair([0, 70, 3] * 6, [300, 200, 299] * 6, 300, 32),
    "128 heads": pair([0, 70, 3, 9, 0], [200, 130, 64, 199, 0], 200, 128),
    "far window": pair([900] * 9, [1000] * 9, 1000, 64),
    "one key": pair([0], [1], 1, 64),
    "pages of 64": paged([5, 0, 4, 7], [300, 9, 70, 129], 64, 64),
    "pages of 32": paged([9, 3], [100, 290], 64, 32),
    "pages of 96, 32 heads": paged([20, 1, 2], [100, 200, 2], 32, 96),
    "a full table": paged([3], [192], 64, 64),
    "no keys": paged([3, 2], [0, 5], 64, 64),
}


def width_of(op: ScoresOperands) -> int:
    """Columns of an output that holds all scores."""
    return op.block_table.shape[1] * op.keys.page_size if op.block_table is not None else 1000
