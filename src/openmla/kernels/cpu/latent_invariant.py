"""An invariant call of latent attention on the CPU: a row's bits depend on its own keys alone.

Called by latent.py only. One token at a time is multiplied by blocks that always have as many keys,
of which those that it does not see are zeros and hidden: a matrix product's bits depend on its
shape. Rows are still fetched once for the tokens of a tile, the piece of work that one thread
takes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from openmla.kernels.cpu.online_softmax import OnlineSoftmax, is_tame
from openmla.kernels.cpu.plan import CpuConfig
from openmla.kernels.cpu.workers import divide
from openmla.kernels.cpu.workspace import Workspace
from openmla.operands import LatentOperands, Results
from openmla.sequences import (
    SequenceSpan,
    first_key,
    first_key_of,
    page_rows,
    paged_spans,
    visible_keys,
)


class _Tile(NamedTuple):
    """Tokens start … stop-1 of one sequence, all heads."""

    span: SequenceSpan
    start: int
    stop: int


def invariant_latent(config: CpuConfig, op: LatentOperands, results: Results) -> None:
    """Fill `results`; rows that belong to no sequence stay empty rows."""
    tokens, tiles, scores = config.tokens_per_tile(op.q.shape[1]), [], 0
    for span in paged_spans(op.cu_seqlens_q, op.cache_lengths):
        scores += op.q.shape[1] * span.q_len * min(span.k_len, op.window or span.k_len)
        for start in range(0, span.q_len, tokens):
            tiles.append(_Tile(span, start, min(start + tokens, span.q_len)))

    def work_on(work: Workspace, tile: _Tile) -> None:
        _attend(config, op, results, work, tile)

    divide(work_on, tiles, 2.0 * scores * (op.q.shape[2] + op.d_v))


class _Token:
    """One token: its queries, the keys it sees and what it has seen so far."""

    def __init__(self, op: LatentOperands, span: SequenceSpan, number: int) -> None:
        self.place = span.q_start + number
        self.seen = visible_keys(number, span.q_len, span.k_len, op.causal)
        self.first = first_key(self.seen, op.window)
        self.q = op.q[self.place].to(torch.float32, copy=True).contiguous().mul_(op.weights.scale)
        if op.weights.q_scale is not None:
            self.q.mul_(op.weights.q_scale[self.place])
        self.state = OnlineSoftmax(1, self.q.shape[0], op.d_v)

    def meet(self, work: Workspace, block: Tensor, first: int, factors: Tensor | None) -> None:
        """Take in those rows of a block of keys first … that it sees."""
        before, count = max(self.first - first, 0), min(self.seen - first, len(block))
        if count <= before:
            return
        rows = block
        if before or count < len(block):
            rows = work.pack("seen", block)
            rows[:before] = 0.0
            rows[count:] = 0.0
        scores = work.take("scores", 1, self.q.shape[0], len(block))
        torch.mm(self.q, rows.T, out=scores[0])
        if factors is not None:
            scores.mul_(factors)
        scores[..., :before] = -torch.inf
        scores[..., count:] = -torch.inf
        self.state.add_block(scores, rows[None, :, : self.state.o.shape[2]], is_tame(rows))


def _attend(
    config: CpuConfig, op: LatentOperands, results: Results, work: Workspace, tile: _Tile
) -> None:
    """The tokens of a tile, one by one, over blocks of keys that are fetched once."""
    span = tile.span
    tokens = [_Token(op, span, number) for number in range(tile.start, tile.stop)]
    begin = min(token.first for token in tokens) // config.BN * config.BN
    for first in range(begin, max(token.seen for token in tokens), config.BN):
        last = min(first + config.BN, span.k_len)
        read = max(first, first_key_of(span, op.window))
        slots = page_rows(op.block_table[span.number], op.cache.page_size, read, last)
        filled = slice(read - first, last - first)
        block = work.take("rows", config.BN, op.q.shape[2])
        block[: filled.start] = 0.0
        block[filled] = op.cache.read(slots)
        block[filled.stop :] = 0.0
        factors = None
        if op.weights.k_scale is not None:
            factors = torch.ones(config.BN, dtype=torch.float32, device="cpu")
            factors[filled] = op.weights.k_scale[slots]
        for token in tokens:
            token.meet(work, block, first, factors)
    for token in tokens:
        if token.seen:
            found = token.state.finish(op.weights.sink)
            results.write(token.place, *(x[0] for x in found))
