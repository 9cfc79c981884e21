"""Token-sparse MLA prefill on the CPU, latent form.

Called by kernels/launch.py only. A piece of work is a few neighboring tokens. For each of them:
find the rows that count, source by source, fetch them in blocks, and multiply them with all heads
at once, in one softmax. What is not a product is done for all tokens of a piece in one operation.
Products are made token by token, so bits do not depend on who else is in the piece.

The blocks of a token are divided into ranges by their number alone, so that a few tokens keep
several cores busy; ranges are merged in their order, whoever computed them. Scratch memory is one
block of rows per token of a piece, for each thread.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from openmla.kernels.cpu.online_softmax import Finished, OnlineSoftmax, merge
from openmla.kernels.cpu.plan import CpuConfig
from openmla.kernels.cpu.workers import divide, threads_for
from openmla.kernels.cpu.workspace import Workspace
from openmla.operands import AttendOperands, Results, SparseOperands
from openmla.sources import Source

Sparse = SparseOperands | AttendOperands


class _Run(NamedTuple):
    """Neighboring tokens that see as many rows as each other, in every source."""

    tokens: slice
    seen: list[list[Tensor]]
    """Physical rows, by token and by source."""

    def alone(self, i: int) -> "_Run":
        """Its token number `i`."""
        token = self.tokens.start + i
        return _Run(slice(token, token + 1), [self.seen[i]])


class _Block(NamedTuple):
    """Entries first … last-1 of the rows seen in a source."""

    source: int
    first: int
    last: int


def sparse(config: CpuConfig, op: Sparse, results: Results) -> None:
    """Fill `results`; a token without a key stays an empty row."""
    total, heads = op.q.shape[:2]
    listed = sum(source.most for source in op.sources)
    flops = 2.0 * total * heads * listed * (op.q.shape[2] + op.d_v)
    if total < threads_for(total * config.ranges, flops):
        _few(config, op, results, flops)
        return
    together = config.tokens_together(heads, listed, total)

    def piece(work: Workspace, first: int) -> None:
        for run in _runs(op, first, min(first + together, total)):
            parts = [_attend(op, work, run, blocks) for blocks in _ranges(config, op, run)]
            _store(config, op, results, work, run, parts)

    divide(piece, range(0, total, together), flops)


def _few(config: CpuConfig, op: Sparse, results: Results, flops: float) -> None:
    """Fewer tokens than threads: the ranges of all tokens are divided, then merged."""
    runs = [run for token in range(op.q.shape[0]) for run in _runs(op, token, token + 1)]
    pieces = [(run, blocks) for run in runs for blocks in _ranges(config, op, run)]
    parts = divide(lambda work, piece: _attend(op, work, *piece), pieces, flops)
    work = Workspace()
    for run in runs:
        own = [part for part, piece in zip(parts, pieces, strict=True) if piece[0] is run]
        _store(config, op, results, work, run, own)


def _runs(op: Sparse, first: int, last: int) -> list[_Run]:
    """Tokens first … last-1; a new run begins where another number of rows is seen."""
    by_source = [source.seen_by(first, last) for source in op.sources]
    seen = [list(rows) for rows in zip(*by_source, strict=True)]
    counts = [[rows.numel() for rows in of_token] for of_token in seen]
    starts = [i for i in range(last - first) if i == 0 or counts[i] != counts[i - 1]]
    ends = [*starts[1:], last - first]
    return [_Run(slice(first + a, first + b), seen[a:b]) for a, b in zip(starts, ends, strict=True)]


def _ranges(config: CpuConfig, op: Sparse, run: _Run) -> list[list[_Block]]:
    """The blocks of rows that a token of the run attends to, divided into ranges."""
    step = config.keys_per_block(op.q.shape[1])
    return config.in_ranges(
        [
            _Block(number, first, min(first + step, rows.numel()))
            for number, rows in enumerate(run.seen[0])
            for first in range(0, rows.numel(), step)
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
    if torch.isfinite(rows.out).all():
        return
    # Huge values overflowed, or a row holds Inf or NaN: rare enough to look only afterwards.
    for i in (~torch.isfinite(rows.out).flatten(1).all(1)).nonzero()[:, 0].tolist():
        one = run.alone(i)
        wild = [_attend(op, work, one, blocks, False) for blocks in _ranges(config, op, one)]
        again = merge(wild, op.weights.sink)
        results.write(one.tokens, *turned_back(op, one.tokens, again))


def turned_back(op: Sparse, tokens: slice, rows: Finished) -> Finished:
    """Rows of tokens with their last columns turned back, if the call asks for it."""
    turn = op.turn_back if isinstance(op, AttendOperands) else None
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
    for number, first, last in blocks:
        listed = [seen[number][first:last] for seen in run.seen]
        rows = [_fetch(op.sources[number], work, i, block) for i, block in enumerate(listed)]
        scores = work.take_apart("scores", *q.shape[:2], last - first)
        for i, of_token in enumerate(rows):
            torch.mm(q[i], of_token.T, out=scores[i])
        if op.weights.k_scale is not None:
            scores.mul_(op.weights.k_scale[torch.stack(listed)].unsqueeze(1))
        values = [of_token[:, : op.d_v] for of_token in rows]
        state.add_block(scores, values if tame else torch.stack(values), tame)
    return state.finish()


def _fetch(source: Source, work: Workspace, i: int, block: Tensor) -> Tensor:
    """Rows of a source in fp32."""
    rows = source.read(block)
    return rows if rows.dtype == torch.float32 else work.pack(f"rows {i}", rows)
