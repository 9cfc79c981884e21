"""`CompressedAttention`: a layer of DeepSeek-V4, from hidden states to hidden states.

A token's hidden state x becomes one row of 512, K and V of all heads at once, with its last 64
columns turned by the token's position. Beside the rows of the last 128 tokens a query sees rows
that stand for 4 or 128 tokens each, pooled from their values and gates (openmla.compressor), normed
and turned by the position of their first token:

    ratio 0      the window alone
    ratio 4      and those of the rows so far that the layer's indexer chooses
    ratio 128    and all rows so far

Both are one softmax with a sink per head (openmla.mla_attend). V was turned with K, so the result
is turned back by the query's position, and projected in groups of heads. Parameters are named as in
Transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

import openmla
from openmla import checks
from openmla.compressor import compress_rows
from openmla.errors import InvalidArgument, Unsupported
from openmla.indexer.problem import DIM
from openmla.nn.batch import Batch
from openmla.nn.compressed.cache import CompressedCache, CompressorState, NewRows, Rows
from openmla.nn.compressed.config import CompressedConfig
from openmla.nn.indexer import fold
from openmla.nn.rope import turn_tail
from openmla.sources import Listed, Source, Span


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


class RowIndexer(Compressor):
    """Which compressed rows a query attends to: by keys that are compressed likewise."""

    def __init__(self, config: CompressedConfig) -> None:
        super().__init__(config, DIM)
        self.q_b_proj = nn.Linear(config.q_lora, config.index_heads * DIM, bias=False)
        self.scorer = Scorer(config)

    def project(self, x: Tensor, residual: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q [tokens, heads, 128] and weights fp32 [tokens, heads], all factors in."""
        heads = self.config.index_heads
        q = self.q_b_proj(residual).view(len(x), heads, DIM)
        cos, sin = self.config.rope.cos_sin(positions, x.dtype)
        q = turn_tail(q, cos[:, None], sin[:, None])
        return q, self.scorer.weights_proj(x).float() * (heads * DIM) ** -0.5


class SelectingCompressor(Compressor):
    """A compressor with an indexer of its rows."""

    def __init__(self, config: CompressedConfig) -> None:
        super().__init__(config, config.width)
        self.indexer = RowIndexer(config)


class CompressedAttention(nn.Module):
    """One attention layer over ragged batches and paged caches, without gradients.

    Args:
        config: sizes, rotary embedding and ratio of the layer; weights are untrained.
    """

    def __init__(self, config: CompressedConfig) -> None:
        super().__init__()
        self.config = config
        rows = config.heads * config.width
        self.q_a_proj = nn.Linear(config.hidden, config.q_lora, bias=False)
        self.q_a_norm = nn.RMSNorm(config.q_lora, eps=config.eps)
        self.q_b_proj = nn.Linear(config.q_lora, rows, bias=False)
        self.kv_proj = nn.Linear(config.hidden, config.width, bias=False)
        self.kv_norm = nn.RMSNorm(config.width, eps=config.eps)
        groups = config.o_groups
        self.o_a_proj = nn.Linear(rows // groups, groups * config.o_lora, bias=False)
        self.o_b_proj = nn.Linear(groups * config.o_lora, config.hidden, bias=False)
        self.sinks = nn.Parameter(torch.zeros(config.heads))
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

    def load(
        self, source: nn.Module | Mapping[str, Tensor], prefix: str = ""
    ) -> CompressedAttention:
        """Take the weights of an attention module, or of a state dict under `prefix`.

        Args:
            source: the model's own attention module, or tensors by the names of its parameters.
            prefix: what names of the state dict begin with, such as "model.layers.0.self_attn.";
                others are left alone. Empty: all are the layer's.

        Raises:
            RuntimeError: torch's own, where weights are missing, left over or of another shape.
        """
        state = source.state_dict() if isinstance(source, nn.Module) else source
        own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        self.load_state_dict(own)
        return self

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
        _check(x, cache, batch, rows, self.config)
        if checks.needs_gradients(x, *self.parameters()):
            raise Unsupported(
                "gradients of CompressedAttention: its caches carry none", "torch.no_grad()"
            )
        with torch.no_grad():
            return self._forward(x, cache, batch, rows)

    def _forward(
        self, x: Tensor, cache: CompressedCache, batch: Batch, rows: Rows | None
    ) -> Tensor:
        cos, sin = (t[:, None] for t in self.config.rope.cos_sin(batch.positions, x.dtype))
        residual = self.q_a_norm(self.q_a_proj(x))
        q = self.q_b_proj(residual).view(len(x), -1, self.config.width)
        q = turn_tail(rms_norm(q, q.shape[2:], eps=self.config.eps), cos, sin)
        kv = turn_tail(self.kv_norm(self.kv_proj(x)), cos[:, 0], sin[:, 0])
        cache.window.append(kv, None, batch.slots(cache.window.page_size))
        sources: list[Source] = [self._window(cache, batch)]
        if self.compressor is not None and rows is not None:
            sources += self._compressed(self.compressor, x, residual, cache, batch, rows)
        scale = self.config.width**-0.5
        out = openmla.mla_attend(q, sources, scale=scale, sink=self.sinks.float())
        return self._project(turn_tail(out, cos, -sin))

    def _window(self, cache: CompressedCache, batch: Batch) -> Span:
        assert batch.block_table is not None
        last = batch.positions.int()
        first = last - self.config.window + 1
        return Span(cache.window, batch.block_table, batch.sequences.int(), first, last + 1)

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
        of = batch.sequences.int()
        return [Span(cache.rows, rows.block_table, of, torch.zeros_like(ends), ends)]

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

    def _project(self, out: Tensor) -> Tensor:
        """[tokens, heads, width] -> [tokens, hidden]; a group of heads has a weight of its own."""
        groups = self.config.o_groups
        grouped = out.reshape(len(out), groups, -1)
        weight = self.o_a_proj.weight.view(groups, -1, grouped.shape[2])
        low = torch.einsum("tgi,goi->tgo", grouped, weight)
        projected: Tensor = self.o_b_proj(low.flatten(1))
        return projected


def _check(
    x: Tensor, cache: CompressedCache, batch: Batch, rows: Rows | None, config: CompressedConfig
) -> None:
    if x.shape != (batch.tokens, config.hidden):
        expected = f"[{batch.tokens}, {config.hidden}], as the batch has tokens"
        raise InvalidArgument("x", expected, f"shape {tuple(x.shape)}")
    if batch.block_table is None:
        raise InvalidArgument("batch", "a block_table: the pages of the window", "none")
    if not config.ratio:
        return
    needed: list[object] = [cache.rows, cache.state]
    needed += [cache.keys, cache.key_state] if config.index_heads else []
    if any(part is None for part in needed):
        raise InvalidArgument("cache", f"what a layer of ratio {config.ratio} keeps", "less")
    if rows is None:
        raise InvalidArgument("rows", "the pages of compressed rows", "None")
    sequences = len(batch.new)
    if rows.block_table.dim() != 2 or rows.block_table.shape[0] != sequences:
        got = f"shape {tuple(rows.block_table.shape)}"
        raise InvalidArgument("rows.block_table", f"[{sequences}, max_pages]", got)
    if rows.requests.shape != (sequences,):
        got = f"shape {tuple(rows.requests.shape)}"
        raise InvalidArgument("rows.requests", f"[{sequences}]", got)
