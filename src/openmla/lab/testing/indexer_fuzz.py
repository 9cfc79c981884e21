"""Random calls of the indexer against its definition: what `openmla check` runs beside attention.

Call number `seed` is a selection from given scores (which has no tolerance: a stable sort decides),
scores of contiguous keys in windows, or the whole of index_topk over shuffled pages. Memory that a
call does not address is NaN in its inputs, and inputs and outputs lie between margins that must not
change.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import openmla
from openmla.errors import Unsupported
from openmla.indexer.cache import MXFP4, MXFP4_BYTES, ROW_BYTES, IndexCache, quantize
from openmla.indexer.operands import ScoresOperands, SelectOperands, Windows
from openmla.indexer.problem import DIM
from openmla.indexer.reference import bits, select
from openmla.lab.testing.indexer import BOUND, score_problems, selection_fits
from openmla.lab.testing.memory.margin import MarginMemory
from openmla.problem import Backend

KINDS = ("random", "equal", "zeros", "coarse", "ascending", "nan", "infinite")
UNWRITTEN = 77.0
WIDTHS = (1, 2, 31, 32, 33, 63, 64, 65, 100, 127, 129, 255, 300, 513, 1025, 2049, 4100)
TOPKS = (1, 2, 31, 32, 64, 100, 512, 2048)


@dataclass(frozen=True)
class IndexResult:
    """What one call came to: right, refused or failed, and why."""

    status: str
    call: str
    problems: tuple[str, ...] = ()


def check_index_call(seed: int, backend: Backend = "auto", device: str = "cpu") -> IndexResult:
    """Draw call number `seed`, run it, judge it.

    >>> check_index_call(3).status
    'right'
    """
    rng = random.Random(seed)
    name = rng.choice(tuple(CALLS))
    memory = MarginMemory(device, "nan")
    torch.manual_seed(seed)
    try:
        found = CALLS[name](rng, memory, backend)
    except Unsupported as error:
        return IndexResult("refused", name, (error.reason,))
    found += memory.written()
    return IndexResult("failed" if found else "right", name, tuple(found))


def scores_of(kind: str, rows: int, width: int) -> Tensor:
    """Rows that make a selection hard: ties, both zeros, NaN, infinities."""
    x = torch.randn(rows, width)
    if kind == "equal":
        return torch.full_like(x, 1.5)
    if kind == "zeros":
        return torch.where(x > 1.5, x, 0.0 * x)
    if kind == "coarse":
        return (x * 4).round() / 4
    if kind == "ascending":
        return x.sort(-1).values
    if kind == "nan":
        return torch.where(x > 0, torch.nan, x)
    if kind == "infinite":
        return torch.where(x > 1, torch.inf, torch.where(x < 0, -torch.inf, x))
    return x


def _selection(rng: random.Random, memory: MarginMemory, backend: Backend) -> list[str]:
    rows, width, topk = rng.choice((1, 3, 8)), rng.choice(WIDTHS), rng.choice(TOPKS)
    starts, ends = _windows(rng, rows, width)
    scores = memory.new((rows, width), torch.float32, strided=rng.random() < 0.5)
    column = torch.arange(width)
    inside = (column >= starts[:, None]) & (column < ends[:, None])
    # Outside of a window is the NaN that the memory came with.
    drawn = scores_of(rng.choice(KINDS), rows, width)
    scores.copy_(torch.where(inside, drawn, torch.nan))
    first, last = memory.of(starts), memory.of(ends)
    out = memory.new((rows, topk), torch.int32)
    got, counts, mask = openmla.select_topk(
        scores,
        topk,
        starts=first,
        ends=last,
        out=out,
        return_counts=True,
        return_mask=True,
        backend=backend,
    )
    op = SelectOperands(scores.cpu(), topk, Windows(starts, ends))
    problems = []
    for row, chosen in enumerate(select(op)):
        want = torch.tensor([*chosen, *[-1] * (topk - len(chosen))], dtype=torch.int32)
        if not torch.equal(got[row].cpu(), want):
            problems.append(f"row {row}: selected {got[row].tolist()}, expected {want.tolist()}")
        if int(counts[row]) != len(chosen):
            problems.append(f"row {row}: counts {int(counts[row])}, expected {len(chosen)}")
        if not torch.equal(mask[row].cpu(), bits(torch.tensor(chosen).long(), mask.shape[1])):
            problems.append(f"row {row}: the mask has other bits than the positions")
    return problems


def _scores(rng: random.Random, memory: MarginMemory, backend: Backend) -> list[str]:
    rows, width, heads = rng.choice((1, 3, 9)), rng.choice(WIDTHS[:-2]), rng.choice((1, 5, 32, 64))
    q, weights = _queries(rows, heads)
    values, scales = quantize(torch.randn(width, DIM), "fp32")
    starts, ends = _windows(rng, rows, width)
    q, weights, values, scales, first, last = (
        memory.of(x) for x in (q, weights, values, scales, starts, ends)
    )
    out = memory.new((rows, width), torch.float32)
    out.fill_(UNWRITTEN)
    openmla.indexer_scores(
        q, (values, scales), weights, starts=first, ends=last, out=out, backend=backend
    )
    op = ScoresOperands(q.cpu(), weights.cpu(), (values.cpu(), scales.cpu()), Windows(starts, ends))
    return score_problems(op, out.cpu(), UNWRITTEN)


def _whole(rng: random.Random, memory: MarginMemory, backend: Backend) -> list[str]:
    """index_topk over a cache whose pages lie in no order, beside pages and entries of poison."""
    page, heads, topk = rng.choice((1, 16, 64)), rng.choice((1, 8, 64)), rng.choice(TOPKS[:-2])
    k_lens = [rng.choice(WIDTHS[:-4]) for _ in range(rng.choice((1, 2, 3)))]
    q_lens = [rng.randint(1, min(k, 5)) for k in k_lens]
    used = [-(-k // page) for k in k_lens]
    order = torch.randperm(sum(used) + 2).to(torch.int32)
    kind, row_bytes = rng.choice((("ue8m0", ROW_BYTES), (MXFP4, MXFP4_BYTES)))
    data = memory.new((sum(used) + 2, page * row_bytes), torch.uint8)
    data.fill_(0xFF)
    cache = IndexCache(data, page, kind)
    table = memory.new((len(k_lens), max(used) + 1), torch.int32)
    parts = torch.split(order[: sum(used)], used)
    keys = []
    for b, (pages, count) in enumerate(zip(parts, k_lens, strict=True)):
        table[b, : used[b]] = pages.to(table.device)
        position = torch.arange(count)
        slots = pages.long()[position // page] * page + position % page
        cache.append(torch.randn(count, DIM).to(data.device), slots.to(data.device))
        keys.append(cache.gather(slots.to(data.device)))
    q, weights = _queries(sum(q_lens), heads)
    cu = torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    out = memory.new((sum(q_lens), topk), torch.int32)
    got: Any = openmla.index_topk(
        memory.of(q),
        cache,
        memory.of(weights),
        topk,
        cu_seqlens_q=memory.of(cu),
        block_table=table,
        cache_lengths=memory.of(torch.tensor(k_lens, dtype=torch.int32)),
        rows="relative",
        scores_limit=rng.choice((1, 1 << 29)),
        out=out,
        backend=backend,
    )
    problems, row = [], 0
    for q_len, k_len, (values, scales) in zip(q_lens, k_lens, keys, strict=True):
        for i in range(q_len):
            n = k_len - q_len + i + 1
            exact, magnitude = _exact(q[row], weights[row], values[:n].cpu(), scales[:n].cpu())
            if not selection_fits(got[row].cpu(), exact, BOUND * magnitude, topk):
                problems.append(f"row {row}: selected {got[row].tolist()}, which leaves better out")
            row += 1
    return problems


def _exact(q: Tensor, weights: Tensor, values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of one query in float64, and the sums of their magnitudes."""
    q, w, k, scale = q.double(), weights.double(), values.double(), scales.double()
    exact = (w[:, None] * (q @ k.T).relu()).sum(0) * scale
    return exact, (w.abs()[:, None] * (q.abs() @ k.abs().T)).sum(0) * scale


def _queries(rows: int, heads: int) -> tuple[Tensor, Tensor]:
    q, scale = quantize(torch.randn(rows * heads, DIM), "fp32")
    return q.view(rows, heads, DIM), torch.randn(rows, heads) * scale.view(rows, heads)


def _windows(rng: random.Random, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Whole rows, parts of them, empty ones, and some that reach out of the row."""
    starts = [rng.choice((0, 0, rng.randint(0, width), -3)) for _ in range(rows)]
    ends = [rng.choice((width, rng.randint(0, width), width + 5, -1)) for _ in range(rows)]
    return torch.tensor(starts, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32)


Call = Callable[[random.Random, MarginMemory, Backend], list[str]]
CALLS: dict[str, Call] = {
    "select_topk": _selection,
    "indexer_scores": _scores,
    "index_topk": _whole,
}
