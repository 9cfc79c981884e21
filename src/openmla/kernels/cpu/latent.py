"""Dense MLA prefill on the CPU, latent form over a paged cache.

Called by kernels/launch.py only. All heads of a token read the same rows, so a tile is tokens ×
heads rows of one matrix product, and a cache row is fetched (and dequantized) once per tile.
"""

import torch

from openmla.kernels.cpu.online_softmax import OnlineSoftmax, hide_future_keys, is_tame
from openmla.kernels.cpu.plan import CpuConfig
from openmla.kernels.cpu.workspace import Workspace
from openmla.operands import LatentOperands, Results
from openmla.sequences import Span, page_rows, paged_spans, visible_keys


def latent(config: CpuConfig, op: LatentOperands, results: Results) -> None:
    """Fill `results`; rows that belong to no sequence stay empty rows."""
    work = Workspace()
    tokens = config.tokens_per_tile(op.q.shape[1])
    for span in paged_spans(op.cu_seqlens_q, op.cache_lengths):
        for start in range(0, span.q_len, tokens):
            _tile(config, op, results, work, span, start, min(start + tokens, span.q_len))


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
