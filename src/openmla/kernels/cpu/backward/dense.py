"""Gradients of dense MLA prefill on the CPU, MHA form.

A sequence and a group of heads at a time: query tiles are packed to fp32 once, with their row
statistics; then keys are walked in blocks, each of which every tile that sees it meets once:

    tile     q, d_out in fp32; reference of its exponents, D = sum(out * d_out), d_q so far
    block    for tile in tiles: P, dS; d_v += P^T d_out; d_k += dS^T q; tile.d_q += dS k

Five products. Everything is added in the order of blocks, tiles and heads, in fp32, so bits are
the same every time; they depend on the sequence alone, because the groups of heads do. Formulas are
those of openmla.backward.reference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from openmla.backward.operands import BackwardOperands, Gradients
from openmla.kernels.cpu.backward.plan import CpuBackwardConfig
from openmla.kernels.cpu.online_softmax import (
    LOG2_E,
    hide_future_keys,
    hide_past_keys,
    hide_unset_keys,
)
from openmla.kernels.cpu.workspace import Workspace
from openmla.operands import DenseOperands
from openmla.sequences import SequenceSpan, first_key, first_key_of, ragged_spans, visible_keys


def dense_backward(config: CpuBackwardConfig, op: BackwardOperands, grads: Gradients) -> None:
    """Fill `grads`, which hold +0."""
    work, forward = Workspace(), op.forward
    for span in ragged_spans(forward.cu_seqlens_q, forward.cu_seqlens_k):
        if not span.q_len or not span.k_len:
            continue
        rope = _RopeSum(forward, span) if grads.kv is not None else None
        for heads in config.tiles.head_groups(forward.q.shape[1], span.q_len):
            _sequence(config, op, grads, work, span, heads, rope)
        if rope is not None:
            rope.store(grads)
    if grads.sink is not None:
        grads.sink.add_(0.0)  # of -0, +0


class _RopeSum:
    """The gradient of rope rows that all heads share: heads are added one after another."""

    def __init__(self, op: DenseOperands, span: SequenceSpan) -> None:
        shared = op.k_rope is not None and op.k_rope.dim() == 2
        self.rows = slice(span.k_start, span.k_start + span.k_len)
        self.sum: Tensor | None = None
        if shared and op.k_rope is not None:
            shape = (span.k_len, op.k_rope.shape[1])
            self.sum = torch.zeros(shape, dtype=torch.float32, device="cpu")

    def add(self, first: int, per_head: Tensor) -> None:
        """Take in [group, n, d_rope] of keys first … first + n - 1."""
        if self.sum is not None:
            here = self.sum[first : first + per_head.shape[1]]
            for head in per_head:
                here += head

    def store(self, grads: Gradients) -> None:
        """Round once, and write."""
        if self.sum is not None and grads.k_rope is not None:
            grads.k_rope[self.rows] = self.sum.add_(0.0).to(grads.k_rope.dtype)


def _sequence(
    config: CpuBackwardConfig,
    op: BackwardOperands,
    grads: Gradients,
    work: Workspace,
    span: SequenceSpan,
    heads: slice,
    rope: _RopeSum | None,
) -> None:
    """One sequence, one group of heads."""
    BM, BN = config.tiles.BM, config.tiles.BN
    starts = range(0, span.q_len, BM)
    tiles = [_Tile(op, span, heads, i, min(i + BM, span.q_len)) for i in starts]
    tiles = [tile for tile in tiles if tile.key_limit]
    end = max((tile.key_limit for tile in tiles), default=0)
    for first in range(first_key_of(span, op.forward.window), end, BN):
        last = min(first + BN, span.k_len)
        block = _Block(op.forward, work, span, heads, first, last, grads.kv is not None)
        for tile in tiles:
            tile.meet(work, block, grads.q is not None)
        block.store(grads, span, heads, rope)
    for tile in tiles:
        tile.store(grads)


class _Rows(NamedTuple):
    """Statistics of a tile's rows, [group, rows]."""

    total: Tensor
    """What exponents of weights are relative to: lse with the sink; +inf where no key is seen."""
    alone: Tensor
    """What they would be relative to without the sink: lse; +inf where no key is seen."""
    d_sum: Tensor
    """D = sum(out * d_out), less the gradient of lse where there is no sink."""
    d_lse: Tensor | None
    """The gradient of lse where there is a sink."""


class _Tile:
    """Queries start … stop-1 of a sequence, one group of heads."""

    def __init__(
        self, op: BackwardOperands, span: SequenceSpan, heads: slice, start: int, stop: int
    ) -> None:
        forward = op.forward
        self.op, self.span, self.heads, self.start = forward, span, heads, start
        self.tokens = slice(span.q_start + start, span.q_start + stop)
        self.key_limit = visible_keys(stop - 1, span.q_len, span.k_len, forward.causal)
        self.first_key = first_key(
            visible_keys(start, span.q_len, span.k_len, forward.causal), forward.window
        )
        self.q = forward.q[self.tokens, heads].transpose(0, 1).float().contiguous()
        lse = op.lse[self.tokens, heads].T
        empty = lse == -torch.inf
        d_out = op.d_out[self.tokens, heads].transpose(0, 1).float()
        self.d_out = d_out.masked_fill(empty.unsqueeze(-1), 0.0).contiguous()
        out = op.out[self.tokens, heads].transpose(0, 1).float()
        d_sum = (out * self.d_out).sum(-1)
        self.d_q = torch.zeros_like(self.q)
        self.d_sink: Tensor | None = None
        sink = forward.weights.sink
        total = lse
        if sink is not None:
            column = sink[heads, None]
            total = torch.logaddexp(lse, column)
            share = torch.where(empty, 0.0, 1 / (1 + torch.exp(lse - column)))
            self.d_sink = -(share * d_sum).sum(-1)
        d_lse = None
        if op.d_lse is not None:
            d_lse = op.d_lse[self.tokens, heads].T.masked_fill(empty, 0.0)
            if sink is None:
                d_sum, d_lse = d_sum - d_lse, None
        far = torch.inf
        self.rows = _Rows(
            torch.where(empty, far, total), torch.where(empty, far, lse), d_sum, d_lse
        )

    def meet(self, work: Workspace, block: _Block, wants_q: bool) -> None:
        """Add to the gradients of this tile and of the block."""
        first = max(block.first, self.first_key)
        n = min(block.last, self.key_limit) - first
        if n <= 0:
            return
        op, rows = self.op, self.rows
        here = slice(first - block.first, first - block.first + n)
        k, v = block.k[:, here], block.v[:, here]
        scores = work.take("scores", *self.q.shape[:2], n)
        torch.bmm(self.q, k.transpose(1, 2), out=scores)
        scores.mul_(op.weights.scale)
        if op.causal:
            hide_future_keys(scores, self.span, self.start, first)
        if op.window:
            hide_past_keys(scores, self.span, self.start, first, op.window)
        if op.key_mask is not None:
            hide_unset_keys(scores, op.key_mask[self.tokens], first)
        by_lse = None
        if rows.d_lse is not None:
            by_lse = scores.sub(rows.alone.unsqueeze(-1)).mul_(LOG2_E).exp2_()
            by_lse.mul_(rows.d_lse.unsqueeze(-1))
        p = scores.sub_(rows.total.unsqueeze(-1)).mul_(LOG2_E).exp2_()
        if block.d_v is not None:
            block.d_v[:, here].baddbmm_(p.transpose(1, 2), self.d_out)
        d_scores = work.take("d_scores", *p.shape)
        torch.bmm(self.d_out, v.transpose(1, 2), out=d_scores)
        d_scores.sub_(rows.d_sum.unsqueeze(-1)).mul_(p)
        if by_lse is not None:
            d_scores.add_(by_lse)
        if block.d_k is not None:
            block.d_k[:, here].baddbmm_(d_scores.transpose(1, 2), self.q)
        if wants_q:
            self.d_q.baddbmm_(d_scores, k)

    def store(self, grads: Gradients) -> None:
        """Write d_q of this tile, and add its part of d_sink."""
        if grads.q is not None:
            d_q = self.d_q.mul_(self.op.weights.scale).add_(0.0)
            # Rows that see no key: 0 * Inf of others must not reach them.
            empty = (self.rows.alone == torch.inf).unsqueeze(-1)
            d_q.masked_fill_(empty, 0.0)
            grads.q[self.tokens, self.heads] = d_q.transpose(0, 1).to(grads.q.dtype)
        if grads.sink is not None and self.d_sink is not None:
            grads.sink[self.heads] += self.d_sink


class _Block:
    """Keys first … last-1 of a sequence, packed for one group of heads, and their gradients."""

    def __init__(
        self,
        op: DenseOperands,
        work: Workspace,
        span: SequenceSpan,
        heads: slice,
        first: int,
        last: int,
        wanted: bool,
    ) -> None:
        self.first, self.last, self.scale = first, last, op.weights.scale
        rows = slice(span.k_start + first, span.k_start + last)
        nope = op.k_nope[rows, heads].transpose(0, 1)
        self.d_nope = nope.shape[-1]
        self.k = work.take("k", *nope.shape[:2], op.q.shape[-1])
        self.k[..., : self.d_nope] = nope
        if op.k_rope is not None:
            rope = op.k_rope[rows]
            shared = rope.dim() == 2
            self.k[..., self.d_nope :] = rope if shared else rope[:, heads].transpose(0, 1)
        self.v = work.pack("v", op.v[rows, heads].transpose(0, 1))
        self.d_k = work.take("d_k", *self.k.shape).zero_() if wanted else None
        self.d_v = work.take("d_v", *self.v.shape).zero_() if wanted else None

    def store(
        self, grads: Gradients, span: SequenceSpan, heads: slice, rope: _RopeSum | None
    ) -> None:
        """Write the block's rows; a shared rope row waits for the other heads."""
        if grads.kv is None or self.d_k is None or self.d_v is None or rope is None:
            return
        rows = slice(span.k_start + self.first, span.k_start + self.last)
        d_k = self.d_k.mul_(self.scale).add_(0.0)
        both = torch.cat([d_k[..., : self.d_nope], self.d_v.add_(0.0)], dim=-1)
        grads.kv[rows, heads] = both.transpose(0, 1).to(grads.kv.dtype)
        if grads.k_rope is not None and grads.k_rope.dim() == 3:
            by_token = d_k[..., self.d_nope :].transpose(0, 1)
            grads.k_rope[rows, heads] = by_token.to(grads.k_rope.dtype)
        else:
            rope.add(self.first, d_k[..., self.d_nope :])
