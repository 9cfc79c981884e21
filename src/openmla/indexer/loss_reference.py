"""The definition of an indexer's loss and its gradients: float64, one query row at a time.

Of one row, over the keys s that it sees, with P_h the weights of attention's head h:

    target     p_s = sum over heads P_hs / sum over heads and keys P_hs             no gradient
    score      I_s = sum over index heads w_h * relu(z_hs)            z_hs = q_h . k_s
    loss           = sum over keys p_s * (log p_s - log softmax(I)_s)         KL(p || softmax(I))

    dI_s       = d_loss * (softmax(I)_s - p_s)             dz_hs = dI_s * w_h where z_hs > 0, else 0
    d_w_h      = sum over keys dI_s * relu(z_hs)           d_q_h = sum over keys dz_hs * k_s
    d_k_s      = sum over rows and heads dz_hs * q_h

A row that sees no key, or whose heads all look at their sinks, has no target: loss and gradients
are 0. P comes of the lse that attention returned, taken as it is; p does not depend on an error
that all its heads share.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla.indexer.loss_operands import LossGradients, LossOperands
from openmla.reference import masked_keys
from openmla.sequences import ragged_spans, visible_keys


class Row(NamedTuple):
    """One query row and the keys that it sees, in float64."""

    row: int
    keys: Tensor
    """Rows of the keys, int64 [n]."""
    q: Tensor
    """[index heads, width]"""
    k: Tensor
    """[n, width]"""
    w: Tensor
    """[index heads]"""
    z: Tensor
    """[index heads, n]"""
    share: Tensor
    """[n]: softmax(I)."""
    target: Tensor
    """[n]: p."""
    loss: Tensor
    """[]"""


class ExactLoss(NamedTuple):
    """float64: the loss of every row, and the gradients of sum(loss * d_loss)."""

    loss: Tensor
    q: Tensor
    k: Tensor
    weights: Tensor


def index_loss(op: LossOperands) -> ExactLoss:
    """The loss, and its gradients where `d_loss` is given (of a sum of all rows otherwise)."""
    shapes = op.index_q.shape, op.index_k.shape, op.index_weights.shape
    loss = torch.zeros(op.index_q.shape[0], dtype=torch.float64, device=op.device)
    d_q, d_k, d_w = (loss.new_zeros(shape) for shape in shapes)
    for row in rows(op):
        loss[row.row] = row.loss
        come = 1.0 if op.d_loss is None else op.d_loss[row.row].double()
        d_scores = come * (row.share - row.target)
        d_z = d_scores * row.w[:, None] * (row.z > 0)
        d_w[row.row] = row.z.clamp_min(0) @ d_scores
        d_q[row.row] = d_z @ row.k
        d_k.index_add_(0, row.keys, d_z.T @ row.q)
    return ExactLoss(loss, *(x + 0.0 for x in (d_q, d_k, d_w)))  # of -0, +0


def rows(op: LossOperands) -> Iterator[Row]:
    """Every query row that has a target, in order."""
    attention = op.attention
    for span in ragged_spans(attention.cu_seqlens_q, attention.cu_seqlens_k):
        for i in range(span.q_len):
            row = span.q_start + i
            n = visible_keys(i, span.q_len, span.k_len, attention.causal)
            seen: Any = slice(n)
            if attention.key_mask is not None:
                seen = masked_keys(attention.key_mask[row], n)
            ids = torch.arange(span.k_start, span.k_start + span.k_len, device=op.device)[seen]
            weights = head_sums(op, row, ids) if len(ids) else ids.double()
            if not weights.sum() > 0:
                continue
            target = weights / weights.sum()
            q, w = op.index_q[row].double(), op.index_weights[row].double()
            k = op.index_k[ids].double()
            z = q @ k.T
            log_share = torch.log_softmax(w @ z.clamp_min(0), dim=0)
            loss = torch.xlogy(target, target).sum() - (target * log_share).sum()
            yield Row(row, ids, q, k, w, z, log_share.exp(), target, loss)


def head_sums(op: LossOperands, row: int, keys: Tensor) -> Tensor:
    """[n]: attention's weights of the keys, summed over its heads."""
    attention = op.attention
    heads = attention.q.shape[1]
    k = attention.k_nope[keys].double()
    if attention.k_rope is not None:
        rope = attention.k_rope[keys].double()
        rope = rope if rope.dim() == 3 else rope[:, None].expand(-1, heads, -1)
        k = torch.cat([k, rope], dim=-1)
    q, lse = attention.q[row].double(), op.lse[row].double()
    scores = attention.weights.scale * torch.einsum("hd,nhd->hn", q, k)
    weights = torch.exp(scores - lse[:, None])
    if attention.weights.sink is not None:
        weights = weights / (1 + torch.exp(attention.weights.sink.double() - lse))[:, None]
    return weights.sum(0)


class ReferenceCall(NamedTuple):
    """The definition as a launch."""

    operands: LossOperands
    results: Any
    """The loss, float32 [total_q], or LossGradients."""

    def run(self) -> None:
        """Write every element."""
        exact = index_loss(self.operands)
        if isinstance(self.results, LossGradients):
            for name, written in self.results.tensors().items():
                written.copy_(getattr(exact, name))
        else:
            self.results.copy_(exact.loss)


def calls(plan: object, operands: LossOperands, results: Any) -> Iterator[ReferenceCall]:
    """The one call."""
    yield ReferenceCall(operands, results)
