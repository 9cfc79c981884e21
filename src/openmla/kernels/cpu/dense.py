"""Dense MLA prefill on the CPU, MHA form.

Called by kernels/launch.py only. For each sequence, group of heads and tile of BM queries it walks
the keys in blocks of BN: pack to fp32, multiply, online softmax, multiply. Matrix products are
batched over the heads of a group, which is what keeps all cores busy. The rope product is one
matrix product for all heads of the group: shared rope rows are never copied per head.

fp32 arithmetic throughout: torch's CPU matrix products round bf16 scores to bf16, which would cost
more accuracy than the output rounding itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.kernels.cpu.online_softmax import OnlineSoftmax
from openmla.kernels.cpu.workspace import Workspace
from openmla.operands import DenseOperands, Results
from openmla.plan.cpu import CpuConfig
from openmla.sequences import Span, page_rows, ragged_spans, visible_keys


def dense(config: CpuConfig, op: DenseOperands, results: Results) -> None:
    """Fill `results`; rows that belong to no sequence become empty rows."""
    clear_results(results)
    work = Workspace()
    for span in ragged_spans(op.cu_seqlens_q, op.cu_seqlens_k):
        for heads in config.head_groups(op.q.shape[1], span.q_len):
            for start in range(0, span.q_len, config.BM):
                stop = min(start + config.BM, span.q_len)
                _tile(config, op, results, work, span, heads, start, stop)


def clear_results(results: Results) -> None:
    """Make every row an empty row: zeros, -inf."""
    results.out.zero_()
    for rows in (results.lse, results.max_logits):
        if rows is not None:
            rows.fill_(-torch.inf)


def _tile(
    config: CpuConfig,
    op: DenseOperands,
    results: Results,
    work: Workspace,
    span: Span,
    heads: slice,
    start: int,
    stop: int,
) -> None:
    """Queries start … stop-1 of one sequence, one group of heads."""
    d_nope = op.k_nope.shape[-1]
    tokens = slice(span.q_start + start, span.q_start + stop)
    q = op.q[tokens, heads].transpose(0, 1)
    q_nope = work.pack("q_nope", q[..., :d_nope])
    q_rope = work.pack("q_rope", q[..., d_nope:])
    for part in (q_nope, q_rope):
        part.mul_(op.weights.scale)
        if op.weights.q_scale is not None:
            part.mul_(op.weights.q_scale[tokens, None])

    state = OnlineSoftmax(q.shape[0], stop - start, op.v.shape[-1])
    seen_by_last = visible_keys(stop - 1, span.q_len, span.k_len, op.causal)
    for first in range(0, seen_by_last, config.BN):
        last = min(first + config.BN, seen_by_last)
        keys = slice(span.k_start + first, span.k_start + last)
        scores = work.take("scores", q.shape[0], stop - start, last - first)
        k_nope = work.pack("k_nope", op.k_nope[keys, heads].transpose(0, 1))
        torch.bmm(q_nope, k_nope.transpose(1, 2), out=scores)
        _add_rope_scores(op, work, span, heads, (first, last), q_rope, scores)
        if op.weights.k_scale is not None:
            scores.mul_(op.weights.k_scale[keys])
        if op.causal:
            mask_causal(scores, span, start, stop, first, last)
        state.add_block(scores, work.pack("v", op.v[keys, heads].transpose(0, 1)))

    sink = None if op.weights.sink is None else op.weights.sink[heads, None]
    out, lse, max_logits = state.finish(sink)
    results.out[tokens, heads] = out.transpose(0, 1).to(results.out.dtype)
    if results.lse is not None:
        results.lse[tokens, heads] = lse.T
    if results.max_logits is not None:
        results.max_logits[tokens, heads] = max_logits.T


def _add_rope_scores(
    op: DenseOperands,
    work: Workspace,
    span: Span,
    heads: slice,
    block: tuple[int, int],
    q_rope: Tensor,
    scores: Tensor,
) -> None:
    """scores += q_rope . k_rope for keys block[0] … block[1]-1 of the sequence."""
    if not q_rope.shape[-1]:
        return
    keys = slice(span.k_start + block[0], span.k_start + block[1])
    if op.k_rope is not None and op.k_rope.dim() == 3:
        k_rope = work.pack("k_rope", op.k_rope[keys, heads].transpose(0, 1))
        scores.baddbmm_(q_rope, k_rope.transpose(1, 2))
        return
    if op.k_rope is not None:
        rows = op.k_rope[keys]
    else:
        cache, table = op.rope_cache, op.block_table
        assert cache is not None and table is not None
        slots = page_rows(table[span.index], cache.page_size, *block)
        rows = cache.read(slots, slice(cache.latent, None))
    k_rope = work.pack("k_rope", rows)
    scores.flatten(0, 1).addmm_(q_rope.flatten(0, 1), k_rope.T)


def mask_causal(
    scores: Tensor, span: Span, start: int, stop: int, first: int, last: int, repeat: int = 1
) -> None:
    """-inf where a key comes after its query; nothing to do left of the diagonal.

    Row r of `scores` belongs to query start + r // repeat.
    """
    if visible_keys(start, span.q_len, span.k_len) >= last:
        return
    seen = torch.arange(start, stop) + (span.k_len - span.q_len + 1)
    hidden = torch.arange(first, last) >= seen[:, None]
    scores.masked_fill_(hidden.repeat_interleave(repeat, dim=0), -torch.inf)
