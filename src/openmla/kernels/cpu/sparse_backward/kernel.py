"""Gradients of sparse attention over plain rows, on the CPU.

One query at a time: rows of its list are fetched in blocks, multiplied with all heads at once, and
what each entry gives to its row is added to a buffer of all rows, in fp32. So a row adds its
entries in the order of queries and of their lists, and bits are the same every time. Formulas are
those of openmla.backward.sparse_reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backward.sparse_operands import RowGradients, SparseBackwardOperands
from openmla.kernels.cpu.online_softmax import LOG2_E
from openmla.kernels.cpu.sparse_backward.plan import CpuSparseBackwardConfig
from openmla.kernels.cpu.workspace import Workspace


def sparse_backward(
    config: CpuSparseBackwardConfig, op: SparseBackwardOperands, grads: RowGradients
) -> None:
    """Fill `grads`, which hold +0."""
    work, forward = Workspace(), op.forward
    d_rows = None
    if grads.rows is not None:
        d_rows = torch.zeros(grads.rows.shape, dtype=torch.float32, device="cpu")
    for token in range(forward.q.shape[0]):
        seen = forward.sources[0].seen(token)
        if seen.numel():
            _token(config, op, grads, work, token, seen, d_rows)
    if grads.rows is not None and d_rows is not None:
        grads.rows.copy_(d_rows)
    if grads.sink is not None:
        grads.sink.add_(0.0)  # of -0, +0


def _token(
    config: CpuSparseBackwardConfig,
    op: SparseBackwardOperands,
    grads: RowGradients,
    work: Workspace,
    token: int,
    seen: Tensor,
    d_rows: Tensor | None,
) -> None:
    """One query: its d_q, its part of d_sink, and what it gives to the rows of its list."""
    forward = op.forward
    scale, sink, d_v = forward.weights.scale, forward.weights.sink, forward.d_v
    q, d_out = work.pack("q", forward.q[token]), work.pack("d_out", op.d_out[token])
    lse = op.lse[token]
    d_sum = (op.out[token].float() * d_out).sum(-1)
    total, d_lse = lse, None if op.d_lse is None else op.d_lse[token]
    if sink is not None:
        total = torch.logaddexp(lse, sink)
        if grads.sink is not None:
            grads.sink.sub_(d_sum / (1 + torch.exp(lse - sink)))
    elif d_lse is not None:
        d_sum, d_lse = d_sum - d_lse, None
    d_q = torch.zeros_like(q)
    for first in range(0, seen.numel(), config.BN):
        block = seen[first : first + config.BN]
        rows = work.pack("rows", forward.read(block))
        scores = torch.mm(q, rows.T).mul_(scale)
        p = ((scores - total[:, None]) * LOG2_E).exp2_()
        d_scores = torch.mm(d_out, rows[:, :d_v].T).sub_(d_sum[:, None]).mul_(p)
        if d_lse is not None:
            d_scores += ((scores - lse[:, None]) * LOG2_E).exp2_().mul_(d_lse[:, None])
        d_scores.mul_(scale)
        d_q.addmm_(d_scores, rows)
        if d_rows is not None:
            each = torch.mm(d_scores.T, q)
            each[:, :d_v].addmm_(p.T, d_out)
            d_rows.index_add_(0, block, each)
    if grads.q is not None:
        grads.q[token] = d_q.add_(0.0).to(grads.q.dtype)
