"""An indexer's loss and its gradients on the CPU, in fp32, a tile of query rows at a time.

    tile   A = sum over attention's heads of their weights      [rows, keys]
           I = sum over index heads of weight * relu(q . k)     [rows, keys]
           p = A / sum(A), softmax(I), loss; or dI, and of it dq, dw, and the tile's part of dk

Heads are added one after another, tiles from a sequence's first to its last: bits are the same
every time and depend on the sequence alone. Formulas are those of openmla.indexer.loss_reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from openmla.indexer.loss_operands import LossGradients, LossOperands
from openmla.kernels.cpu.indexer_loss.plan import CpuLossConfig
from openmla.kernels.cpu.online_softmax import LOG2_E, hide_future_keys, hide_unset_keys
from openmla.sequences import SequenceSpan, ragged_spans, visible_keys


class Tile(NamedTuple):
    """Queries start … start + rows - 1 of a sequence and the first `n` of its keys."""

    span: SequenceSpan
    start: int
    tokens: slice
    keys: slice


class Shares(NamedTuple):
    """What a tile's rows look at, [rows, n], 0 where a key is not seen."""

    scores: Tensor
    """I, and -inf where a key is not seen."""
    lse: Tensor
    """[rows]: of I; +inf in a row that has no target."""
    target: Tensor
    """p; all 0 in a row that has no target."""


def loss(config: CpuLossConfig, op: LossOperands, out: Tensor) -> None:
    """KL(p || softmax(I)) of every row, into `out`."""
    out.zero_()
    for tile in _tiles(config, op):
        scores, lse, target = _shares(config, op, tile)
        seen = target > 0
        far = torch.where(seen, target.log() - (scores - lse[:, None]), 0.0)
        out[tile.tokens] = (target * far).sum(-1)


def gradients(config: CpuLossConfig, op: LossOperands, grads: LossGradients) -> None:
    """Gradients of sum(loss * d_loss), into `grads`."""
    assert op.d_loss is not None
    grads.clear()
    d_k = torch.zeros(op.index_k.shape, dtype=torch.float32, device="cpu")
    for tile in _tiles(config, op):
        scores, lse, target = _shares(config, op, tile)
        come = torch.where(lse < torch.inf, op.d_loss[tile.tokens], 0.0)
        d_scores = scores.sub_(lse[:, None]).mul_(LOG2_E).exp2_().sub_(target)
        d_scores.mul_(come[:, None])
        k = op.index_k[tile.keys].float()
        for heads, q, z in _products(config, op, tile, k):
            w = op.index_weights[tile.tokens, heads].T
            grads.weights[tile.tokens, heads] = (z.clamp_min(0) * d_scores).sum(-1).T
            d_z = torch.where(z > 0, d_scores, 0.0).mul_(w.unsqueeze(-1))
            d_q = torch.bmm(d_z, k.expand(len(q), -1, -1)).add_(0.0)
            grads.q[tile.tokens, heads] = d_q.transpose(0, 1).to(grads.q.dtype)
            for one, rows in zip(d_z, q, strict=True):
                d_k[tile.keys].addmm_(one.T, rows)
    grads.weights.add_(0.0)  # of -0, +0
    grads.k.copy_(d_k.add_(0.0))


def _tiles(config: CpuLossConfig, op: LossOperands) -> Iterator[Tile]:
    """Tiles with a row that sees a key, in order."""
    attention = op.attention
    for span in ragged_spans(attention.cu_seqlens_q, attention.cu_seqlens_k):
        for start in range(0, span.q_len, config.rows):
            stop = min(start + config.rows, span.q_len)
            n = visible_keys(stop - 1, span.q_len, span.k_len, attention.causal)
            if n:
                tokens = slice(span.q_start + start, span.q_start + stop)
                yield Tile(span, start, tokens, slice(span.k_start, span.k_start + n))


def _shares(config: CpuLossConfig, op: LossOperands, tile: Tile) -> Shares:
    """Scores of the indexer and the target of a tile."""
    weights = _head_sums(config, op, tile)
    total = weights.sum(-1, keepdim=True)
    target = weights.div_(torch.where(total > 0, total, 1.0))
    k = op.index_k[tile.keys].float()
    scores = torch.zeros_like(target)
    for heads, _, z in _products(config, op, tile, k):
        each = z.clamp_min_(0).mul_(op.index_weights[tile.tokens, heads].T.unsqueeze(-1))
        for one in each:
            scores += one
    _hide(op, tile, scores)
    lse = torch.where(total[:, 0] > 0, torch.logsumexp(scores, dim=-1), torch.inf)
    return Shares(scores, lse, target)


def _head_sums(config: CpuLossConfig, op: LossOperands, tile: Tile) -> Tensor:
    """[rows, n]: attention's weights, summed over its heads."""
    attention = op.attention
    sink = attention.weights.sink
    total = 0
    for heads in _groups(attention.q.shape[1], config.group):
        q = attention.q[tile.tokens, heads].transpose(0, 1).float()
        k = attention.k_nope[tile.keys, heads].transpose(0, 1).float()
        if attention.k_rope is not None:
            rope = attention.k_rope[tile.keys].float()
            rope = (
                rope[:, heads].transpose(0, 1) if rope.dim() == 3 else rope.expand(len(q), -1, -1)
            )
            k = torch.cat([k, rope], dim=-1)
        lse = op.lse[tile.tokens, heads].T
        relative = lse if sink is None else torch.logaddexp(lse, sink[heads, None])
        relative = torch.where(lse == -torch.inf, torch.inf, relative)
        scores = torch.bmm(q, k.transpose(1, 2)).mul_(attention.weights.scale)
        _hide(op, tile, scores)
        for one in scores.sub_(relative.unsqueeze(-1)).mul_(LOG2_E).exp2_():
            total = total + one
    assert isinstance(total, Tensor)
    return total


def _products(
    config: CpuLossConfig, op: LossOperands, tile: Tile, k: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(heads, q [group, rows, width], z [group, rows, n]) of the indexer, group by group."""
    for heads in _groups(op.index_q.shape[1], config.group):
        q = op.index_q[tile.tokens, heads].transpose(0, 1).float().contiguous()
        yield heads, q, torch.matmul(q, k.T)


def _hide(op: LossOperands, tile: Tile, scores: Tensor) -> None:
    """-inf where a query does not see a key."""
    attention = op.attention
    if attention.causal:
        hide_future_keys(scores, tile.span, tile.start, 0)
    if attention.key_mask is not None:
        hide_unset_keys(scores, attention.key_mask[tile.tokens], 0)


def _groups(heads: int, size: int) -> Iterator[slice]:
    for first in range(0, heads, size):
        yield slice(first, min(first + size, heads))
