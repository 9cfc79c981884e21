"""`CompressedAttention`: a layer of DeepSeek-V4, from hidden states to hidden states.

A token's hidden state x becomes one row of 512, K and V of all heads at once, with its last 64
columns turned by the token's position. Beside the rows of the last 128 tokens a query sees rows
that stand for 4 or 128 tokens each, pooled from their values and gates (openmla.compressor), normed
and turned by the position of their first token:

    ratio 0      the window alone
    ratio 4      and those of the rows so far that the layer's indexer chooses
    ratio 128    and all rows so far

Both are one softmax with a sink per head (openmla.mla_attend); what layers of V4.1 do alike is in
openmla.nn.compressed.row_attention. Parameters are named as in Transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import openmla
from openmla.compressor import compress_rows
from openmla.indexer.problem import DIM
from openmla.nn.batch import Batch
from openmla.nn.compressed.cache import CompressedCache, CompressorState, NewRows, Rows
from openmla.nn.compressed.config import CompressedConfig
from openmla.nn.compressed.row_attention import RowAttention, up_to
from openmla.nn.indexer import fold
from openmla.nn.rope import turn_tail
from openmla.sources import Listed, Source


class Compressor(nn.Module):
    """From hidden states to rows of several tokens."""

    def __init__(self, config: CompressedConfig, width: int) -> None:
        super().__init__()
        columns = width * (2 if config.overlap else 1)
        self.config = config
        self.kv_proj = nn.Linear(config.hidden, columns, bias=False)
        self.gate_proj = nn.Linear(config.hidden, columns, bias=False)
        self.position_bias = nn.Parameter(torch.zeros(config.ratio, columns))
        self.kv_norm = nn.RMSNorm(width, eps=config.eps)

    def completed(
        self, x: Tensor, batch: Batch, state: CompressorState, requests: Tensor
    ) -> NewRows:
        """What the new tokens x [tokens, hidden] complete; the state takes them."""
        ratio = self.config.ratio
        done = state.advance(self.kv_proj(x), self.gate_proj(x), batch, requests)
        pooled = compress_rows(
            done.kv,
            done.gate,
            self.position_bias,
            ratio=ratio,
            overlap=state.overlap,
            previous=done.previous,
        )[:, 0]
        normed = self.kv_norm(pooled.to(x.dtype))
        turns = self.config.rope.cos_sin(done.place * ratio, x.dtype)
        return NewRows(turn_tail(normed, *turns), done.sequence, done.place)


class Scorer(nn.Module):
    """How much each head of the indexer counts for a token."""

    def __init__(self, config: CompressedConfig) -> None:
        super().__init__()
        self.weights_proj = nn.Linear(config.hidden, config.index_heads, bias=False)


def index_queries(
    q: Tensor, weights: Tensor, config: CompressedConfig, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Turned queries [tokens, heads, 128] and weights fp32 [tokens, heads] with all factors in, of
    what an indexer's projections gave."""
    heads = config.index_heads
    cos, sin = config.rope.cos_sin(positions, q.dtype)
    q = turn_tail(q.view(len(q), heads, DIM), cos[:, None], sin[:, None])
    return q, weights.float() * (heads * DIM) ** -0.5


class RowIndexer(Compressor):
    """Which compressed rows a query attends to: by keys that are compressed likewise."""

    def __init__(self, config: CompressedConfig) -> None:
        super().__init__(config, DIM)
        self.q_b_proj = nn.Linear(config.q_lora, config.index_heads * DIM, bias=False)
        self.scorer = Scorer(config)

    def project(self, x: Tensor, residual: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q [tokens, heads, 128] and weights fp32 [tokens, heads], all factors in."""
        q = self.q_b_proj(residual)
        return index_queries(q, self.scorer.weights_proj(x), self.config, positions)


class SelectingCompressor(Compressor):
    """A compressor with an indexer of its rows."""

    def __init__(self, config: CompressedConfig) -> None:
        super().__init__(config, config.width)
        self.indexer = RowIndexer(config)


class CompressedAttention(RowAttention):
    """One attention layer over ragged batches and paged caches, without gradients.

    A prompt in chunks has the outputs that it has whole, but for torch's own products: their last
    bits depend on how many tokens there are, and a cached element may then be rounded to the
    neighbor of what it is otherwise.

    Args:
        config: sizes, rotary embedding and ratio of the layer; weights are untrained.
    """

    def __init__(self, config: CompressedConfig) -> None:
        super().__init__(config)
        self.compressor: Compressor | None = None
        if config.index_heads:
            self.compressor = SelectingCompressor(config)
        elif config.ratio:
            self.compressor = Compressor(config, config.width)

    @staticmethod
    def from_config(config: Any, layer: int) -> CompressedAttention:
        """Layer number `layer`, untrained, of the model that a Transformers configuration says.

        Args:
            config: a configuration of Transformers of type deepseek_v4, or an object with the same
                attributes.
            layer: which layer, from 0; layers differ in their ratio.

        Raises:
            InvalidArgument: there is no such layer.
            Unsupported: the model is another, or the layer's type, indexer or rotary embedding is
                not served.
        """
        return CompressedAttention(CompressedConfig.of(config, layer))

    def forward(
        self, x: Tensor, cache: CompressedCache, batch: Batch, rows: Rows | None = None
    ) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]. New rows are appended to the caches.

        Every token of a sequence must go through the layer once, in order: the state of its request
        is made of them. A call that needs gradients is refused: run it under torch.no_grad(), or
        with parameters that require none.

        Args:
            x: [tokens, hidden], hidden states of the batch's new tokens, end to end.
            cache: the caches of this layer, as CompressedCache.allocate makes them for its config.
            batch: the sequences, with a block_table of the window's pages.
            rows: the pages of compressed rows and the lines of state; None for a layer of ratio 0.

        Raises:
            InvalidArgument: an argument is wrong; the message names it, and what was expected.
            Unsupported: no kernel serves such a call; the message says what would.
        """
        self.check(x, cache, batch, rows)

        def others(residual: Tensor) -> list[Source]:
            if self.compressor is None or rows is None:
                return []
            return self._compressed(self.compressor, x, residual, cache, batch, rows)

        with torch.no_grad():
            return self.attend(x, cache.window, batch, others)

    def _compressed(
        self,
        compressor: Compressor,
        x: Tensor,
        residual: Tensor,
        cache: CompressedCache,
        batch: Batch,
        rows: Rows,
    ) -> list[Source]:
        """The compressed rows that each query sees; none where no sequence has one."""
        assert cache.rows is not None and cache.state is not None
        new = compressor.completed(x, batch, cache.state, rows.requests)
        cache.rows.append(new.values, None, new.slots(rows.block_table, cache.rows.page_size))
        ends = ((batch.positions + 1) // self.config.ratio).int()
        chosen = None
        if isinstance(compressor, SelectingCompressor):
            chosen = self._choose(compressor.indexer, x, residual, ends, cache, batch, rows)
        most = max(batch.keys, default=0) // self.config.ratio
        if not most:
            return []
        if chosen is not None:
            return [Listed(cache.rows, chosen)]
        return [up_to(ends, cache.rows, rows.block_table, batch)]

    def _choose(
        self,
        indexer: RowIndexer,
        x: Tensor,
        residual: Tensor,
        ends: Tensor,
        cache: CompressedCache,
        batch: Batch,
        rows: Rows,
    ) -> Tensor | None:
        """int32 [tokens, topk]: physical rows; None where no sequence has more than that."""
        assert cache.keys is not None and cache.key_state is not None
        new = indexer.completed(x, batch, cache.key_state, rows.requests)
        cache.keys.append(new.values, new.slots(rows.block_table, cache.keys.page_size))
        if max(batch.keys, default=0) // self.config.ratio <= self.config.topk:
            return None
        values, folded = fold(*indexer.project(x, residual, batch.positions))
        chosen = openmla.index_topk(
            values,
            cache.keys,
            folded,
            self.config.topk,
            cu_seqlens_q=batch.cu_seqlens,
            block_table=rows.block_table,
            cache_lengths=batch.cache_lengths // self.config.ratio,
            ends=ends,
        )
        assert isinstance(chosen, Tensor)
        return chosen
