"""Dense MLA prefill on the CPU, latent form over a paged cache.

Called by kernels/launch.py only. All heads of a token read the same rows, so a tile is tokens ×
heads rows of one matrix product, and a cache row is fetched (and dequantized) once per tile.

An invariant call multiplies one token at a time by blocks that always have as many keys, of which
zeros are hidden: a matrix product's bits depend on its shape. Rows are still fetched once per tile.
"""

import torch
from torch import Tensor

from openmla.kernels.cpu.online_softmax import OnlineSoftmax, hide_future_keys, is_tame
from openmla.kernels.cpu.plan import CpuConfig
from openmla.kernels.cpu.workspace import Workspace
from openmla.operands import LatentOperands, Results
from openmla.sequences import Span, page_rows, paged_spans, visible_keys


def latent(config: CpuConfig, op: LatentOperands, results: Results) -> None:
    """Fill `results`; rows that belong to no sequence stay empty rows."""
    work = Workspace()
    tokens = config.tokens_per_tile(op.q.shape[1])
    tile = _tokens_apart if op.invariant else _tile
    for span in paged_spans(op.cu_seqlens_q, op.cache_lengths):
        for start in range(0, span.q_len, tokens):
            tile(config, op, results, work, span, start, min(start + tokens, span.q_len))


def _tile(
    config: CpuConfig,
    op: LatentOperands,
    results: Results,
    work: Workspace,
    span: Span,
    start: int,
    stop: int,
) -> None:
    """Tokens start … stop-1 of one sequence, all heads."""
    heads = op.q.shape[1]
    tokens = slice(span.q_start + start, span.q_start + stop)
    q = work.pack("q", op.q[tokens]).mul_(op.weights.scale)
    if op.weights.q_scale is not None:
        q.mul_(op.weights.q_scale[tokens, None, None])
    q = q.flatten(0, 1)

    state = OnlineSoftmax(1, q.shape[0], op.d_v)
    seen_by_last = visible_keys(stop - 1, span.q_len, span.k_len, op.causal)
    step = config.keys_per_block(q.shape[0])
    for first in range(0, seen_by_last, step):
        last = min(first + step, seen_by_last)
        slots = page_rows(op.block_table[span.number], op.cache.page_size, first, last)
        rows = work.pack("rows", op.cache.read(slots))
        scores = work.take("scores", 1, q.shape[0], last - first)
        torch.mm(q, rows.T, out=scores[0])
        if op.weights.k_scale is not None:
            scores.mul_(op.weights.k_scale[slots])
        if op.causal:
            hide_future_keys(scores, span, start, first, rows_per_query=heads)
        state.add_block(scores, rows[None, :, : op.d_v], is_tame(rows))

    sink = None if op.weights.sink is None else op.weights.sink.repeat(stop - start)
    results.write(tokens, *(x.unflatten(1, (-1, heads))[0] for x in state.finish(sink)))


class _Token:
    """One token of an invariant call: its queries, the keys it sees and what it has seen so far."""

    def __init__(self, op: LatentOperands, span: Span, number: int) -> None:
        self.place = span.q_start + number
        self.seen = visible_keys(number, span.q_len, span.k_len, op.causal)
        self.q = op.q[self.place].to(torch.float32, copy=True).contiguous().mul_(op.weights.scale)
        if op.weights.q_scale is not None:
            self.q.mul_(op.weights.q_scale[self.place])
        self.state = OnlineSoftmax(1, self.q.shape[0], op.d_v)

    def meet(self, work: Workspace, block: Tensor, first: int, factors: Tensor | None) -> None:
        """Take in those rows of a block of keys first … that it sees."""
        count = min(self.seen - first, len(block))
        if count <= 0:
            return
        rows = block
        if count < len(block):
            rows = work.pack("seen", block)
            rows[count:] = 0.0
        scores = work.take("scores", 1, self.q.shape[0], len(block))
        torch.mm(self.q, rows.T, out=scores[0])
        if factors is not None:
            scores.mul_(factors)
        scores[..., count:] = -torch.inf
        self.state.add_block(scores, rows[None, :, : self.state.o.shape[2]], is_tame(rows))


def _tokens_apart(
    config: CpuConfig,
    op: LatentOperands,
    results: Results,
    work: Workspace,
    span: Span,
    start: int,
    stop: int,
) -> None:
    """Tokens start … stop-1 of one sequence, all heads, of an invariant call."""
    tokens = [_Token(op, span, number) for number in range(start, stop)]
    for first in range(0, max(token.seen for token in tokens), config.BN):
        last = min(first + config.BN, span.k_len)
        slots = page_rows(op.block_table[span.number], op.cache.page_size, first, last)
        block = work.take("rows", config.BN, op.q.shape[2])
        block[: last - first] = op.cache.read(slots)
        block[last - first :] = 0.0
        factors = None
        if op.weights.k_scale is not None:
            factors = torch.ones(config.BN, dtype=torch.float32, device="cpu")
            factors[: last - first] = op.weights.k_scale[slots]
        for token in tokens:
            token.meet(work, block, first, factors)
    for token in tokens:
        if token.seen:
            found = token.state.finish(op.weights.sink)
            results.write(token.place, *(x[0] for x in found))
