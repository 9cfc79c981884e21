"""Token-sparse MLA prefill on the CPU, latent form.

Called by kernels/launch.py only. A piece of work is a few neighboring tokens. For each of them:
find the rows that count, source by source, fetch them in blocks, and multiply them with all heads
at once, in one softmax. What is not a product is done for all tokens of a piece in one operation.
Products are made token by token, so bits do not depend on the other tokens of the piece.

What neighbors see in common is fetched once: the positions of spans for all tokens of a piece, and
quantized rows that lists name often for the whole call (seen.py). Each token multiplies a slice.

The blocks of a token are divided into ranges by their number alone, so that a few tokens keep
several cores busy; ranges are merged in their order, whichever thread computed them. Scratch memory
is one block of rows per token of a piece, for each thread, and 64 MB of rows that lists name often.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from openmla.kernels.cpu.online_softmax import Finished, OnlineSoftmax, is_finite, merge
from openmla.kernels.cpu.plan import CpuConfig
from openmla.kernels.cpu.seen import AT_ONCE, Seen, longest, read_once, seen_by
from openmla.kernels.cpu.workers import divide, threads_for
from openmla.kernels.cpu.workspace import CACHE_LINE, Workspace
from openmla.operands import AttendOperands, Results, SparseOperands
from openmla.sources import Source, Span

Sparse = SparseOperands | AttendOperands

MOST_SHARED = 1024
"""Rows of a span that are kept in fp32 for all tokens of a piece, 2 MB of 512 columns."""


class _Run(NamedTuple):
    """Neighboring tokens that see as many rows as each other, in every source."""

    tokens: slice
    seen: list[Seen]
    """By source."""

    def alone(self, i: int) -> "_Run":
        """Its token number `i`."""
        token = self.tokens.start + i
        return _Run(slice(token, token + 1), [seen.of(i, i + 1) for seen in self.seen])


class _Block(NamedTuple):
    """Entries first … last-1 of the rows seen in a source."""

    source: int
    first: int
    last: int


def sparse(config: CpuConfig, op: Sparse, results: Results) -> None:
    """Fill `results`; a token without a key stays an empty row."""
    total, heads = op.q.shape[:2]
    keys = sum(longest(source) for source in op.sources)
    flops = 2.0 * total * heads * keys * (op.q.shape[2] + op.d_v)
    if total < threads_for(total * config.ranges, flops):
        _few(config, op, results, flops)
        return
    sources = tuple(read_once(source) for source in op.sources)
    op = AttendOperands(op.q, sources, op.d_v, op.weights, op.turn_back)
    spans = [isinstance(source, Span) for source in op.sources]
    together = config.tokens_together(heads, keys, total, shared=all(spans))
    tokens = config.tokens_together(heads, keys, total, shared=True) if any(spans) else together

    def piece(work: Workspace, first: int) -> None:
        last = min(first + tokens, total)
        seen = [seen_by(source, first, last) for source in op.sources]
        for number, source in enumerate(op.sources):
            if spans[number] and seen[number].rows.numel() <= MOST_SHARED:
                values = _read(source, work, f"shared {number}", seen[number].rows)
                seen[number] = seen[number]._replace(values=values)
        for run in _runs(seen, first, together):
            parts = [_attend(op, work, run, blocks) for blocks in _ranges(config, op, run)]
            _store(config, op, results, work, run, parts)

    divide(piece, range(0, total, tokens), flops)


def _few(config: CpuConfig, op: Sparse, results: Results, flops: float) -> None:
    """Fewer tokens than threads: the ranges of all tokens are divided, then merged."""
    runs = []
    for token in range(op.q.shape[0]):
        seen = [seen_by(source, token, token + 1) for source in op.sources]
        runs.append(_Run(slice(token, token + 1), seen))
    pieces = [(run, blocks) for run in runs for blocks in _ranges(config, op, run)]
    parts = divide(lambda work, piece: _attend(op, work, *piece), pieces, flops)
    work = Workspace()
    for run in runs:
        own = [part for part, piece in zip(parts, pieces, strict=True) if piece[0] is run]
        _store(config, op, results, work, run, own)


def _runs(seen: list[Seen], first: int, most: int) -> list[_Run]:
    """Tokens first …, at most so many in a run; a new one begins where another number of rows is
    seen."""
    runs: list[_Run] = []
    counts = list(zip(*([p.stop - p.start for p in of.places] for of in seen), strict=True))
    start = 0
    for i in range(1, len(counts) + 1):
        if i == len(counts) or counts[i] != counts[start] or i - start == most:
            here = slice(first + start, first + i)
            runs.append(_Run(here, [of.of(start, i) for of in seen]))
            start = i
    return runs


def _ranges(config: CpuConfig, op: Sparse, run: _Run) -> list[list[_Block]]:
    """The blocks of rows that a token of the run attends to, divided into ranges."""
    step = config.keys_per_block(op.q.shape[1])
    return config.in_ranges(
        [
            _Block(number, first, min(first + step, place.stop - place.start))
            for number, place in enumerate(seen.places[0] for seen in run.seen)
            for first in range(0, place.stop - place.start, step)
        ]
    )


def _store(
    config: CpuConfig,
    op: Sparse,
    results: Results,
    work: Workspace,
    run: _Run,
    parts: list[Finished],
) -> None:
    """Merge the ranges of a run and write its rows; without any they stay empty rows."""
    if not parts:
        return
    rows = merge(parts, op.weights.sink)
    results.write(run.tokens, *turned_back(op, run.tokens, rows))
    if is_finite(rows.out):
        return
    # Huge values overflowed, or a row holds Inf or NaN: rare enough to look only afterwards.
    for i in (~torch.isfinite(rows.out).flatten(1).all(1)).nonzero()[:, 0].tolist():
        one = run.alone(i)
        wild = [_attend(op, work, one, blocks, False) for blocks in _ranges(config, op, one)]
        again = merge(wild, op.weights.sink)
        results.write(one.tokens, *turned_back(op, one.tokens, again))


def turned_back(op: Sparse, tokens: slice, rows: Finished) -> Finished:
    """Rows of tokens with their last columns turned back, if the call asks for it."""
    turn = op.turn_back
    if turn is None:
        return rows
    cos, sin = (x.unsqueeze(1) for x in turn.cos_sin(tokens))
    still = rows.out.shape[-1] - turn.columns
    a, b = rows.out[..., still::2], rows.out[..., still + 1 :: 2]
    pairs = torch.stack([a * cos + b * sin, b * cos - a * sin], dim=-1).flatten(-2)
    pairs.masked_fill_((rows.lse == -torch.inf).unsqueeze(-1), 0.0)  # +0, whatever the angle is
    return rows._replace(out=torch.cat([rows.out[..., :still], pairs], dim=-1))


def _attend(
    op: Sparse, work: Workspace, run: _Run, blocks: list[_Block], tame: bool = True
) -> Finished:
    """The tokens of a run over some of their rows; `tame` as in `OnlineSoftmax.add_block`."""
    q = work.pack_apart("q", op.q[run.tokens]).mul_(op.weights.scale)
    if op.weights.q_scale is not None:
        q.mul_(op.weights.q_scale[run.tokens, None, None])
    tokens, heads = q.shape[:2]
    state = OnlineSoftmax(tokens, heads, op.d_v)
    for block in blocks:
        seen = run.seen[block.source].entries(block.first, block.last)
        rows = _fetch(op.sources[block.source], work, seen)
        scores = work.take_apart("scores", tokens, heads, block.last - block.first)
        for i, of_token in enumerate(rows):
            torch.mm(q[i], of_token.T, out=scores[i])
        if op.weights.k_scale is not None:
            factors = op.weights.k_scale[torch.stack([seen.rows[place] for place in seen.places])]
            scores.mul_(factors.unsqueeze(1))
        values = [of_token[:, : op.d_v] for of_token in rows]
        state.add_block(scores, values if tame else torch.stack(values), tame)
    return state.finish()


def _fetch(source: Source, work: Workspace, seen: Seen) -> list[Tensor]:
    """By token, its rows of a source in fp32; what several have in common is there once."""
    values = seen.values
    if values is None:
        values = _read(source, work, "rows", seen.rows)
    found = [values[place] for place in seen.places]
    if values.shape[1] % CACHE_LINE == 0:
        return found
    # A product may have other bits where its rows begin inside of a cache line.
    return [work.pack(f"rows {i}", own) for i, own in enumerate(found)]


def _read(source: Source, work: Workspace, name: str, rows: Tensor) -> Tensor:
    """Rows in fp32, so many at a time that what dequantizing makes on the way stays in caches."""
    first = source.read(rows[:AT_ONCE])
    if first.dtype == torch.float32 and rows.numel() <= AT_ONCE:
        return first
    values = work.take(name, rows.numel(), first.shape[1])
    values[:AT_ONCE] = first
    for start in range(AT_ONCE, rows.numel(), AT_ONCE):
        values[start : start + AT_ONCE] = source.read(rows[start : start + AT_ONCE])
    return values
