"""Dense MLA prefill on the CPU, MHA form.

Called by kernels/launch.py only. A panel is up to `panel_rows` queries of one sequence and one
group of heads: the piece of work that one thread takes (see workers.py). It walks the keys in
blocks of BN, packs each block to fp32 once, and shows it to every tile of BM queries in the panel:

    panel   for block in keys: pack K (nope and rope) and V; for tile in tiles: tile.add_block
    tile    scores = q . k, batched over the heads; mask; online softmax

With a window a panel begins at the first key that it sees, and so does a tile: keys before it are
skipped, not masked. Rope rows that all heads share, and heads of K and V that several share, are
spread over the group in that scratch block only. All arithmetic is fp32: torch's CPU products of
bf16 matrices return bf16 scores, and that rounding would cost more accuracy than the rounding of
the output itself.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from openmla.kernels.cpu.online_softmax import (
    OnlineSoftmax,
    hide_future_keys,
    hide_past_keys,
    hide_unset_keys,
    is_tame,
)
from openmla.kernels.cpu.plan import CpuConfig
from openmla.kernels.cpu.workers import divide
from openmla.kernels.cpu.workspace import Workspace
from openmla.operands import DenseOperands, Results
from openmla.sequences import SequenceSpan, first_key, page_rows, ragged_spans, visible_keys


def dense(config: CpuConfig, op: DenseOperands, results: Results) -> None:
    """Fill `results`; rows that belong to no sequence stay empty rows."""
    heads, rows = op.q.shape[1], config.panel_rows
    panels, scores = [], 0
    for span in ragged_spans(op.cu_seqlens_q, op.cu_seqlens_k, op.k_start):
        scores += heads * span.q_len * min(span.k_len, op.window or span.k_len)
        for group in config.head_groups(heads, span.q_len):
            for start in range(0, span.q_len, rows):
                tiles = range(start, min(start + rows, span.q_len), config.BM)
                panels.append(_Panel(span, group, tiles))
    flops = 2.0 * scores * (op.q.shape[2] + op.v.shape[2])
    divide(lambda work, panel: _panel(config, op, results, work, *panel), panels, flops)


class _Panel(NamedTuple):
    """Queries of one sequence and one group of heads: tiles that begin at `starts`."""

    span: SequenceSpan
    heads: slice
    starts: range


def _panel(
    config: CpuConfig,
    op: DenseOperands,
    results: Results,
    work: Workspace,
    span: SequenceSpan,
    heads: slice,
    starts: range,
) -> None:
    """All tiles that begin at `starts`, block of keys by block of keys."""
    stops = [min(start + config.BM, starts.stop) for start in starts]
    tiles = [_Tile(op, span, heads, *ends) for ends in zip(starts, stops, strict=True)]
    for first in range(tiles[0].first_key, tiles[-1].key_limit, config.BN):
        last = min(first + config.BN, tiles[-1].key_limit)
        keys = slice(span.k_start + first, span.k_start + last)
        k = _pack_keys(op, work, span, heads, first, last)
        v = work.pack("v", op.of_heads(op.v[keys], heads).transpose(0, 1))
        block = _Block(first, last, k, v, is_tame(v))
        for tile in tiles:
            tile.add_block(work, block)
    for tile in tiles:
        tile.store(results)


def _pack_keys(
    op: DenseOperands, work: Workspace, span: SequenceSpan, heads: slice, first: int, last: int
) -> Tensor:
    """Keys first … last-1 of a sequence, nope and rope side by side: [group, n, d_qk]."""
    rows = slice(span.k_start + first, span.k_start + last)
    nope = op.of_heads(op.k_nope[rows], heads).transpose(0, 1)
    d_nope = nope.shape[-1]
    k = work.take("k", *nope.shape[:2], op.q.shape[-1])
    k[..., :d_nope] = nope
    if op.rope_cache is not None and op.block_table is not None:
        slots = page_rows(op.block_table[span.number], op.rope_cache.page_size, first, last)
        k[..., d_nope:] = op.rope_cache.read(slots, slice(op.rope_cache.latent, None))
    elif op.k_rope is not None:
        rope = op.k_rope[rows]
        shared = rope.dim() == 2
        k[..., d_nope:] = rope if shared else op.of_heads(rope, heads).transpose(0, 1)
    return k


class _Block(NamedTuple):
    """Keys first … last-1 of a sequence, packed for one group of heads."""

    first: int
    last: int
    k: Tensor
    v: Tensor
    tame: bool
    """Whether sums of v cannot overflow or be NaN."""


class _Tile:
    """Queries start … stop-1 of a sequence, one group of heads, and their running softmax."""

    def __init__(
        self, op: DenseOperands, span: SequenceSpan, heads: slice, start: int, stop: int
    ) -> None:
        self.op, self.span, self.heads, self.start = op, span, heads, start
        self.tokens = slice(span.q_start + start, span.q_start + stop)
        self.key_limit = visible_keys(stop - 1, span.q_len, span.k_len, op.causal)
        self.first_key = first_key(
            visible_keys(start, span.q_len, span.k_len, op.causal), op.window
        )
        q = op.q[self.tokens, heads].transpose(0, 1).float() * op.weights.scale
        if op.weights.q_scale is not None:
            q = q * op.weights.q_scale[self.tokens, None]
        self.q = q.contiguous()
        self.state = OnlineSoftmax(q.shape[0], stop - start, op.v.shape[-1])

    def add_block(self, work: Workspace, block: _Block) -> None:
        """Take in the keys of a block, or those of them that this tile sees."""
        first = max(block.first, self.first_key)
        n = min(block.last, self.key_limit) - first
        if n <= 0:
            return
        here = slice(first - block.first, first - block.first + n)
        scores = work.take("scores", *self.q.shape[:2], n)
        torch.bmm(self.q, block.k[:, here].transpose(1, 2), out=scores)
        if self.op.weights.k_scale is not None:
            key = self.span.k_start + first
            scores.mul_(self.op.weights.k_scale[key : key + n])
        if self.op.causal:
            hide_future_keys(scores, self.span, self.start, first)
        if self.op.window:
            hide_past_keys(scores, self.span, self.start, first, self.op.window)
        if self.op.key_mask is not None:
            hide_unset_keys(scores, self.op.key_mask[self.tokens], first)
        self.state.add_block(scores, block.v[:, here], block.tame)

    def store(self, results: Results) -> None:
        """Normalize and write this tile's rows."""
        sink = self.op.weights.sink
        out, lse, max_logits = self.state.finish(None if sink is None else sink[self.heads, None])
        results.write((self.tokens, self.heads), out.transpose(0, 1), lse.T, max_logits.T)
